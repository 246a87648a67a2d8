"""The sharding of FSDP1 and one-dimensional FSDP2, in which every worker compresses whole gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from powersgd_triton.comm.nodes import new_group
from powersgd_triton.layout.layout import matrix_shape


class WholeParameters:
    """A ``Sharding``, in which every worker compresses whole gradients.

    Args:
        group, mesh: The workers that hold shards, as a process group and as a mesh of one dimension.
        shapes: Returns {name: shape} of the whole trainable parameters.

    Attributes:
        worker, workers: Index of this worker in the group, and the group's world size.
    """

    def __init__(
        self, group: dist.ProcessGroup, mesh: DeviceMesh, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> None:
        self.worker, self.workers = dist.get_rank(group), dist.get_world_size(group)
        self._mesh, self._shapes = mesh, shapes

    def place(self, name: str, error: Tensor) -> DTensor:
        shape = self._shapes()[name]
        # As FSDP2 shards dim 0. A copy, since torch.save() does not take a DTensor whose part is a view.
        rows = -(-shape[0] // self.workers)
        own = error.view(shape)[self.worker * rows : (self.worker + 1) * rows]
        local = own.to(self._mesh.device_type, copy=True)
        return placed(local, self._mesh, [Shard(0)], shape)

    def fetch(self, error: DTensor) -> Tensor:
        return error.full_tensor()

    def take(self, name: str, rows: Tensor) -> Tensor:
        return rows.reshape(matrix_shape(self._shapes()[name]))

    def shard(self) -> tuple[int, int]:
        return 0, 1

    def gather(self, factors: Any) -> list[Any]:
        return [factors]


def group_of_its_own(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return a new group of all workers, so that sums of factors do not queue behind the framework's collectives.

    If ``group`` does not contain all workers, return ``group``, since all workers have to create a new group together.
    (With use_local_synchronization=True they do not. But then members that have created different numbers of groups
    wait for each other forever.)
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        return group
    return new_group(group, ranks, torch.device(device_type))


def placed(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return a contiguous DTensor of this shape from this worker's part."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
