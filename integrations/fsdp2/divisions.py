"""FSDP2: which workers average which parameters, if experts and dense layers have different meshes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.integrations.fsdp2.units import Unit, find_units, ranks_of


@dataclasses.dataclass(eq=False)
class Division:
    """Units whose gradients the same workers average.

    Attributes:
        units: The units, in the model's order.
        group: The workers: replicas, or with 1-D those that hold the shards.
        others: Groups of workers that hold other shards or parts, from the inside out. With ``group`` they reach all.
    """

    units: list[Unit]
    group: dist.ProcessGroup
    others: list[dist.ProcessGroup] = dataclasses.field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [name for unit in self.units for name in unit.named_parameters]

    @property
    def hybrid(self) -> bool:
        """Whether the workers are replicas."""
        return self.units[0].replicas is not None

    @property
    def repeats(self) -> bool:
        """Whether workers that do not average with each other hold equal tensors, as with tensor parallelism."""
        workers = math.prod(map(dist.get_world_size, (self.group, *self.others)))
        replicas = dist.get_world_size(self.group) if self.hybrid else 1
        return any(parts * replicas < workers for unit in self.units for parts in unit.parts())

    @functools.cached_property
    def communicator(self) -> Communicator:
        return Communicator(self.group, self.others)


def divide(model: nn.Module, replicate_group: dist.ProcessGroup | None) -> list[Division]:
    """Divide a model's units by the workers that average them, in the order of the units. ValueError without units."""
    units = find_units(model, replicate_group)
    if not units:
        raise ValueError(
            "the model has no parameters to which torch.distributed.fsdp.fully_shard was applied; apply it first. "
            "If the model is in DistributedDataParallel, use integrations.ddp"
        )
    divisions: dict[object, Division] = {}
    for unit in units:
        group = unit.shard_group if unit.replicas is None else unit.replicas
        assert group is not None
        # Different meshes may have different groups of the same workers.
        key = unit.replicas is None, ranks_of(group)
        divisions.setdefault(key, Division([], group)).units.append(unit)
    for division in divisions.values():
        elsewhere = [unit for unit in units if unit not in division.units]
        division.others = _others(division.group, [*_meshes(division.units), *_meshes(elsewhere)])
    return list(divisions.values())


def _others(group: dist.ProcessGroup, meshes: list[DeviceMesh]) -> list[dist.ProcessGroup]:
    """Return groups that reach, one after the other, all workers of the meshes from those of ``group``."""
    reached, known = set(ranks_of(group)), {ranks_of(group)}
    found: list[dist.ProcessGroup] = []
    for mesh in meshes:
        workers = set(mesh.mesh.flatten().tolist())
        # The groups of experts are parts of what the larger mesh of dense layers reaches already.
        for each in [] if workers <= reached else mesh.get_all_groups():
            if dist.get_world_size(each) > 1 and ranks_of(each) not in known:
                known.add(ranks_of(each))
                found.append(each)
        reached |= workers
    return found


def _meshes(units: Iterable[Unit]) -> list[DeviceMesh]:
    """Return the meshes of all parameters, the largest one first."""
    meshes = dict.fromkeys(p.sharded_param.device_mesh for u in units for p in u.named_parameters.values())
    return sorted(meshes, key=lambda mesh: -mesh.size())
