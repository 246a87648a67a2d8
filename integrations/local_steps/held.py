"""What a worker holds of a model: the tensors that its optimizer changes, under each wrapper."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.comm.nodes import NodeGroup
from powersgd_triton.integrations.names import plain_name
from powersgd_triton.ops.gradients import as_real

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]


@dataclasses.dataclass(frozen=True)
class Held:
    """What a worker holds of a model.

    Attributes:
        tensors: Yields (name, tensor) of all that the optimizer changes: this worker's parts of the parameters, or of
            DeepSpeed's fp32 copies of them. Complex tensors as real ones. Not kept, since frameworks may replace them.
        buffers: Yields (name, tensor) of the buffers.
        refresh: Called after the tensors were changed.
        shards: Workers that hold the other parts of this replica.
        node: Workers that take the same steps as this one, so that they hold the same values. None for no others.
    """

    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    buffers: Callable[[], Iterator[tuple[str, Tensor]]]
    refresh: Callable[[], None] = lambda: None
    shards: Sequence[dist.ProcessGroup] = ()
    node: dist.ProcessGroup | None = None


def held(model: nn.Module, group: dist.ProcessGroup | None) -> Held:
    """Return what this worker holds of a model that takes local steps in ``group``.

    Raises:
        TypeError: The model is not a module, or is wrapped in something that is not supported.
        ValueError: The model's wrapper communicates with the workers of ``group`` in every step.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    if _is_deepspeed(model):
        return _of_deepspeed(model, group)
    if isinstance(model, DistributedDataParallel):
        _check_apart(model.process_group, group, "DistributedDataParallel", "process_group=")
        inner = model.module
        return Held(lambda: _parameters(inner), lambda: _buffers(inner), node=model.process_group)
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise TypeError("local steps support FSDP2 (fully_shard), and not FullyShardedDataParallel: use fully_shard")
    if any(isinstance(module, FSDPModule) for module in modules):
        return _of_fsdp2(model, group)
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise TypeError("expected the whole model; got one that has a DistributedDataParallel inside: give that")
    return Held(lambda: _parameters(model), lambda: _buffers(model))


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield plain_name(name), as_real(parameter.detach())


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in model.named_buffers():
        yield plain_name(name), as_real(buffer.detach())


def _of_fsdp2(model: nn.Module, group: dist.ProcessGroup | None) -> Held:
    from torch.distributed.tensor import DTensor

    from powersgd_triton.integrations.fsdp2.replicas import reshard
    from powersgd_triton.integrations.fsdp2.units import worker_groups

    replicas, shards = worker_groups(model, None)
    if replicas is not None:
        raise ValueError(
            "FSDP averages the gradients over the replicas of this mesh in every step: apply fully_shard to "
            'mesh["shard"] only, and give LocalSteps group=mesh["replicate"].get_group()'
        )
    for shard in shards:
        _check_apart(shard, group, "fully_shard", 'mesh["shard"] and group=mesh["replicate"].get_group():')

    def tensors() -> Iterator[tuple[str, Tensor]]:
        # After a forward pass without gradients, the root's parameters are still whole.
        reshard(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                yield plain_name(name), as_real(local.detach())

    return Held(tensors, lambda: _buffers(model), shards=shards)


def _is_deepspeed(model: nn.Module) -> bool:
    engine: Any = sys.modules.get("deepspeed.runtime.engine")
    return engine is not None and isinstance(model, engine.DeepSpeedEngine)


def _of_deepspeed(engine: Any, group: dist.ProcessGroup | None) -> Held:
    from powersgd_triton.integrations.deepspeed.seams import is_bf16_optimizer

    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    if stage not in (1, 2):
        raise ValueError(
            f"local steps support DeepSpeed's ZeRO stages 1 and 2, whose workers each own fp32 parameters; got {stage}"
        )
    workers = engine.data_parallel_group
    _check_apart(workers, group, "DeepSpeed", "an mpu whose data-parallel group is the node, and group=")
    attribute = "fp32_groups_flat_partition" if is_bf16_optimizer(optimizer) else "single_partition_of_fp32_groups"

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for index, partition in enumerate(getattr(optimizer, attribute)):
            yield f"group {index}", partition.detach()

    return Held(tensors, lambda: _buffers(engine.module), optimizer.update_lp_params, shards=[workers])


def _check_apart(inner: dist.ProcessGroup, group: dist.ProcessGroup | None, wrapper: str, advice: str) -> None:
    """Check that a wrapper communicates within one participant of the local steps only."""
    shared = {*dist.get_process_group_ranks(inner)} & {*dist.get_process_group_ranks(group or dist.group.WORLD)}
    if shared != {dist.get_rank()}:
        raise ValueError(
            f"{wrapper} communicates with the workers {sorted(shared)} in every step, so that they cannot take local "
            f"steps: use {advice} the workers that are to exchange what they have changed"
        )


def levels(found: Held, group: dist.ProcessGroup | None, node_group: NodeGroup) -> NodeGroup:
    """Return how sums take two levels. Workers of a node that hold the same values share the work of an exchange."""
    if found.node is None or node_group is not None or group is None:
        return node_group
    return (found.node, group) if dist.get_world_size(found.node) > 1 else None
