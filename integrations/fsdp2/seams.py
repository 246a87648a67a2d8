"""FSDP2: the private attributes through which its averaging is replaced, and a guard that notices other paths."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist

TORCH_VERSIONS = ((2, 9), (2, 15))
"""The oldest and the newest release of torch with which HSDP on a two-dimensional mesh was run. 2.13 is the third."""


def check_torch(version: str = torch.__version__) -> None:
    """Raise RuntimeError in versions in which ``mesh_info``, which is private, may have another meaning."""
    release = tuple(map(int, version.split(".")[:2]))
    oldest, newest = TORCH_VERSIONS
    if not oldest <= release <= newest:
        raise RuntimeError(
            f"models with a replicate dimension in their mesh were run with torch {'.'.join(map(str, oldest))} to "
            f"{'.'.join(map(str, newest))}, but this is torch {version}; install one of these versions, or give "
            'fully_shard mesh["shard"] and apply_powersgd replicate_group=mesh["replicate"].get_group()'
        )


def replicas_of(parameter_group: Any) -> dist.ProcessGroup | None:
    """Return the workers over which the mesh of a parameter group replicates. None if it does not."""
    return getattr(parameter_group.mesh_info, "replicate_process_group", None)


def shards_of(parameter_group: Any) -> dist.ProcessGroup | None:
    """Return the workers over which a parameter group is sharded. None after ``replicate()``."""
    return getattr(parameter_group.mesh_info, "shard_process_group", None)


def take_over_all_reduce(parameter_group: Any) -> None:
    """Leave the all-reduce over the mesh's replicate dimension, if there is one, to the all-reduce hook.

    FSDP all-reduces a parameter group's gradients itself if the group's ``mesh_info`` is a ``DDPMeshInfo``. Otherwise
    its hook gets what the reduce-scatter returned. So give the group a copy of another class. Parameters have their own
    reference to the original, so that placements, and therefore checkpoints, are those of the two-dimensional mesh.
    """
    if not all_reduces_itself(parameter_group):
        return
    # Imported here, because later versions of torch may lack them.
    from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo

    original = parameter_group.mesh_info
    ours = copy.copy(original)
    ours.__class__ = FSDPMeshInfo if isinstance(original, FSDPMeshInfo) else DataParallelMeshInfo
    # FSDP compares both: if they are equal, parameters are resharded to their own shards after the forward pass.
    if parameter_group.post_forward_mesh_info is original:
        parameter_group.post_forward_mesh_info = ours
    parameter_group.mesh_info = ours


def all_reduces_itself(parameter_group: Any) -> bool:
    """Return whether FSDP all-reduces the gradients of a parameter group before its hook."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

    return isinstance(parameter_group.mesh_info, DDPMeshInfo)


def guard(unit: Any, attribute: str, ours: Any) -> None:
    """Raise an error in a backward pass that writes gradients of a unit without having called ``ours``.

    The error comes before the optimizer uses the gradients. Backward passes that write no gradients are not checked:
    they leave out communication, or do not use the unit. ``attribute`` of the unit's parameter group is ``ours``.
    """
    parameter_group = unit.parameter_group
    original = parameter_group.post_backward

    @functools.wraps(original)
    def post_backward(*args: Any) -> None:
        before, calls = _versions(parameter_group), unit.calls
        original(*args)
        if _versions(parameter_group) == before:
            return
        found = getattr(parameter_group, attribute)
        if unit.calls == calls:
            what = "FSDP did not call it" if found is ours else f"it was replaced by {_described(found)}"
        elif attribute == "_all_reduce_hook" and all_reduces_itself(parameter_group):
            what = "FSDP averaged them itself before, since its mesh_info was replaced"
        else:
            return
        raise RuntimeError(
            f"gradients of {unit.where} were not averaged by apply_powersgd's "
            f"{attribute.strip('_').replace('_', ' ')}: {what}. Do not let another library, such as torchft, average "
            "gradients of a model to which apply_powersgd was applied"
        )

    parameter_group.post_backward = torch.compiler.disable(post_backward)


def _versions(parameter_group: Any) -> list[int | None]:
    """Return a number for each sharded gradient, which changes when FSDP writes or adds to it."""
    gradients = [parameter.sharded_param.grad for parameter in parameter_group.fsdp_params]
    return [None if gradient is None else gradient.to_local()._version for gradient in gradients]


def _described(found: Any) -> str:
    function = found.func if isinstance(found, functools.partial) else found
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"
