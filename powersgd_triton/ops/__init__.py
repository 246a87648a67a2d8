"""The operations of a step, and the choice of who carries them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from powersgd_triton.ops.bucket import BucketState
from powersgd_triton.ops.operations import Operations, Step
from powersgd_triton.ops.torch_backend import TorchOperations

__all__ = ["Backend", "BucketState", "Operations", "Step", "TorchOperations", "select_backend"]


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend that was chosen, why, and how it takes on a bucket."""

    name: str
    reason: str
    operations: Callable[[BucketState], Operations]


def select_backend(name: str, device: torch.device) -> Backend:
    """Choose the backend for gradients on ``device``.

    Args:
        name: "torch", or "auto" for the fastest that works there.

    Raises:
        ValueError: there is no backend of that name.
    """
    if name == "torch":
        return Backend("torch", "asked for by name", TorchOperations)
    if name == "auto":
        return Backend("torch", f"the one backend for {device.type} devices", TorchOperations)
    raise ValueError(f"backend must be 'auto' or 'torch'; got {name!r}")
