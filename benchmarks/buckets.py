"""A stand-in for the bucket that DDP hands to a communication hook."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.shapes import Shapes


class Bucket:
    """One bucket with all gradients: the part of ``torch.distributed.GradBucket`` that hooks use."""

    def __init__(self, shapes: Shapes, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        numel = sum(math.prod(shape) for shape in shapes)
        self._fresh = torch.randn(numel, generator=generator).to(device)
        self._buffer = self._fresh.clone()
        self._gradients = []
        offset = 0
        for shape in shapes:
            self._gradients.append(self._buffer[offset : offset + math.prod(shape)].view(shape))
            offset += math.prod(shape)

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
