"""Integers only: which tensors are compressed, as which matrices, and where everything lies."""
