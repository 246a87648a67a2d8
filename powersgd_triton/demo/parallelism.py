"""Ways to distribute the demo's model: replicated, sharded, or both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.demo.model import GPT, Block
from powersgd_triton.integrations import fsdp1
from powersgd_triton.integrations.fsdp2 import apply_powersgd

REPLICAS = 2
PARALLELISMS = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "fully_shard over all workers",
    "hsdp": f"fully_shard in each of {REPLICAS} replicas",
    **{f"zero{stage}": f"DeepSpeed, ZeRO stage {stage}" for stage in range(4)},
}
"""{name: description}."""

ZERO_STAGES = {f"zero{stage}": stage for stage in range(4)}

GRADIENT_COLLECTIVES = {
    **dict.fromkeys([*ZERO_STAGES, "fsdp1", "fsdp2"], ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")),
    # Reduce-scatters stay inside a replica, and the demo counts traffic between replicas.
    "hsdp": ("all_reduce",),
}
"""Collectives that carry gradients between workers, or between replicas. All-gathers carry parameters."""


def check_workers(parallelism: str, workers: int) -> None:
    """Raise ValueError if this number of workers cannot be arranged in this way."""
    if parallelism == "hsdp" and workers % REPLICAS:
        raise ValueError(f"hsdp arranges workers in {REPLICAS} replicas; {workers} is not a multiple of {REPLICAS}")


def shard(model: GPT, parallelism: str, options: dict[str, Any] | None, device: torch.device) -> Any:
    """Shard the model in one of these ways. Compress its gradients with the configuration fields in ``options``."""
    config = None if options is None else PowerSGDConfig(**options)
    if parallelism == "fsdp1":
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=device
        )
        if config is not None:
            wrapped.register_comm_hook(fsdp1.PowerSGDState(wrapped, config), fsdp1.powerSGD_hook)
        return wrapped
    workers = dist.get_world_size()
    if parallelism == "fsdp2":
        mesh = init_device_mesh(device.type, (workers,))
    else:
        mesh = init_device_mesh(device.type, (REPLICAS, workers // REPLICAS), mesh_dim_names=("replicate", "shard"))
    module = _fully_sharded(model, mesh)
    if config is not None:
        apply_powersgd(module, config)
    return module


def gradient_bytes(model: nn.Module, parallelism: str, workers: int) -> int:
    """Return the bytes of gradients that a worker would send without compression."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return total * REPLICAS // workers if parallelism == "hsdp" else total


def _fully_sharded(model: GPT, mesh: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
