"""The operations of a step, and the choice of who carries them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import torch

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.kernels.availability import why_not_triton
from powersgd_triton.ops.bucket import BucketState
from powersgd_triton.ops.operations import Message, Operations, Step
from powersgd_triton.ops.ranges import reconstruct_ranges
from powersgd_triton.ops.torch_backend import TorchAlternating, TorchOperations

__all__ = [
    "Backend",
    "BucketState",
    "Message",
    "Operations",
    "Step",
    "TorchAlternating",
    "TorchOperations",
    "reconstruct_ranges",
    "select_backend",
]


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend that was chosen, why, and how it takes on a bucket."""

    name: str
    reason: str
    operations: Callable[[BucketState], Operations]


def select_backend(
    config: PowerSGDConfig, device: torch.device, dtypes: Collection[torch.dtype] = (), rank: int = 1
) -> Backend:
    """Choose the backend for a bucket: with "auto" Triton where it can be used on a CUDA or ROCm device, else torch.

    Args:
        config: names the backend and the algorithm.
        device: the gradients' device.
        dtypes: the gradients' dtypes.
        rank: the largest rank in the bucket.

    Raises:
        ValueError: Triton was asked for and cannot be used.
    """
    alternating = config.algorithm == "alternating"
    reference = TorchAlternating if alternating else TorchOperations
    if config.backend == "torch":
        return Backend("torch", "asked for by name", reference)
    obstacle = why_not_triton(device, dtypes, rank)
    if obstacle is None and config.iterations > 1:
        obstacle = f"the kernels do one iteration a step; the configuration asks for {config.iterations}"
    if obstacle is None and config.backend == "auto" and device.type == "cpu":
        obstacle = "the interpreter is for tests"
    if obstacle is None:
        from powersgd_triton.ops.triton_backend import TritonAlternating, TritonOperations, Workspace

        reason = "asked for by name" if config.backend == "triton" else "the fastest on this device"
        workspace = Workspace()
        kernels = TritonAlternating if alternating else TritonOperations
        return Backend("triton", reason, lambda bucket: kernels(bucket, workspace))
    if config.backend == "triton":
        raise ValueError(f"backend 'triton' cannot be used: {obstacle}")
    return Backend("torch", obstacle, reference)
