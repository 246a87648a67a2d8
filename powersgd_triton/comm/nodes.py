"""Groups of the workers that share a node and its network card, for hierarchical sums."""

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from powersgd_triton.config import logger

NodeGroup = str | tuple[dist.ProcessGroup, dist.ProcessGroup] | DeviceMesh | None
"""What users give as ``node_group=``:

- None: one level. All workers exchange factors with each other.
- "auto": the nodes that torchrun has started, from LOCAL_WORLD_SIZE and LOCAL_RANK.
- (group of this worker's node, group of the workers with the same index on all nodes).
- A two-dimensional DeviceMesh of [nodes, workers of a node].
"""

AUTO = "auto"
Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]


def given_groups(node_group: NodeGroup) -> Groups | None:
    """Return the groups that a user has given, None for "auto" or None. TypeError or ValueError: Anything else."""
    if node_group is None or node_group == AUTO:
        return None
    if isinstance(node_group, DeviceMesh):
        if node_group.ndim != 2:
            raise ValueError(
                f"a mesh for node_group must have two dimensions, [nodes, workers of a node]; got {node_group.ndim}"
            )
        return node_group.get_group(1), node_group.get_group(0)
    if isinstance(node_group, tuple) and len(node_group) == 2:
        inside, across = node_group
        if isinstance(inside, dist.ProcessGroup) and isinstance(across, dist.ProcessGroup):
            return inside, across
    raise TypeError(
        'node_group must be "auto", None, a pair of process groups (of this node, of this index on all nodes) or a '
        f"two-dimensional DeviceMesh; got {node_group!r}"
    )


def check_groups(group: dist.ProcessGroup | None, node_group: NodeGroup) -> None:
    """Check that two levels have the same workers as ``group``. ValueError: they do not, or others would be needed."""
    if node_group is None:
        return
    everyone = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    groups = given_groups(node_group)
    if groups is None:
        if len(everyone) < dist.get_world_size():
            raise ValueError(
                f'node_group="auto" needs the process group of all {dist.get_world_size()} workers; for a group of '
                f"{len(everyone)} give a pair of groups or a DeviceMesh"
            )
        own_place()
        return
    inside, across = (set(dist.get_process_group_ranks(each)) for each in groups)
    divided = len(inside) * len(across) == len(everyone)
    if inside & across != {dist.get_rank()} or not inside | across <= everyone or not divided:
        raise ValueError(
            "the groups of node_group must divide all workers into equal nodes, and have only this worker in common; "
            f"got workers {sorted(inside)} of this node and {sorted(across)} of this index, of {len(everyone)}"
        )


def check_places(groups: Groups, places: torch.Tensor) -> Groups:
    """Return given groups if each worker sums the same rows with theirs, see ``own_place``. ValueError: they do not."""
    inside, across = (set(dist.get_process_group_ranks(each)) for each in groups)
    (own,) = places[places[:, 0] == dist.get_rank()]
    same_node, same_index = (set(places[places[:, column] == own[column], 0].tolist()) for column in (1, 2))
    if inside != same_node or across != same_index:
        raise ValueError(
            "the groups of node_group must be the workers of this node, and those with the same index in their nodes, "
            "where the index counts the workers of a node in ascending order; "
            f"got workers {sorted(inside)} and {sorted(across)}, but workers {sorted(same_node)} say that they are of "
            f"this node, and workers {sorted(same_index)} that they have this index"
        )
    return groups


def own_place(groups: Groups | None = None) -> torch.Tensor:
    """Return [this worker, first worker of its node, its index there, workers there]; without groups from torchrun."""
    worker = dist.get_rank()
    if groups is not None:
        members = dist.get_process_group_ranks(groups[0])
        return torch.tensor([worker, members[0], members.index(worker), len(members)], device="cpu")
    size, index = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("LOCAL_RANK")
    if not size or not index:
        # This worker was not started by torchrun.
        return torch.tensor([worker, 0, 0, 0], device="cpu")
    if not (size.isdecimal() and index.isdecimal() and int(index) < int(size)):
        raise ValueError(f"LOCAL_RANK must be a number below LOCAL_WORLD_SIZE; got {index!r} of {size!r}")
    return torch.tensor([worker, worker - int(index), int(index), int(size)], device="cpu")


def make_groups(group: dist.ProcessGroup | None, places: torch.Tensor, device: torch.device) -> Groups | None:
    """Make the groups of all nodes. Collective. None if nodes have different sizes, or are not several of several."""
    found: dict[int, list[int]] = {}
    for worker, first, *_ in places.tolist():
        found.setdefault(first, []).append(worker)
    sizes = [len(workers) for workers in found.values()]
    if {*sizes, *places[:, 3].tolist()} != {sizes[0]} or len(sizes) == 1 or sizes[0] == 1:
        if dist.get_rank() == 0:
            have = f"here nodes have {', '.join(map(str, sizes))} workers"
            logger.warning(
                'node_group="auto" has no effect: sums take two levels if several nodes have equally many workers, '
                "more than one each, and %s",
                have if places[:, 3].all() else "LOCAL_WORLD_SIZE and LOCAL_RANK are not set on all workers",
            )
        return None
    if dist.get_rank() == 0:
        logger.info("PowerSGD sums take two levels: %s nodes of %s workers", len(sizes), sizes[0])
    # All workers make all groups, in the same order. Each is a member of one group of either kind.
    members = [*found.values(), *zip(*found.values(), strict=True)]
    own = [made for made in [new_group(group, list(each), device) for each in members] if dist.get_rank(made) >= 0]
    return own[0], own[1]


def new_group(group: dist.ProcessGroup | None, workers: list[int], device: torch.device) -> dist.ProcessGroup:
    """Make a group with the timeout of ``group``. All workers of the program have to call this."""
    backend: Any = (group or dist.group.WORLD)._get_backend(device)  # type: ignore[union-attr]
    # None if the backend does not report it, which selects torch's default.
    timeout: datetime.timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    kind = None if group is None or group is dist.group.WORLD else dist.get_backend_config(group)
    made: dist.ProcessGroup = dist.new_group(workers, timeout=timeout, backend=kind)
    return made
