"""FSDP2 (``fully_shard``): compression across replicas (HSDP), or across the workers that hold shards (1-D)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from powersgd_triton.comm.agreement import Facts, together
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.fsdp2.states import FullShardState, HybridShardState
from powersgd_triton.integrations.fsdp2.units import find_units, worker_groups
from powersgd_triton.planning.tuning import refuse_auto

__all__ = ["FullShardState", "HybridShardState", "apply_powersgd"]


def apply_powersgd(
    model: nn.Module, config: PowerSGDConfig, replicate_group: dist.ProcessGroup | None = None
) -> HybridShardState | FullShardState:
    """Compress the gradients of a model to which ``fully_shard`` or ``replicate`` was applied. Collective.

    Call it once, before the first step.

    If the model has replicas (HSDP), FSDP reduce-scatters inside the shard group as usual. Each worker's shard of the
    gradients is averaged over the replicas in compressed form. Parameters and buffers are overwritten with those of the
    first replica. If they are on the meta device, this happens at the beginning of the first training step. The model
    has replicas if its mesh has a replicate dimension, or if ``replicate_group`` is given.

    Otherwise (1-D), compression replaces the reduce-scatter. Every worker then has an error buffer of the whole model's
    size. Prefer HSDP if the model's shards fit on fewer workers.

    Args:
        model: The root module. ``fully_shard`` may have been applied to its submodules too.
        config: Configuration of the compression.
        replicate_group: The workers that hold the same shard, ``mesh["replicate"].get_group()``, of a model that is
            sharded on ``mesh["shard"]``. Not needed if the whole mesh was given to ``fully_shard``.

    Returns:
        The state of the compression, for checkpoints and statistics.

    Raises:
        TypeError: ``config`` is not a configuration.
        ValueError: The model is not sharded, or is sharded in a way that is not supported, or ``apply_powersgd`` was
            called before, or the configuration's budget is too small. The message says what to do. Nothing was changed.
        RuntimeError: This version of torch is too old, or was not tried with a replicate dimension in the mesh, or the
            group cannot be used.
    """
    replicas, others = worker_groups(model, replicate_group)

    def prepare() -> tuple[HybridShardState | FullShardState, Facts, Facts]:
        method = "set_custom_reduce_scatter" if replicas is None else "set_all_reduce_hook"
        if not hasattr(FSDPModule, method):
            missing = f"FSDPModule.{method} does not exist in torch {torch.__version__}"
            raise RuntimeError(f"{missing}; install a newer version")
        units = find_units(model, replicas)
        if replicas is not None:
            return HybridShardState(model, config, units, replicas, others), {}, {}
        state = FullShardState(config, units, others[0])
        refuse_auto(config, "a sharded model without replicas")
        return state, {}, {}

    # Collectives follow, so that no worker may raise an error alone.
    everyone = [*([] if replicas is None else [replicas]), *others]
    state = together("apply_powersgd", prepare, Communicator(everyone[0], everyone[1:]))
    state._take_over()
    return state
