"""The memory of one bucket, and the stages of its step: the reference in plain torch, and the backends."""
