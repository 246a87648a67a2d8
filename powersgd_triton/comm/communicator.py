"""Collectives of one process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Communicator:
    """Sums tensors over a process group; with one process and no group it does nothing.

    Args:
        group: the process group; None for the default group, or for one process where none is initialised.
        others: groups of further workers that compress the same model, from the inside out. Together with ``group``
            they hold all workers: in HSDP, for example, the workers that hold the other shards.
        collectives: what collectives are called from, ``torch.distributed`` or a module with functions of the same
            names, such as ``deepspeed.comm``, which logs them.

    Raises:
        RuntimeError: the group is given but torch.distributed is not initialised, or this process is not its member.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        others: Sequence[dist.ProcessGroup] = (),
        collectives: Any = dist,
    ) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if group is not None and not ready:
            raise RuntimeError(
                "a process group was given, but torch.distributed is not initialised; "
                "call torch.distributed.init_process_group first"
            )
        if ready and dist.get_rank(group) < 0:
            raise RuntimeError("this process is not a member of the given process group")
        self.group = group
        self.others = tuple(Communicator(other) for other in others)
        self._collectives = collectives

    @property
    def _ready(self) -> bool:
        return self.group is not None or (dist.is_available() and dist.is_initialized())

    @property
    def world_size(self) -> int:
        """Number of workers, asked anew each time: a program that lost a peer may set up another default group."""
        return dist.get_world_size(self.group) if self._ready else 1

    @property
    def index(self) -> int:
        """This worker's number in the group."""
        return dist.get_rank(self.group) if self._ready else 0

    @property
    def global_index(self) -> int:
        """This worker's number among all."""
        return dist.get_rank() if self._ready else 0

    def all_reduce(self, tensor: Tensor) -> dist.Work | None:
        """Start summing ``tensor`` over the workers in place. Nothing is sent where there is nothing to add."""
        if self.world_size == 1 or tensor.numel() == 0:
            return None
        work: dist.Work | None = self._collectives.all_reduce(tensor, group=self.group, async_op=True)
        return work

    def all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work:
        """Start giving row w of ``sent`` to worker w; row w of ``received`` is what worker w gave. [workers, …]."""
        work: dist.Work = self._collectives.all_to_all_single(received, sent, group=self.group, async_op=True)
        return work

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> dist.Work:
        """Start collecting every worker's ``tensor`` in ``gathered`` [workers, …]."""
        # Its name before torch 2.13 is deprecated since.
        collectives = self._collectives
        gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_into_tensor
        work: dist.Work = gather(gathered.view(-1), tensor.view(-1), group=self.group, async_op=True)
        return work

    def minimum(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor's elements by the smallest of all workers' ones."""
        if self.world_size > 1:
            dist.all_reduce(tensor.view(-1), op=dist.ReduceOp.MIN, group=self.group)

    def gather(self, tensor: Tensor) -> Tensor:
        """[workers, …]: every worker's ``tensor``, all of one shape and dtype."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor, group=self.group)
        return torch.stack(gathered)

    def mean(self, tensor: Tensor) -> Tensor:
        """Average ``tensor`` over the workers in place and return it."""
        wait(self.all_reduce(tensor))
        return tensor.div_(self.world_size) if self.world_size > 1 else tensor


def wait(work: dist.Work | None) -> None:
    """Wait for a collective: on the host for gloo, on the current stream for NCCL. Its error is raised here."""
    if work is not None:
        work.wait()
