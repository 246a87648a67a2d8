"""Measure the cost of a step: bytes passed to collectives, and time in the communication hook."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from powersgd_triton.comm import exchange
from powersgd_triton.demo import collectives

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class Traffic:
    """Counts the bytes that this process sends and receives in collectives, each as a ring sends it.

    Args:
        names: Names of the collectives to count besides those of narrow messages. Default: all. The caller names
            reduce-scatters without the all-gathers after them, which carry parameters, so a reduce-scatter counts
            like a whole all-reduce then.

    Attributes:
        sent, received: Bytes.
        as_all_reduces: Bytes on a scale on which an all-reduce of B bytes counts B on any number of workers.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._in_exchange = False
        self.reset()

    def reset(self) -> None:
        self.sent = self.received = 0
        self.as_all_reduces = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count calls of the functions of ``torch.distributed`` inside this block."""
        exchange_parts = exchange.exchange_parts

        def marked(*args: Any) -> exchange.Collectives:
            schedule = exchange_parts(*args)
            while True:
                # Only while it starts a collective: other ones may start before the next part of the exchange.
                self._in_exchange = True
                try:
                    work = next(schedule)
                except StopIteration:
                    return
                finally:
                    self._in_exchange = False
                yield work

        setattr(exchange, "exchange_parts", marked)  # noqa: B010
        try:
            with collectives.counting(self._note):
                yield
        finally:
            setattr(exchange, "exchange_parts", exchange_parts)  # noqa: B010

    def _note(self, call: collectives.Call) -> None:
        if self._names is not None and call.name not in self._names and not self._in_exchange:
            return
        halves = 2 if self._names is not None and call.name.startswith("reduce_scatter") else 1
        self.sent += call.sent
        self.received += call.received
        self.as_all_reduces += halves * call.as_all_reduce


class HookTimer:
    """Times a hook from a step's first call to the completion of its last Future. Includes waiting for other workers.

    With one bucket, this is the time of the hook alone. With several, it includes the backward pass between them.
    """

    def __init__(self, device: torch.device) -> None:
        self._now = _cuda_now if device.type == "cuda" else time.perf_counter
        self._steps: list[tuple[Any, list[Any]]] = []

    def timed(self, hook: Hook) -> Hook:
        """Return the hook with its calls and completions recorded."""

        def timed_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if bucket.index() == 0:
                self._steps.append((self._now(), []))
            completions = self._steps[-1][1]
            future = hook(state, bucket)
            # On CUDA, the result is ready on the streams that the callback runs with, so an event marks its completion.
            future.add_done_callback(lambda _: completions.append(self._now()))
            return future

        return timed_hook

    def median_ms(self) -> float | None:
        """Return the median over steps. None if the hook was not called."""
        times = [
            max(_elapsed_ms(start, end) for end in completions) for start, completions in self._steps if completions
        ]
        return statistics.median(times) if times else None


def _cuda_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(start: Any, end: Any) -> float:
    if isinstance(start, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end))
    return float(end - start) * 1e3
