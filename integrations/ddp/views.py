"""A bucket's gradients as views of its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

Strides = tuple[int, ...]
MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats other than contiguous, by the number of dimensions."""


@dataclasses.dataclass(frozen=True)
class Place:
    """How one gradient lies in DDP's bucket.

    Attributes:
        bucket: Strides of the gradient in the bucket, see ``normal``.
        parameter: Strides that the parameter had when this was found out.
        shown: Whether ``parameter.grad`` showed it.
        final: Whether it holds until the parameter's strides change.
    """

    bucket: Strides
    parameter: Strides
    shown: bool
    final: bool


class BucketViews:
    """Finds each gradient in DDP's buckets.

    DDP makes a view for each parameter when it builds its buckets, and again when it rebuilds them after the first
    step. A view has the parameter's strides if the parameter is dense, else it is contiguous. So a gradient's elements
    are in the order in which the parameter lies in memory. If ``model.to(memory_format=…)`` changes the parameter
    later, its view stays as it was until the buckets are rebuilt.

    A hook does not see these views (``bucket.gradients()`` ignores strides). It sees ``parameter.grad``, which is the
    view itself or has the same values.
    """

    def __init__(self) -> None:
        self._places: dict[Tensor, Place] = {}

    def of(self, buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return views of a bucket's gradients, in the bucket's real dtype.

        A view has the parameter's shape. Of a complex parameter, the last dimension is that of ``torch.view_as_real``.

        Raises:
            RuntimeError: The bucket does not have as many elements as its parameters, or a gradient is not in it.
        """
        numels = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
        if sum(numels) != buffer.numel():
            raise RuntimeError(f"expected a bucket with the {sum(numels)} elements of its parameters; got {len(buffer)}")
        pieces = buffer.split(numels)
        return [self._view(piece, parameter) for piece, parameter in zip(pieces, parameters, strict=True)]

    def _view(self, piece: Tensor, parameter: Tensor) -> Tensor:
        if parameter.dim() < 2:
            return piece.view(parameter.shape) if not parameter.is_complex() else piece.view(*parameter.shape, 2)
        place = self._places.get(parameter)
        if place is None or not place.final or place.parameter != parameter.stride():
            place = self._places[parameter] = _find(piece, parameter, place)
        return _strided(piece, parameter, place.bucket)


def _find(piece: Tensor, parameter: Tensor, before: Place | None) -> Place:
    """Find out how a gradient lies in the bucket. The host may wait for the device.

    Raises:
        RuntimeError: The gradient is not in the bucket.
    """
    own, gradient = memory_strides(parameter), parameter.grad
    likely = [own, normal(parameter.shape, torch.empty(parameter.shape, device="meta").stride())]
    if parameter.dim() in MEMORY_FORMATS:
        other = torch.empty(parameter.shape, device="meta", memory_format=MEMORY_FORMATS[parameter.dim()])
        likely.append(normal(parameter.shape, other.stride()))
    if before is not None:
        likely.insert(0, before.bucket)
    likely = list(dict.fromkeys(likely))

    def place(strides: Strides, *, shown: bool, final: bool) -> Place:
        # While these are not the parameter's own strides, DDP may rebuild its buckets and change them.
        return Place(strides, parameter.stride(), shown, final and strides == own)

    if len(likely) == 1 or gradient is None or gradient.layout != torch.strided:
        return place(likely[0], shown=False, final=len(likely) == 1)
    if gradient.data_ptr() == piece.data_ptr():
        return place(normal(gradient.shape, gradient.stride()), shown=True, final=True)
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    gradient = gradient.detach().to(piece.dtype)
    fitting = [s for s in likely if bool(((_strided(piece, parameter, s) == gradient) | gradient.isnan()).all())]
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


def memory_strides(parameter: Tensor) -> Strides:
    """Return the strides of a parameter's view in a bucket that is built now, see ``normal``."""
    laid_out = parameter.permute(sorted(range(parameter.dim()), key=parameter.stride, reverse=True))
    dense = parameter if laid_out.is_contiguous() else torch.empty(parameter.shape, device="meta")
    return normal(parameter.shape, dense.stride())


def normal(shape: Sequence[int], strides: Sequence[int]) -> Strides:
    """Return strides with 0 for dimensions of one element, whose strides do not matter."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
