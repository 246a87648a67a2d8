"""The sharding of FSDP1 and one-dimensional FSDP2, in which every worker compresses whole gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

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
        shape = torch.Size(self._shapes()[name])
        first, behind = rows_of(self.worker, self.workers, shape[0])
        # A copy, since torch.save() does not take a DTensor whose part is a view.
        local = error.view(shape)[first:behind].to(self._mesh.device_type, copy=True)
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=contiguous_stride(shape)
        )  # fmt: skip

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


def rows_of(worker: int, workers: int, rows: int) -> tuple[int, int]:
    """Return (first row, row after the last) of a worker's shard on dim 0, sharded as FSDP2 does."""
    each = -(-rows // workers)
    return min(worker * each, rows), min((worker + 1) * each, rows)


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    shape = tuple(shape)
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
