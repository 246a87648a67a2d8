"""The order in which the elements of a tensor lie in memory, such as that of channels_last."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Strides = tuple[int, ...]


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions in the order of memory. That of the shape if the tensor is contiguous or not dense."""
    dimensions = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return dimensions
    order = tuple(sorted(dimensions, key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else dimensions


def strides_of(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Return the strides of a dense tensor. Those of dimensions with one element do not matter and are 0."""
    step, strides = 1, [0] * len(shape)
    for dimension in reversed(order):
        if shape[dimension] > 1:
            strides[dimension] = step
            step *= shape[dimension]
    return tuple(strides)
