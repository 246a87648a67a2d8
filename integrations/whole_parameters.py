"""FSDP1 and one-dimensional FSDP2, in which every worker compresses whole gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import NodeGroup, new_group
from powersgd_triton.core.engine import Engine
from powersgd_triton.integrations.saved_shards import placed
from powersgd_triton.integrations.sharded import ShardedHandle


class WholeHandle(ShardedHandle):
    """The compression of whole gradients, of which each worker keeps its shard.

    Args:
        engine: Engine that averages the model's gradients.
        group, mesh: The workers that hold shards, as a process group and as a mesh of one dimension.
    """

    def __init__(self, engine: Engine, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
        super().__init__(engine)
        self._group, self._mesh = group, mesh
        self._worker, self._workers = dist.get_rank(group), dist.get_world_size(group)

    def use_own_group(self, node_group: NodeGroup = None) -> None:
        """Sum factors in a new process group, so that they do not queue behind the framework's collectives. Collective.

        If the model's group does not contain all workers, use that, since all workers have to create a new group
        together. (With use_local_synchronization=True they do not. But then members that have created different numbers
        of groups wait for each other forever.)
        """
        group, ranks = self._group, dist.get_process_group_ranks(self._group)
        if len(ranks) == dist.get_world_size():
            group = new_group(group, ranks, torch.device(self._mesh.device_type))
        self._engine.connect(Communicator(group, node_group=node_group))

    def _place(self, name: str, error: Tensor) -> DTensor:
        shape = tuple(self._engine.tensors()[name])
        # As FSDP2 shards dim 0. A copy, since torch.save() does not take a DTensor whose part is a view.
        rows = -(-shape[0] // self._workers)
        own = error.view(shape)[self._worker * rows : (self._worker + 1) * rows]
        return placed(own.to(self._mesh.device_type, copy=True), self._mesh, [Shard(0)], shape)
