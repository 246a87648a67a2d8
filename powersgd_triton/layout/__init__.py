"""Layouts, in integers only: which tensors are compressed, their matrix shapes, and all offsets."""
