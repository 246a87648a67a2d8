"""The order of collectives: which buckets travel together, and what is computed while they travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Work, wait
from powersgd_triton.comm.exchange import Collectives
from powersgd_triton.core.buckets import BucketState
from powersgd_triton.core.clock import EXCHANGE, MESSAGES, Clock

UnderWay = tuple[Collectives, Work, Callable[[Any], None]]
"""A bucket, the collective that it waits for, and the function that takes its result."""


class Part(NamedTuple):
    """A bucket with its gradients. ``done`` is called when they are overwritten."""

    bucket: BucketState
    gradients: Mapping[str, Tensor]
    done: Callable[[], None] | None


class Schedule:
    """The buckets of the open step that wait or are under way.

    Attributes:
        clock: Counts the time for which the host, or the stream, waits for other workers.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        # Buckets that wait for the next ones, since their messages are small.
        self._waiting: list[Part] = []
        self._under_way: list[UnderWay] = []

    # Buckets that travel together ------------------------------------------------------------------------------------

    def wait(self, part: Part) -> list[BucketState]:
        """Let a bucket wait for the next ones of its step. Return all that wait."""
        self._waiting.append(part)
        return [part.bucket for part in self._waiting]

    def fits(self, gradients: Mapping[str, Tensor]) -> bool:
        """Return whether a bucket can join those that wait: one device, and one dtype for the kernels."""
        return not self._waiting or _kind(self._waiting[0].gradients) == _kind(gradients)

    def take(self) -> list[Part]:
        """Return the buckets that wait, which wait no longer."""
        waiting, self._waiting = self._waiting, []
        return waiting

    # Buckets under way -----------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def advance(self, bucket: Collectives | None = None, done: Callable[[Any], None] = lambda _: None) -> None:
        """Start a bucket, if one is given, and advance those under way by one collective.

        Messages then travel while later buckets are computed, and during the backward pass. With two collectives a
        bucket, the order is P₀ P₁ Q₀ P₂ Q₁ …, on the CPU as on CUDA, where the host only enqueues.

        Args:
            bucket: Yields each collective that it starts.
            done: Takes what it returns in the end.
        """
        mark, older, started = self.clock.mark, self._under_way, list[UnderWay]()
        self._under_way = []
        # The new one first: its kernels need not wait for the messages of the older ones.
        for run, work, take in [*([] if bucket is None else [(bucket, None, done)]), *older]:
            mark(EXCHANGE)
            wait(work)
            mark(MESSAGES)
            try:
                under_way = [(run, next(run), take)]
            except StopIteration as end:
                under_way, result = [], end.value
            if under_way:
                (started if run is bucket else self._under_way).extend(under_way)
            else:
                take(result)
            mark(None)
        self._under_way += started

    def finish(self) -> None:
        """Finish the buckets under way."""
        while self._under_way:
            self.advance()

    def clear(self) -> None:
        """Forget all buckets, since their step is void. A peer may be gone, so do not wait for collectives."""
        self._waiting, self._under_way = [], []


def _kind(gradients: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    first = next(iter(gradients.values()))
    return first.dtype, first.device
