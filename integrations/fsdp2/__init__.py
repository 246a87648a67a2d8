"""FSDP2 (``fully_shard``): compression across replicas (HSDP), or across the workers that hold shards (1-D).

from powersgd_triton.integrations.fsdp2 import apply_powersgd
mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh["shard"])
powersgd = apply_powersgd(model, PowerSGDConfig(rank=4), replicate_group=mesh["replicate"].get_group())
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from powersgd_triton.comm.agreement import Facts, together
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.fsdp2.replicas import broadcast_from_first
from powersgd_triton.integrations.fsdp2.states import FullShardState, HybridShardState, custom_reduce_scatter
from powersgd_triton.integrations.fsdp2.units import Unit, find_units, shard_group

__all__ = ["FullShardState", "HybridShardState", "apply_powersgd"]


def apply_powersgd(
    model: nn.Module, config: PowerSGDConfig, replicate_group: dist.ProcessGroup | None = None
) -> HybridShardState | FullShardState:
    """Compress the gradients of a model to which ``fully_shard`` was applied. Collective.

    Call it once, before the first step.

    With ``replicate_group`` (HSDP), shard the model on the mesh's shard dimension only. FSDP reduce-scatters inside the
    shard group as usual. Each worker's shard of the gradients is averaged over the replicas in compressed form.
    Parameters and buffers are overwritten with those of the first replica.

    Without ``replicate_group`` (1-D), compression replaces the reduce-scatter. Every worker then has an error buffer of
    the whole model's size. Prefer HSDP if the model's shards fit on fewer workers.

    Args:
        model: The root module. ``fully_shard`` may have been applied to its submodules too.
        config: Configuration of the compression.
        replicate_group: The workers that hold the same shard, ``mesh["replicate"].get_group()``.

    Returns:
        The state of the compression, for checkpoints and statistics.

    Raises:
        TypeError: ``config`` is not a configuration.
        ValueError: The model is not sharded, or is sharded in a way that is not supported, or ``apply_powersgd`` was
            called before, or the configuration's budget is too small. The message says what to do. Nothing was changed.
        RuntimeError: This version of torch is too old, or the group cannot be used.
    """
    groups = [shard_group(model)] if replicate_group is None else [replicate_group, shard_group(model)]

    def prepare() -> tuple[tuple[list[Unit], HybridShardState | FullShardState], Facts, Facts]:
        if not isinstance(config, PowerSGDConfig):
            raise TypeError(f"config must be a PowerSGDConfig; got {type(config).__name__}")
        _check_torch("set_all_reduce_hook" if replicate_group is not None else "set_custom_reduce_scatter")
        units = find_units(model, replicate_group)
        if replicate_group is None:
            return (units, FullShardState(config, units)), {}, {}
        return (units, HybridShardState(model, config, units, replicate_group)), {}, {}

    # Collectives follow, so that no worker may raise an error alone.
    units, state = together("apply_powersgd", prepare, Communicator(groups[0], groups[1:]))
    if isinstance(state, FullShardState):
        state.use_own_group()
        for unit in units:
            unit.module.set_custom_reduce_scatter(custom_reduce_scatter(state, unit))
        return state
    broadcast_from_first(model, groups[0])
    for unit in units:
        unit.module.set_all_reduce_hook(functools.partial(state._all_reduce, unit))
    return state


def _check_torch(method: str) -> None:
    if not hasattr(FSDPModule, method):
        raise RuntimeError(f"FSDPModule.{method} does not exist in torch {torch.__version__}; install a newer version")
