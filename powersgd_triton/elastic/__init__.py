"""Workers that come and go without a restart, under a ``torchft.Manager``."""
