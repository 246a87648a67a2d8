"""A small GPT trained on text that every Python ships, with gradients averaged in several ways; see ``run``."""
