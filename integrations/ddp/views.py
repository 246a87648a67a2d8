"""A bucket's gradients as views of its memory."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Strides = tuple[int, ...]


class Place(NamedTuple):
    """How one gradient lies in DDP's bucket.

    ``bucket`` are its strides there, ``own`` those of a view that DDP would make now, and ``parameter`` the parameter's
    when this was found out. ``is_view``: ``parameter.grad`` is a view of the bucket. ``shown``: it showed ``bucket``.
    ``final``: all this holds until the parameter's strides change.
    """

    bucket: Strides
    own: Strides
    parameter: Strides
    is_view: bool
    shown: bool
    final: bool


def views_of(buffer: Tensor, parameters: Sequence[Tensor], places: dict[Tensor, Place]) -> list[tuple[Tensor, Tensor]]:
    """Return two views of each gradient: of what the bucket holds, and of what DDP will read. Usually they are one.

    A view has the parameter's shape. Of a complex parameter, the last dimension is that of ``torch.view_as_real``.

    DDP makes a view for each parameter when it builds its buckets, and again when it rebuilds them after the first
    step. A view has the parameter's strides if the parameter is dense, else it is contiguous. It stays as it was if
    ``model.to(memory_format=…)`` changes the parameter later. But DDP reads the hook's result with the parameter's
    present strides, unless gradients are views of the buckets (``gradient_as_bucket_view=True``).

    A hook does not see these views (``bucket.gradients()`` ignores strides). It sees ``parameter.grad``, which is the
    view itself or has the same values. ``places`` are what was found out before.
    """
    numels = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
    total = sum(numels)
    if total != buffer.numel():
        raise RuntimeError(f"expected a bucket with the {total} elements of its parameters; got {len(buffer)}")
    views = []
    for piece, parameter in zip(buffer.split(numels), parameters, strict=True):
        place = places.get(parameter)
        if place is None or not place.final or place.parameter != parameter.stride():
            place = places[parameter] = _find(piece, parameter, place)
        held = _strided(piece, parameter, place.bucket)
        same = place.is_view or place.own == place.bucket
        views.append((held, held if same else _strided(piece, parameter, place.own)))
    return views


def _find(piece: Tensor, parameter: Tensor, before: Place | None) -> Place:
    """Find out how a gradient lies in the bucket. The host may wait for the device."""
    gradient = parameter.grad
    own, *others = _likely_strides(parameter)
    likely = list(dict.fromkeys([*([] if before is None else [before.bucket]), own, *others]))

    def place(strides: Strides, *, shown: bool, final: bool, is_view: bool = False) -> Place:
        is_view |= before is not None and before.is_view
        # A gradient that autograd made has the parameter's strides. (Another hook may have replaced the memory.)
        is_view |= gradient is not None and own != strides == strides_of(gradient.shape, memory_order(gradient))
        # While these are not the parameter's own strides, DDP may rebuild its buckets and change them.
        return Place(strides, own, parameter.stride(), is_view, shown, final and strides == own)

    if len(likely) == 1 or gradient is None or gradient.layout != torch.strided:
        return place(likely[0], shown=False, final=len(likely) == 1)
    if gradient.data_ptr() == piece.data_ptr():
        return place(strides_of(gradient.shape, memory_order(gradient)), shown=True, final=True, is_view=True)
    values = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    values = values.detach().to(piece.dtype)
    fitting = [s for s in likely if bool(((_strided(piece, parameter, s) == values) | values.isnan()).all())]
    if fitting:
        # Zeros, for example, are equal in every order.
        return place(fitting[0], shown=len(fitting) == 1, final=len(fitting) == 1)
    empty = not piece.any()
    if before is not None and before.shown and before.parameter != parameter.stride() and not empty:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is no longer in DDP's bucket, so that DDP "
            "itself would not average it. Its memory format changed while it had a gradient. Set gradients to None "
            "before model.to(memory_format=…), or convert the model before DistributedDataParallel wraps it"
        )
    # Another hook, which calls this one, may have changed the bucket's values.
    return place(likely[0], shown=False, final=not empty)


def _strided(piece: Tensor, parameter: Tensor, strides: Strides) -> Tensor:
    if parameter.is_complex():
        return piece.as_strided((*parameter.shape, 2), (*(2 * stride for stride in strides), 1))
    return piece.as_strided(parameter.shape, strides)


def _likely_strides(parameter: Tensor) -> list[Strides]:
    """Return strides that a gradient may have in a bucket: the parameter's, those of its shape, and channels_last."""
    dimensions = tuple(range(parameter.dim()))
    orders = [memory_order(parameter), dimensions]
    # channels_last and channels_last_3d.
    if parameter.dim() in (4, 5):
        orders.append((0, *dimensions[2:], 1))
    return [strides_of(parameter.shape, order) for order in orders]


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
