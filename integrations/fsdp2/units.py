"""The units that ``fully_shard`` makes of a model, and the places of parameters in the gradients of a unit."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from powersgd_triton.integrations.names import plain_name
from powersgd_triton.ops.gradients import real_shape

ONE_MESH = 'give fully_shard mesh["shard"], and apply_powersgd replicate_group=mesh["replicate"].get_group()'


class Unit:
    """Parameters whose gradients FSDP reduces in one message.

    Attributes:
        module: Module to which ``fully_shard`` was applied.
        parameter_group: FSDP's object for these parameters.
        shard_group: Process group of the reduce-scatter.
    """

    def __init__(self, module: FSDPModule, parameter_group: Any, names: dict[int, str]) -> None:
        self.module = module
        self.parameter_group = parameter_group
        self.shard_group: dist.ProcessGroup = parameter_group.mesh_info.shard_process_group
        # The order in which FSDP packs gradients, which differs from that of named_parameters().
        self._names = [names[id(parameter.sharded_param)] for parameter in parameter_group.fsdp_params]

    @property
    def parameters(self) -> dict[str, DTensor]:
        """The trainable parameters by name."""
        return {
            name: parameter.sharded_param
            for name, parameter in zip(self._names, self.parameter_group.fsdp_params, strict=True)
            if parameter.sharded_param.requires_grad
        }

    def shapes(self, *, padded: bool) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of this worker's padded rows of the trainable parameters, or of whole parameters."""
        parameters = self.parameters
        sizes = {name: tuple(p.shape) for name, p in parameters.items()}
        if any(p.device_mesh.ndim > 1 for p in parameters.values()):
            # With tensor parallelism on dim 0, FSDP shards only this worker's part of a parameter.
            by_name = dict(zip(self._names, self.parameter_group.fsdp_params, strict=True))
            sizes = {name: tuple(by_name[name]._orig_size) for name in parameters}
        if padded:
            workers = dist.get_world_size(self.shard_group)
            sizes = {name: (-(-size[0] // workers), *size[1:]) for name, size in sizes.items()}
        return {name: real_shape(size, parameters[name].dtype) for name, size in sizes.items()}


def _parameter_groups(module: nn.Module) -> list[Any]:
    """Return FSDP's objects for the parameters of one module."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def shard_group(model: nn.Module) -> dist.ProcessGroup:
    """Return the process group over which the model's first unit is sharded.

    Raises:
        ValueError: No module is sharded.
    """
    for module in model.modules():
        for group in _parameter_groups(module):
            found: dist.ProcessGroup | None = getattr(group.mesh_info, "shard_process_group", None)
            if found is not None:
                return found
    raise ValueError(
        "the model has no sharded parameters; apply torch.distributed.fsdp.fully_shard to it first. "
        "If it is replicated, use DistributedDataParallel and integrations.ddp"
    )


def find_units(model: nn.Module, replicate_group: dist.ProcessGroup | None) -> list[Unit]:
    """Return the model's units that have parameters.

    Raises:
        ValueError: A unit is sharded in a way that is not supported.
    """
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    units: list[Unit] = []
    for path, module in model.named_modules():
        groups = _parameter_groups(module)
        where = f"module {path!r}" if path else "the root module"
        if len(groups) > 1:
            raise ValueError(
                f"{where} has {len(groups)} parameter groups, sharded on different meshes by shard_placement_fn; "
                "apply fully_shard to submodules instead, so that each uses only one mesh"
            )
        for group in groups:
            if not any(unit.parameter_group is group for unit in units):
                _check(group, where, names, replicate_group)
                units.append(Unit(module, group, names))
    if len({tuple(dist.get_process_group_ranks(unit.shard_group)) for unit in units}) > 1:
        raise ValueError("modules are sharded over different workers; use the same mesh in all calls of fully_shard")
    return units


def _check(group: Any, where: str, names: dict[int, str], replicate_group: dist.ProcessGroup | None) -> None:
    if getattr(group.mesh_info, "shard_process_group", None) is None:
        raise ValueError(f"{where} is replicated, not sharded; use DistributedDataParallel and integrations.ddp for it")
    if getattr(group.mesh_info, "replicate_process_group", None) is not None:
        raise ValueError(f"{where} is sharded on a two-dimensional mesh, where FSDP itself all-reduces; {ONE_MESH}")
    if group._all_reduce_hook is not None:
        raise ValueError(f"{where} has an all-reduce hook; was apply_powersgd called before? Call it once for a model")
    if replicate_group is None and type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
        raise ValueError(
            f"{where} has a custom reduce-scatter ({type(group._reduce_scatter_comm).__name__}); "
            "was apply_powersgd called before? Call it once for a model, and set no other reduce-scatter"
        )
    for parameter in group.fsdp_params:
        placements = parameter.sharded_param.placements
        name = names[id(parameter.sharded_param)]
        if parameter.sharded_param.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device; give it memory and values before apply_powersgd"
            )
        if any(getattr(placement, "dim", None) != 0 for placement in placements):
            raise ValueError(
                f"parameter {name!r} is placed as {placements}, but must be sharded on dim 0 only; shard it on dim 0, "
                "or leave its module out of tensor parallelism"
            )
        if replicate_group is None and list(placements) != [Shard(0)]:
            raise ValueError(
                f"parameter {name!r} is placed as {placements}; without replicate_group only FSDP may shard it. "
                f"For tensor parallelism use replicas: {ONE_MESH}"
            )
    if replicate_group is not None:
        shards = set(dist.get_process_group_ranks(group.mesh_info.shard_process_group))
        replicas = set(dist.get_process_group_ranks(replicate_group))
        if shards & replicas != {dist.get_rank()}:
            raise ValueError(
                f"replicate_group has the workers {sorted(replicas)} and {where} is sharded over {sorted(shards)}; "
                f"they must have this worker ({dist.get_rank()}) in common and no other: {ONE_MESH}"
            )
