"""Ways to distribute the demo's model: replicated, sharded, or both, and DeepSpeed at any ZeRO stage."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.lr_scheduler import LambdaLR

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.demo.model import GPT, Block
from powersgd_triton.integrations import fsdp1
from powersgd_triton.integrations.fsdp2 import apply_powersgd

REPLICAS = 2
ZERO_STAGES = {f"zero{stage}": stage for stage in range(4)}
PARALLELISMS = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "fully_shard over all workers",
    "hsdp": f"fully_shard in each of {REPLICAS} replicas",
    **{name: f"DeepSpeed, ZeRO stage {stage}" for name, stage in ZERO_STAGES.items()},
}
"""{name: description}."""

GRADIENT_COLLECTIVES = {
    **dict.fromkeys([*ZERO_STAGES, "fsdp1", "fsdp2"], ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")),
    # Reduce-scatters stay inside a replica, and the demo counts traffic between replicas.
    "hsdp": ("all_reduce",),
}
"""Collectives that carry gradients between workers, or between replicas. All-gathers carry parameters."""

CONFIGURATION = Path(__file__).with_name("ds_config.json")


def check_workers(parallelism: str, workers: int) -> None:
    """Raise ValueError if this number of workers cannot be arranged in this way."""
    if parallelism == "hsdp" and workers % REPLICAS:
        raise ValueError(f"hsdp arranges workers in {REPLICAS} replicas; {workers} is not a multiple of {REPLICAS}")


def gradient_bytes(model: nn.Module, parallelism: str, workers: int) -> int:
    """Return the bytes of gradients that a worker would send without compression."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total * REPLICAS // workers if parallelism == "hsdp" else total


def shard(model: GPT, parallelism: str, options: dict[str, Any] | None, device: torch.device) -> Any:
    """Shard the model by FSDP or HSDP. Compress its gradients with the configuration fields in ``options``."""
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
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh)
    if config is not None:
        apply_powersgd(model, config)
    return model


def configuration(stage: int, section: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the content of ``ds_config.json`` for a ZeRO stage.

    ``section`` has the fields to change in the section "powersgd". None switches it off.
    """
    content: dict[str, Any] = json.loads(CONFIGURATION.read_text(encoding="utf-8"))
    content["zero_optimization"]["stage"] = stage
    content["powersgd"].update({"enabled": False} if section is None else section)
    return content


def make_engine(
    model: nn.Module, config: Mapping[str, Any], device: torch.device, learning_rate_factor: Callable[[int], float]
) -> Any:
    """Return a DeepSpeed engine for the model, with DeepSpeed's configuration. The process group must exist.

    ``learning_rate_factor`` maps a step's number to the factor of the learning rate.
    """
    # Set what a launcher would have set.
    workers = str(dist.get_world_size())
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(device.index or 0), WORLD_SIZE=workers)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    from powersgd_triton.integrations import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # On the CPU, DeepSpeed would compile this operation before the first step. The demo does not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=dict(config),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, learning_rate_factor),
    )
    return engine
