"""The operations of a step, and the choice of who carries them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import torch

from powersgd_triton.kernels.availability import why_not_triton
from powersgd_triton.ops.bucket import BucketState
from powersgd_triton.ops.operations import Operations, Step
from powersgd_triton.ops.ranges import reconstruct_ranges
from powersgd_triton.ops.torch_backend import TorchOperations

__all__ = ["Backend", "BucketState", "Operations", "Step", "TorchOperations", "reconstruct_ranges", "select_backend"]


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend that was chosen, why, and how it takes on a bucket."""

    name: str
    reason: str
    operations: Callable[[BucketState], Operations]


def select_backend(name: str, device: torch.device, dtypes: Collection[torch.dtype] = (), rank: int = 1) -> Backend:
    """Choose the backend for a bucket.

    Args:
        name: "torch", "triton", or "auto" for Triton where it can be used on a CUDA or ROCm device, else torch.
        device: the gradients' device.
        dtypes: the gradients' dtypes.
        rank: the largest rank in the bucket.

    Raises:
        ValueError: there is no backend of that name, or Triton was asked for and cannot be used.
    """
    if name not in ("auto", "torch", "triton"):
        raise ValueError(f"backend must be 'auto', 'triton' or 'torch'; got {name!r}")
    if name == "torch":
        return Backend("torch", "asked for by name", TorchOperations)
    obstacle = why_not_triton(device, dtypes, rank)
    if obstacle is None and name == "auto" and device.type == "cpu":
        obstacle = "the interpreter is for tests"
    if obstacle is None:
        from powersgd_triton.ops.triton_backend import TritonOperations, Workspace

        reason = "asked for by name" if name == "triton" else "the fastest on this device"
        workspace = Workspace()
        return Backend("triton", reason, lambda bucket: TritonOperations(bucket, workspace))
    if name == "triton":
        raise ValueError(f"backend 'triton' cannot be used: {obstacle}")
    return Backend("torch", obstacle, TorchOperations)
