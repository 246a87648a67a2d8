"""One bucket's memory and the stages of its step: the reference in plain torch, and the backends."""
