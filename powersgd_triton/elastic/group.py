"""Collectives of torchft's process group."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from powersgd_triton.comm.communicator import Communicator, wait


class ManagedCommunicator(Communicator):
    """Collectives of the workers of one quorum, of which this one is ``index``. ``lost`` is set when one has failed.

    They call the methods of torchft's ``group``, which torch.distributed does not know. None before the first quorum.
    """

    # A worker that calls something alone is like one that was lost.
    control = None
    world_size = index = global_index = 0

    def __init__(self, group: Any = None, index: int = 0, world_size: int = 1) -> None:
        # Its own, also where torch.distributed is not initialized.
        super().__init__(collectives=None)
        self._torchft, self.lost, self.world_size = group, False, world_size
        self.index = self.global_index = index
        on_host = group is None or "gloo" in group.getBackendName()
        # Device of what the group can send.
        self.device = (None if on_host else torch.accelerator.current_accelerator()) or torch.device("cpu")

    def all_reduce(self, tensor: Tensor, op: Any = c10d.ReduceOp.SUM) -> Any:
        if self.world_size == 1 or tensor.numel() == 0:
            return None
        options = c10d.AllreduceOptions()
        options.reduceOp = op
        return self._begin("allreduce", [tensor], options)

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: object = None) -> Any:  # noqa: ARG002 - for nodes only
        return self._begin("alltoall_base", received, sent, [], [], c10d.AllToAllOptions())

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> Any:
        if self.world_size == 1:
            return super().all_gather(gathered, tensor)
        options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
        rows = list(gathered.view(self.world_size, -1).unbind())
        return self._begin("allgather", [rows], [tensor.reshape(-1)], options)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if self.world_size > 1 and tensor.numel():
            options = c10d.BroadcastOptions()
            options.rootRank = source
            wait(self._begin("broadcast", [tensor], options))

    def minimum(self, tensor: Tensor) -> None:
        wait(self.all_reduce(tensor.view(-1), c10d.ReduceOp.MIN))

    def start_gather(self, tensor: Tensor, device: torch.device | None = None) -> Callable[[], Tensor]:  # noqa: ARG002
        gathered = tensor.new_empty(self.world_size, *tensor.shape, device=self.device)
        wait(self.all_gather(gathered, tensor.to(self.device)))
        return gathered.cpu

    def _begin(self, name: str, *arguments: Any) -> Callable[[], object]:
        if self.lost:
            raise RuntimeError("a worker of this quorum was lost")
        work = self._noted(getattr(self._torchft, name), *arguments)
        return functools.partial(self._noted, work.wait)

    def _noted(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Start or end a collective, and note if it fails."""
        try:
            return act(*arguments)
        except RuntimeError:
            self.lost = True
            raise
