"""Scratch memory of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Memory that a stage uses and leaves behind; one for all buckets of a model, since stages never overlap."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.device], Tensor] = {}

    def get(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """At least ``numel`` elements; the same ones for the same name."""
        memory = self._memory.get((name, device))
        if memory is None or memory.numel() < numel:
            memory = self._memory[name, device] = torch.empty(numel, dtype=dtype, device=device)
        return memory
