"""Training with each framework, with every wrapper that it offers. Needs the environment of ``make test-frameworks``."""
