"""The buckets that DDP makes, and a stand-in for the one that it hands to a communication hook."""

import torch
from torch import Tensor

from benchmarks.shapes import count_parameters
from powersgd_triton.planning import bucket_caps
from powersgd_triton.planning.models import Shapes


class FilledBucket:
    """One bucket with all gradients: the part of ``torch.distributed.GradBucket`` that hooks use."""

    def __init__(self, shapes: Shapes, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator(device).manual_seed(0)
        numel = count_parameters(shapes)
        self._fresh = torch.randn(numel, generator=generator, device=device, dtype=dtype)
        self._buffer = self._fresh.clone()
        sizes = [torch.Size(shape).numel() for shape in shapes]
        pieces = self._buffer.split(sizes)
        self._gradients = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def refill(self) -> None:
        """Put fresh gradients where the last hook left its averages."""
        self._buffer.copy_(self._fresh)

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def parameters(self) -> list[Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def ddp_buckets(shapes: Shapes) -> list[Shapes]:
    """Return the buckets that DDP makes of fp32 gradients, with its default sizes.

    Args:
        shapes: Shapes in the order in which the backward pass computes the gradients.
    """
    buckets = bucket_caps.ddp_buckets({str(number): shape for number, shape in enumerate(shapes)})
    return [list(bucket.values()) for bucket in buckets]
