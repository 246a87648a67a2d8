"""The tensors that a worker's optimizer changes, under each wrapper of a model."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import NodeGroup
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.common import is_deepspeed, plain_name, uncompiled
from powersgd_triton.ops.host import new_memory
from powersgd_triton.planning.tuning import refuse_auto

Named = Iterator[tuple[str, Tensor]]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LocalTensors:
    """The tensors of a model on this worker. All are real, and writing to them changes the model.

    Attributes:
        model: The module that has the parameters.
        shapes: {name: shape} of the largest part of each of ``tensors`` that a worker of this replica has. The last
            workers may have smaller parts, or none. A parameter that is unfrozen is added, and stays if frozen again.
        masters: Returns DeepSpeed's fp32 copies of parts of several parameters in a row, so that they are no matrices.
        before, refresh: Called before the tensors are used, and after they were changed.
    """

    model: nn.Module
    shapes: dict[str, Shape] = dataclasses.field(default_factory=dict)
    masters: Callable[[], Iterable[Tensor]] | None = None
    before: Callable[[], None] = lambda: None
    refresh: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.take_in(self.unfrozen())

    def tensors(self) -> Named:
        """Yield (name, tensor) of all that the optimizer changes. Do not keep them: frameworks may replace them."""
        if self.masters is None:
            return ((name, local(parameter)) for name, parameter in self._parameters() if name in self.shapes)
        return ((f"group {index}", part.detach()) for index, part in enumerate(self.masters()))

    def frozen(self) -> Named:
        """Yield (name, tensor) of the parameters that the optimizer does not change."""
        return ((name, local(p)) for name, p in self._parameters() if name not in self.shapes and not p.requires_grad)

    def unfrozen(self) -> dict[str, Tensor]:
        """Return {name: parameter} of those that the optimizer changes, and that are not in ``tensors`` yet."""
        found = self._parameters() if self.masters is None else ()
        return {name: p for name, p in found if name not in self.shapes and p.requires_grad}

    def take_in(self, unfrozen: Mapping[str, Tensor]) -> None:
        self.shapes.update({name: _largest_part(parameter) for name, parameter in unfrozen.items()})

    def buffers(self) -> Named:
        """Yield ("buffer …", tensor) of the buffers."""
        return ((f"buffer {plain_name(name)!r}", local(tensor)) for name, tensor in self.model.named_buffers())

    def memory(self, like: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
        """Return {name: new memory, padded} in the dtypes of ``like`` or fp32, on its devices by default."""
        found: dict[str, Tensor] = {}
        wide = functools.cache(lambda dtype: torch.promote_types(dtype, torch.float32))
        kinds = {name: (wide(tensor.dtype), device or tensor.device) for name, tensor in like.items()}
        for kind in dict.fromkeys(kinds.values()):
            shapes = {name: self.shapes[name] for name in kinds if kinds[name] == kind}
            sizes = [math.prod(shape) for shape in shapes.values()]
            # One after the other, so that what is sent of them need not be copied first.
            parts = new_memory(sum(sizes), *kind).split(sizes)
            found |= {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return found

    def _parameters(self) -> Named:
        self.before()
        return ((plain_name(name), parameter) for name, parameter in self.model.named_parameters())


Exchanged = tuple[LocalTensors, Communicator]
"""The tensors of a model on this worker, and the workers of an exchange."""


def local_tensors(model: nn.Module, group: dist.ProcessGroup | None, node_group: NodeGroup) -> Exchanged:
    """Return what a model exchanges over ``group``. TypeError or ValueError: It is not supported."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    model = uncompiled(model)
    if any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers())):
        raise ValueError("the model has tensors on the meta device, which have no values: call to_empty, and fill them")
    if is_deepspeed(model):
        return _of_deepspeed(model, group, node_group)
    if isinstance(model, DistributedDataParallel):
        node = model.process_group
        advice = (
            "give DistributedDataParallel process_group=node, the workers of this node, and LocalSteps group=across, "
            "the workers with this index on all nodes"
        )
        _check_apart(node, group, "DistributedDataParallel", advice)
        if node_group is None and group is not None and dist.get_world_size(node) > 1:
            nodes, size, workers = dist.get_world_size(group), dist.get_world_size(node), dist.get_world_size()
            if nodes * size != workers:
                raise ValueError(
                    "the workers of DistributedDataParallel share an exchange, which needs all workers of the program "
                    f"in nodes of one size; got {nodes} nodes (group=) of {size} workers (process_group), of {workers}"
                )
            # The workers of a node hold the same values, and share the work of an exchange.
            node_group = (node, group)
        return LocalTensors(model.module), Communicator(group if node_group is None else None, node_group=node_group)
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise TypeError("local steps support fully_shard (FSDP2); got FullyShardedDataParallel: use fully_shard")
        if isinstance(module, DistributedDataParallel) or is_deepspeed(module):
            raise TypeError(f"expected a wrapped model; got {type(model).__name__}, which has one as {name!r}: use it")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return _of_fsdp2(model, group, node_group)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise TypeError("parameters that are DTensors are supported with fully_shard only; got some without it")
    return LocalTensors(model), Communicator(group, node_group=node_group)


