"""Workers in one process: threads of which one runs at a time, until all wait for each other in a collective."""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from powersgd_triton.planning.trial import StandIn

T = TypeVar("T")
TURN = threading.Lock()
"""Held by the worker that runs: Triton's interpreter cannot run in several threads at once."""


class Meeting:
    """Where the workers of a group exchange messages of one kind, shape and dtype."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, self._collect, timeout=600)
        self._sent: list[tuple[str, Tensor]] = [("nothing", torch.empty(0))] * world_size
        self._received: list[Tensor] = []
        self.abort = self._barrier.abort

    def exchange(self, index: int, kind: str, tensor: Tensor) -> list[Tensor]:
        """Return every worker's tensor. Others run meanwhile."""
        self._sent[index] = kind, tensor.clone()
        TURN.release()
        try:
            self._barrier.wait()
        finally:
            TURN.acquire()
        return self._received

    def _collect(self) -> None:
        kinds = {(kind, tensor.shape, tensor.dtype) for kind, tensor in self._sent}
        assert len(kinds) == 1, "workers sent different messages"
        self._received = [tensor for _, tensor in self._sent]


class Line(StandIn):
    """One worker's end of a group."""

    global_index = 0

    def __init__(self, index: int, world_size: int, meeting: Meeting) -> None:
        super().__init__(world_size, index)
        self.global_index = index
        self.meeting, self._exchange = meeting, functools.partial(meeting.exchange, index)

    def all_reduce(self, tensor: Tensor) -> Any:
        # One worker after the other, in the message's dtype.
        tensor.copy_(functools.reduce(torch.add, self._exchange("sum", tensor)))

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Sequence[int] | None = None) -> Any:
        if sizes is not None:
            # Rows of several lengths, padded so that they fit one tensor.
            longest = max(sizes)
            rows = [torch.nn.functional.pad(row, (0, longest - len(row))) for row in sent.split(list(sizes))]
            received, sent = received.view(len(sizes), -1), torch.stack(rows)
        own = torch.stack([rows[self.index] for rows in self._exchange("exchange", sent)])
        received.copy_(own[:, : received.shape[1]])

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> Any:
        gathered.copy_(torch.stack(self._exchange("gather", tensor)).view_as(gathered))

    def start_gather(self, tensor: Tensor, _device: torch.device | None = None) -> Callable[[], Tensor]:
        gathered = torch.stack(self._exchange("facts", tensor))
        return lambda: gathered


def group(world_size: int) -> list[Line]:
    meeting = Meeting(world_size)
    return [Line(index, world_size, meeting) for index in range(world_size)]


def in_nodes(world_size: int, node_size: int = 1) -> list[Line]:
    """A line for each worker, with those by which it talks to its node and across nodes."""
    lines, nodes = group(world_size), world_size // node_size
    if node_size > 1:
        insides, across = [group(node_size) for _ in range(nodes)], [group(nodes) for _ in range(node_size)]
        for worker, line in enumerate(lines):
            node, index = divmod(worker, node_size)
            line.inside, line.across = insides[node][index], across[index][node]
    return lines


def together(lines: Sequence[Line], act: Callable[[int], T]) -> list[T]:
    """Return ``act(worker)`` of each worker, which may be collective. Raise what the first one to fail has raised."""
    failures: list[BaseException] = []

    def run(worker: int) -> T:
        line = lines[worker]
        with TURN:
            try:
                result = act(worker)
                # So that those that still wait for this worker hear of it at once.
                line.meeting.exchange(worker, "end", torch.empty(0))
                return result
            except BaseException as error:
                failures.append(error)
                for each in (line, line.inside, line.across):
                    if isinstance(each, Line):
                        each.meeting.abort()
                raise

    with ThreadPoolExecutor(len(lines)) as pool:
        running = [pool.submit(run, worker) for worker in range(len(lines))]
    if failures:
        raise failures[0]
    return [each.result() for each in running]
