"""Communicators of workers in one process, and what is done when all of them wait."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.planning.trial import StandIn


class Meeting:
    """Where workers that run in threads of their own wait for each other, and exchange tensors."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=600)
        self._tensors: list[Tensor] = [torch.empty(0)] * world_size

    def gather(self, index: int, tensor: Tensor) -> Tensor:
        """[workers, …]."""
        self._tensors[index] = tensor.clone()
        self._barrier.wait()
        gathered = torch.stack(self._tensors)
        self._barrier.wait()
        return gathered

    def abort(self) -> None:
        self._barrier.abort()


class Line(StandIn):
    """One worker's end.

    In a step's schedule it notes what is to be communicated, and the worker goes on once ``communicate`` has done so.
    In a meeting, where workers run in threads, it waits for the others.
    """

    global_index = 0

    def __init__(self, index: int, world_size: int) -> None:
        super().__init__(world_size, index)
        self.global_index = index
        self.message: tuple[str, Tensor, Tensor] | None = None
        self.meeting: Meeting | None = None

    def all_reduce(self, tensor: Tensor) -> dist.Work | None:
        if self.world_size > 1 and tensor.numel():
            if self.meeting is not None:
                # One worker after the other, as ``communicate`` does.
                tensor.copy_(functools.reduce(torch.add, self.meeting.gather(self.index, tensor)))
            else:
                self._note("sum", tensor, tensor)
        return None

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Sequence[int] | None = None) -> Any:
        if sizes is None:
            self._note("exchange", received, sent)
        else:
            # Rows of several lengths, padded so that they fit one tensor.
            longest = max(sizes)
            rows = [torch.nn.functional.pad(row, (0, longest - len(row))) for row in sent.split(list(sizes))]
            self._note("exchange", received.view(len(sizes), -1), torch.stack(rows))

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> Any:
        self._note("gather", gathered, tensor)

    def start_gather(self, tensor: Tensor, _device: torch.device | None = None) -> Callable[[], Tensor]:
        if self.world_size == 1:
            return lambda: tensor.unsqueeze(0)
        assert self.meeting is not None
        gathered = self.meeting.gather(self.index, tensor)
        return lambda: gathered

    def _note(self, kind: str, received: Tensor, sent: Tensor) -> None:
        assert self.message is None, "two messages at once"
        self.message = kind, received, sent


def in_nodes(world_size: int, node_size: int) -> tuple[list[Line], list[list[Line]]]:
    """A line for each worker. The lines by which it talks to its node and across nodes are in the other lists."""
    lines, nodes = [Line(index, world_size) for index in range(world_size)], world_size // node_size
    if node_size == 1:
        return lines, []
    insides = [[Line(index, node_size) for index in range(node_size)] for _ in range(nodes)]
    across = [[Line(node, nodes) for node in range(nodes)] for _ in range(node_size)]
    for worker, line in enumerate(lines):
        node, index = divmod(worker, node_size)
        line.inside, line.across = insides[node][index], across[index][node]
    return lines, [*insides, *across]


def communicate(lines: Sequence[Line]) -> None:
    """Do what all workers wait for. Sums are made one worker after the other in the message's dtype."""
    messages = [line.message for line in lines if line.message is not None]
    for line in lines:
        line.message = None
    if not messages:
        return
    assert len(messages) == len(lines), "some workers sent a message and others did not"
    # The rows that each worker receives may have another length.
    kinds = {
        (kind, received.numel() if kind == "sum" else 0, sent.shape, sent.dtype) for kind, received, sent in messages
    }
    assert len(kinds) == 1, "workers sent different messages"
    ((kind, *_),) = kinds
    sent = [tensor.clone() for _, _, tensor in messages]
    total = sent[0].clone()
    if kind == "sum":
        for tensor in sent[1:]:
            total += tensor
    for worker, (_, received, _) in enumerate(messages):
        if kind == "sum":
            received.copy_(total)
        else:
            rows = torch.stack(sent if kind == "gather" else [tensor[worker] for tensor in sent])
            received.copy_(rows[:, : received.shape[1]] if kind == "exchange" else rows.view_as(received))
