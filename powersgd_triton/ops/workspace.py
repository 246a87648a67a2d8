"""Scratch memory of kernels."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Scratch memory of one engine's kernels by name and device. Its buckets share it, since they share one stream.

    Attributes:
        captured: Whether a step was captured in a CUDA graph. Its replays use the memory of that time, so it is kept.
        version: Changes when memory is replaced by larger memory.
    """

    def __init__(self) -> None:
        self.captured, self.version = False, 0
        self._memory: dict[tuple[str, torch.device], Tensor] = {}
        self._kept: list[Tensor] = []

    def get(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of at least ``numel`` elements, with any values."""
        memory = self._memory.get((name, device))
        if memory is None or memory.numel() < numel:
            if memory is not None and self.captured:
                self._kept.append(memory)
            memory = self._memory[name, device] = torch.empty(numel, dtype=dtype, device=device)
            self.version += 1
        return memory