def local(tensor: Tensor) -> Tensor:
    """Return this worker's part of a tensor, as a view that is real. Complex [...] becomes real [..., 2]."""
    part = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return torch.view_as_real(part) if part.is_complex() else part


def unpadded(padded: Tensor, like: Tensor) -> Tensor:
    """Return a view of ``padded``, which has zeros at the ends of its dimensions, in the shape of another tensor."""
    return padded if padded.shape == like.shape else padded[tuple(map(slice, like.shape))]


def kind(tensor: Tensor) -> str:
    """Return what of a tensor must be equal on all workers."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def _largest_part(parameter: Tensor) -> Shape:
    """Return the shape of ``local(parameter)`` on the worker with the largest part."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for placement, workers in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if (dim := getattr(placement, "dim", None)) is not None:
                shape[dim] = -(-shape[dim] // workers)
    return (*shape, 2) if parameter.is_complex() else tuple(shape)


def _of_fsdp2(model: nn.Module, group: dist.ProcessGroup | None, node_group: NodeGroup) -> Exchanged:
    from powersgd_triton.integrations.fsdp2.units import divide, reshard

    advice = 'give fully_shard mesh["shard"], and LocalSteps group=mesh["replicate"].get_group()'
    divisions = divide(model, None)
    for replicas in (division.group for division in divisions if division.hybrid):
        raise ValueError(
            "the model's mesh has a replicate dimension, so that gradients are averaged over the workers "
            f"{dist.get_process_group_ranks(replicas)} in every step, which leaves no local steps: {advice}"
        )
    shards = [divisions[0].group, *divisions[0].others]
    for shard in shards:
        _check_apart(shard, group, "fully_shard", advice)
    # After a forward pass without gradients, the root's parameters are still whole.
    return LocalTensors(model, before=lambda: reshard(model)), Communicator(group, shards, node_group=node_group)


def _of_deepspeed(engine: Any, group: dist.ProcessGroup | None, node_group: NodeGroup) -> Exchanged:
    from powersgd_triton.integrations.deepspeed.engines import averaging_group, masters_of

    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    if engine.pipeline_parallelism:
        raise ValueError("local steps do not support pipeline parallelism; got DeepSpeed's PipelineEngine")
    if engine.has_moe_layers:
        raise ValueError("local steps do not support DeepSpeed's MoE layers, whose experts other workers average")
    if stage not in (1, 2):
        raise ValueError(
            "local steps need DeepSpeed's ZeRO stage 1 or 2, where each worker owns the fp32 copies of some "
            f'parameters; got stage {stage}: set "zero_optimization": {{"stage": 2}}'
        )
    if getattr(engine, "powersgd", None) is not None:
        raise ValueError(
            'the section "powersgd" compresses gradients within its node, and checkpoints of several nodes would '
            "overwrite each other's errors: take the section out. LocalSteps compresses what crosses nodes"
        )
    workers = averaging_group(engine)
    advice = "give deepspeed.initialize mpu=node_mpu(node, across), and LocalSteps group=across"
    _check_apart(workers, group, "DeepSpeed", advice)
    masters = functools.partial(masters_of, optimizer)
    shapes = {f"group {index}": tuple(part.shape) for index, part in enumerate(masters())}
    tensors = LocalTensors(engine.module, shapes, masters, refresh=optimizer.update_lp_params)
    return tensors, Communicator(group, [workers], node_group=node_group)


def chosen_config(
    config: PowerSGDConfig | None, local: LocalTensors, optimizer: object, keep: float | None, node_group: object
) -> PowerSGDConfig:
    """Check the arguments of LocalSteps. Return the configuration of the engine. None sends everything in fp32."""
    if config is not None and not isinstance(config, PowerSGDConfig):
        raise TypeError(f"config must be a PowerSGDConfig or None; got {type(config).__name__}")
    chosen = PowerSGDConfig(rank=lambda _name, _shape: 0) if config is None else config
    if chosen.measures:
        refuse_auto(chosen, "an exchange of local steps")
        raise ValueError("max_overhead is a share of a step, and local steps have none: give max_rank")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    if chosen.error_feedback is None:
        chosen = dataclasses.replace(chosen, error_feedback=True)
    if local.masters is not None and config is not None and chosen.quantize is None:
        raise ValueError(
            "DeepSpeed's workers own parts of several parameters in a row, which are no matrices of low rank: "
            f'quantize them, for example PowerSGDConfig(quantize="ternary"), or give None; got rank={config.rank}, '
            f"compression={config.compression}, bytes_per_step={config.bytes_per_step}"
        )
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1):
        raise ValueError(f"keep is a share of the error above 0, at most 1; got {keep!r}")
    if keep is not None and (not chosen.error_feedback or node_group is not None):
        needed = "error_feedback=True" if node_group is None else "no node_group, with which errors are those of a node"
        raise ValueError(f"keep={keep} needs errors of each worker: give {needed}")
    if not any(map(math.prod, local.shapes.values())):
        raise ValueError("the model has no parameters that require gradients")
    return chosen


