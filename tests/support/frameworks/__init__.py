"""Training with each framework and wrapper. Needs the environment of ``make test-frameworks``."""
