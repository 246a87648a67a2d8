"""The step, what is remembered between steps, and what is saved."""