def node_mpu(node: dist.ProcessGroup, across: dist.ProcessGroup) -> SimpleNamespace:
    """Return the ``mpu`` with which DeepSpeed trains within a node, so that nodes can take local steps.

    DeepSpeed then averages gradients, divides states of its optimizer, and computes norms of gradients within ``node``
    only. The batch sizes of its configuration are those of a node. ::

        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=node_mpu(node, across))
        sync = LocalSteps(engine, PowerSGDConfig(quantize="ternary"), group=across)

    Args:
        node: The workers of this worker's node. Of a mesh [nodes, workers of a node]: ``mesh.get_group(1)``.
        across: The workers with this worker's index on all nodes: ``mesh.get_group(0)``.

    Raises:
        ValueError: The groups have more workers in common than this one.
    """
    shared = {*dist.get_process_group_ranks(node)} & {*dist.get_process_group_ranks(across)}
    if shared != {dist.get_rank()}:
        raise ValueError(
            "node and across must have this worker in common, and no other; got the workers "
            f"{dist.get_process_group_ranks(node)} and {dist.get_process_group_ranks(across)}"
        )
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return SimpleNamespace(
        get_data_parallel_group=lambda: node,
        get_data_parallel_group_ranks=lambda: dist.get_process_group_ranks(node),
        get_data_parallel_rank=lambda: dist.get_rank(node),
        get_data_parallel_world_size=lambda: dist.get_world_size(node),
        # Size and index make DeepSpeed write the checkpoints of a node to files of its own, and divide the number of
        # workers by that of the nodes. But norms of gradients are summed over this group, and nodes have their own.
        get_model_parallel_group=lambda: alone,
        get_model_parallel_rank=lambda: dist.get_rank(across),
        get_model_parallel_world_size=lambda: dist.get_world_size(across),
        # With an index above 0, parameters would not count in the norm of the gradients.
        get_tensor_model_parallel_group=lambda: alone,
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
    )


def _check_apart(inner: dist.ProcessGroup, group: dist.ProcessGroup | None, wrapper: str, advice: str) -> None:
    """Check that a wrapper communicates within one participant of the local steps only."""
    workers = dist.get_process_group_ranks(inner)
    exchanging = dist.get_process_group_ranks(group or dist.group.WORLD)
    if {*workers} & {*exchanging} != {dist.get_rank()}:
        raise ValueError(
            f"{wrapper} averages gradients over the workers {workers} in every step, and LocalSteps averages changes "
            f"over the workers {exchanging}. They must have worker {dist.get_rank()} in common, and no other: {advice}"
        )
