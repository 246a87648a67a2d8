"""The choice of a bucket's backend."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.kernels.availability import why_not_triton
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.torch_backend import TorchBackend

Workspace = dict[tuple[str, torch.device], Tensor]
"""Scratch memory of the kernels by name and device. Buckets share it, since stages of two buckets never overlap."""


def select_backend(
    config: PowerSGDConfig, device: torch.device, dtypes: Collection[torch.dtype] = (), rank: int = 1
) -> tuple[str, str]:
    """Choose the backend for a bucket: with "auto" Triton where it can be used on a CUDA or ROCm device, else torch.

    Args:
        config: names the backend and the algorithm.
        device: the gradients' device.
        dtypes: the gradients' dtypes.
        rank: the largest rank in the bucket.

    Returns:
        ("triton" or "torch", the reason).

    Raises:
        ValueError: Triton was asked for and cannot be used.
    """
    if config.backend == "torch":
        return "torch", "asked for by name"
    obstacle = why_not_triton(device, dtypes, rank)
    if obstacle is None and config.iterations > 1:
        obstacle = f"the kernels do one iteration a step; the configuration asks for {config.iterations}"
    if obstacle is None and config.backend == "auto" and device.type == "cpu":
        obstacle = "the interpreter is for tests"
    if obstacle is None:
        return "triton", "asked for by name" if config.backend == "triton" else "the fastest on this device"
    if config.backend == "triton":
        raise ValueError(f"backend 'triton' cannot be used: {obstacle}")
    return "torch", obstacle


def make_backend(name: str, bucket: Bucket, workspace: Workspace) -> Backend:
    """The backend of that name for one bucket."""
    if name == "torch":
        return TorchBackend(bucket)
    # Imported here, since triton may be missing.
    from powersgd_triton.ops.triton_backend import TritonBackend

    return TritonBackend(bucket, workspace)
