"""FSDP2: the units that it makes of a model, which workers average them, and how its own averaging is replaced."""

import copy
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.integrations.common import plain_name
from powersgd_triton.ops.gradients import real_shape

ONE_MESH = 'give fully_shard mesh["shard"], and apply_powersgd replicate_group=mesh["replicate"].get_group()'
TWO_MESHES = f"give fully_shard the mesh of both dimensions, and no replicate_group; or {ONE_MESH}"

TORCH_VERSIONS = ((2, 9), (2, 15))
"""The oldest and the newest release of torch with which HSDP on a two-dimensional mesh was run. 2.13 is the third."""


def reshard(model: nn.Module) -> None:
    """Make the model's parameters its shards. After a forward pass without gradients, the root's are still whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, this worker's part) of all parameters and buffers."""
    reshard(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Unit:
    """Parameters of one module whose gradients FSDP reduces in one message. FSDP's object is ``parameter_group``."""

    def __init__(
        self, where: str, parameter_group: Any, names: dict[int, str], replicate_group: dist.ProcessGroup | None
    ) -> None:
        self.where, self.parameter_group = where, parameter_group
        # The workers over which its mesh replicates. None if it does not.
        self.native: dist.ProcessGroup | None = getattr(parameter_group.mesh_info, "replicate_process_group", None)
        # The workers that hold the same shards. None if there are none.
        self.replicas = self.native if replicate_group is None else replicate_group
        # The workers of the reduce-scatter. None after ``replicate()``.
        self.shard_group: dist.ProcessGroup | None = getattr(parameter_group.mesh_info, "shard_process_group", None)
        # How often FSDP asked this package to average them.
        self.calls = 0
        # FSDP's objects for the parameters, in the order in which FSDP packs gradients.
        self.named_parameters = {names[id(p.sharded_param)]: p for p in parameter_group.fsdp_params}

    @property
    def parameters(self) -> dict[str, Any]:
        """FSDP's objects for the trainable parameters by name."""
        return {name: p for name, p in self.named_parameters.items() if p.sharded_param.requires_grad}

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies its tensors. Parameters may be frozen and unfrozen."""
        return self, *self.parameters

    def take_over_all_reduce(self) -> None:
        """Leave the all-reduce over the mesh's replicate dimension, if there is one, to the all-reduce hook."""
        if not self._all_reduces_itself():
            return
        # FSDP all-reduces gradients itself if the parameter group's ``mesh_info`` is a ``DDPMeshInfo``. So give it a
        # copy of another class. Parameters have their own reference to the original, so that placements, and therefore
        # checkpoints, are those of the 2-D mesh. Imported here, because later versions of torch may lack them.
        from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo

        group, original = self.parameter_group, self.parameter_group.mesh_info
        ours = copy.copy(original)
        ours.__class__ = FSDPMeshInfo if isinstance(original, FSDPMeshInfo) else DataParallelMeshInfo
        # FSDP compares both: if they are equal, parameters are resharded to their own shards after the forward pass.
        if group.post_forward_mesh_info is original:
            group.post_forward_mesh_info = ours
        group.mesh_info = ours

    def _all_reduces_itself(self) -> bool:
        from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

        return isinstance(self.parameter_group.mesh_info, DDPMeshInfo)

    def replace(self, attribute: str, ours: Any, *, guarded: bool = True) -> None:
        """Make FSDP call ``ours``. If a backward pass writes gradients without doing so, that is an error."""
        # Not by a method of the module: these refuse several parameter groups.
        setattr(self.parameter_group, attribute, ours)
        original = self.parameter_group.post_backward

        @functools.wraps(original)
        def post_backward(*args: Any) -> None:
            before, calls = self._versions(), self.calls
            original(*args)
            if self._versions() == before:
                # It leaves out communication, or does not use the unit.
                return
            found = getattr(self.parameter_group, attribute)
            if self.calls == calls:
                what = "FSDP did not call it" if found is ours else f"it was replaced by {_described(found)}"
            elif attribute == "_all_reduce_hook" and self._all_reduces_itself():
                what = "FSDP averaged them itself before, since its mesh_info was replaced"
            else:
                return
            raise RuntimeError(
                f"gradients of {self.where} were not averaged by apply_powersgd's "
                f"{attribute.strip('_').replace('_', ' ')}: {what}. Let no other library, such as torchft, average them"
            )

        if guarded:
            self.parameter_group.post_backward = torch.compiler.disable(post_backward)

    def _versions(self) -> list[int | None]:
        """Return a number for each sharded gradient, which changes when FSDP writes or adds to it."""
        gradients = [parameter.sharded_param.grad for parameter in self.parameter_group.fsdp_params]
        return [None if gradient is None else gradient.to_local()._version for gradient in gradients]

    def shapes(self, *, padded: bool) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of this worker's padded shards of the trainable parameters, or of what FSDP shards."""
        found: dict[str, tuple[int, ...]] = {}
        workers = dist.get_world_size(self.shard_group) if padded and self.shard_group is not None else 1
        for name, parameter in self.parameters.items():
            shape, dim = list(parameter._orig_size), parameter.fsdp_placement.dim
            shape[dim] = -(-shape[dim] // workers)
            found[name] = real_shape(tuple(shape), parameter.sharded_param.dtype)
        return found


def ranks_of(group: dist.ProcessGroup) -> frozenset[int]:
    """Return the workers of a group."""
    return frozenset(dist.get_process_group_ranks(group))


def find_units(model: nn.Module, replicate_group: dist.ProcessGroup | None) -> list[Unit]:
    """Return the model's units that have parameters: one for each parameter group of FSDP."""
    reshard(model)
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    units: dict[int, Unit] = {}
    for path, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        # Older versions of torch have one.
        groups = getattr(state, "_fsdp_param_groups", None)
        groups = list(filter(None, [state._fsdp_param_group] if groups is None else groups))
        where = f"module {path!r}" if path else "the root module"
        for number, group in enumerate(groups, start=1):
            place = where if len(groups) == 1 else f"{where} (parameter group {number})"
            units.setdefault(id(group), Unit(place, group, names, replicate_group))
    return list(units.values())


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

    @functools.cached_property
    def copies(self) -> frozenset[str]:
        """The tensors of which workers that do not average with each other have copies, as with tensor parallelism."""
        workers = math.prod(map(dist.get_world_size, (self.group, *self.others)))
        replicas = dist.get_world_size(self.group) if self.hybrid else 1
        found = {name: p.sharded_param for unit in self.units for name, p in unit.named_parameters.items()}
        # Into how many parts each parameter is divided, by FSDP and by other parallelism.
        parts = {
            name: math.prod(p.device_mesh.size(dim) for dim, each in enumerate(p.placements) if not each.is_replicate())
            for name, p in found.items()
        }
        return frozenset(name for name, number in parts.items() if number * replicas < workers)

    @functools.cached_property
    def communicator(self) -> Communicator:
        return Communicator(self.group, self.others, copies=self.copies)


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
        division.others = _others(division.group, [*_meshes(division.units), *_meshes(units)])
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


def check(unit: Unit, replicate_group: dist.ProcessGroup | None) -> None:
    """Refuse a unit whose averaging cannot be replaced, or that has other replicas than those given: an error."""
    group, where = unit.parameter_group, unit.where
    if group._all_reduce_hook is not None:
        raise ValueError(f"{where} has an all-reduce hook; was apply_powersgd called before? Call it once for a model")
    reduce_scatter = type(group._reduce_scatter_comm).__name__
    if unit.replicas is None and reduce_scatter != "DefaultReduceScatter":
        raise ValueError(
            f"{where} has a custom reduce-scatter ({reduce_scatter}), which compression would replace; set none, nor "
            "set_symm_mem_for_comm or set_allocate_memory_from_process_group_for_comm, or use replicas: "
            f"{TWO_MESHES}. Or was apply_powersgd called before?"
        )
    if unit.native is not None:
        check_torch()
    if replicate_group is None:
        return
    replicas = ranks_of(replicate_group)
    if unit.native is not None:
        if ranks_of(unit.native) != replicas:
            raise ValueError(
                f"replicate_group has the workers {sorted(replicas)}, but {where} is replicated over the workers "
                f"{sorted(ranks_of(unit.native))} by its mesh; leave replicate_group out"
            )
    elif unit.shard_group is not None and ranks_of(unit.shard_group) & replicas != {dist.get_rank()}:
        raise ValueError(
            f"replicate_group has the workers {sorted(replicas)} and {where} is sharded over "
            f"{sorted(ranks_of(unit.shard_group))}; they must have this worker ({dist.get_rank()}) in common and no "
            f"other: {TWO_MESHES}"
        )


def check_torch(version: str = torch.__version__) -> None:
    """Raise RuntimeError in versions in which ``mesh_info``, which is private, may have another meaning."""
    release = tuple(map(int, version.split(".")[:2]))
    oldest, newest = TORCH_VERSIONS
    if not oldest <= release <= newest:
        raise RuntimeError(
            f"models with a replicate dimension in their mesh were run with torch {'.'.join(map(str, oldest))} to "
            f"{'.'.join(map(str, newest))}, but this is torch {version}; install one of these versions, or {ONE_MESH}"
        )


def _described(found: Any) -> str:
    function = found.func if isinstance(found, functools.partial) else found
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"
