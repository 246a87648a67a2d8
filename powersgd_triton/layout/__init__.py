"""Layouts: which tensors are compressed, their matrix shapes, all offsets, formats, and what codecs are given."""
