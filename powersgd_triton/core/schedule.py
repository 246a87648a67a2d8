"""The order of collectives: which buckets travel together, and what is computed while they travel."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Work, wait
from powersgd_triton.comm.exchange import Collectives
from powersgd_triton.core.buckets import Part
from powersgd_triton.core.clock import EXCHANGE, MESSAGES

UnderWay = tuple[Collectives, Work, Callable[[Any], None]]
"""A bucket, the collective that it waits for, and the function that takes its result."""


class Schedule:
    """The buckets of the open step that wait or are under way."""

    def __init__(self) -> None:
        # Called with the phase that begins, if telemetry is on.
        self.mark: Callable[[str | None], None] = lambda _: None
        # Buckets that wait for the next ones, since their messages are small.
        self._waiting: list[Part] = []
        self._under_way: list[UnderWay] = []

    def ready(self, part: Part, are_large: Callable[[Sequence[Part]], bool] | None) -> list[list[Part]]:
        """Return the buckets that wait no longer, now that ``part`` has come. Each list travels as one bucket.

        Those of a list have one device, and one dtype for the kernels. ``are_large`` says whether the messages of
        buckets are large enough together. Without it, nothing may wait any more.
        """
        lists: list[list[Part]] = []
        if self._waiting and _kind(self._waiting[0].gradients) != _kind(part.gradients):
            lists.append(self._waiting)
            self._waiting = []
        self._waiting.append(part)
        if are_large is None or are_large(self._waiting):
            lists.append(self._waiting)
            self._waiting = []
        return lists

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def advance(
        self, bucket: Collectives | None = None, done: Callable[[Any], None] = lambda _: None, *, finish: bool = False
    ) -> None:
        """Start a bucket, if one is given, and advance those under way by one collective.

        Messages then travel while later buckets are computed, and during the backward pass. With two collectives a
        bucket, the order is P₀ P₁ Q₀ P₂ Q₁ …, on the CPU as on CUDA, where the host only enqueues. ``done`` takes what
        the bucket returns in the end. With ``finish``, go on until no bucket is under way, since no later one comes.
        """
        mark = self.mark
        # The newest first: its message leaves before the averages of older ones are written, for which no one waits.
        turns = [*([] if bucket is None else [(bucket, None, done)]), *self._under_way]
        while turns:
            self._under_way = []
            while turns:
                run, work, take = turns.pop(0)
                mark(EXCHANGE)
                wait(work)
                mark(MESSAGES)
                try:
                    self._under_way.append((run, next(run), take))
                except StopIteration as end:
                    take(end.value)
                mark(None)
            turns = self._under_way if finish else []

    def clear(self) -> None:
        """Forget all buckets, since their step is void. A peer may be gone, so do not wait for collectives."""
        self._waiting, self._under_way = [], []


def _kind(gradients: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    first = next(iter(gradients.values()))
    return first.dtype, first.device
