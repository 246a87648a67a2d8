"""Train a small GPT on text that comes with Python, and average its gradients in several ways; see ``run``."""
