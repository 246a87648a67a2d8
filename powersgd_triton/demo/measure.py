"""What a training costs: bytes that a worker sends, as a ring sends them, time in the hook, and its progress."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.
import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from powersgd_triton.comm import exchange

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


def _part_of_others(workers: int) -> float:
    return (workers - 1) / workers


# {collective: (position and name of the argument counted, bytes sent for each of its bytes by W workers)}. Of reduce
# and broadcast a worker sends at most that much.
RING: dict[str, tuple[int, str, Callable[[int], float]]] = {
    "all_reduce": (0, "tensor", lambda workers: 2 * (workers - 1) / workers),
    "all_gather": (1, "tensor", lambda workers: workers - 1),
    "all_gather_into_tensor": (1, "input_tensor", lambda workers: workers - 1),
    "all_gather_single": (1, "input_tensor", lambda workers: workers - 1),
    "all_to_all": (1, "input_tensor_list", _part_of_others),
    "all_to_all_single": (1, "input", _part_of_others),
    "reduce_scatter": (1, "input_list", _part_of_others),
    "reduce_scatter_tensor": (1, "input", _part_of_others),
    "reduce_scatter_single": (1, "input", _part_of_others),
    "reduce": (0, "tensor", lambda workers: float(workers > 1)),
    "broadcast": (0, "tensor", lambda workers: float(workers > 1)),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """What one worker sends and receives in a collective.

    Attributes:
        name: Name of the collective in ``torch.distributed``.
        workers: Number of workers of the group.
        sent, received: Bytes.
    """

    name: str
    workers: int
    sent: int
    received: int

    @property
    def as_all_reduce(self) -> float:
        """Return B if it takes as many bytes as an all-reduce of B bytes. Of one worker, 0."""
        return max(self.sent, self.received) / RING["all_reduce"][2](self.workers) if self.workers > 1 else 0.0

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], workers: int, index: int) -> "Call":
        """Count a call of a collective in ``RING``, made by worker ``index`` of a group of so many workers."""
        position, keyword, factor = RING[name]
        argument = kwargs[keyword] if keyword in kwargs else args[position]
        if kwargs.get("input_split_sizes"):
            # An all_to_all_single with rows of several lengths.
            sizes = [kwargs[f"{which}_split_sizes"] for which in ("input", "output")]
            sent, received = ((sum(rows) - rows[index]) * argument.element_size() for rows in sizes)
            return cls(name, workers, sent, received)
        size = sum(tensor.nbytes for tensor in ([argument] if isinstance(argument, Tensor) else argument))
        return cls(name, workers, round(size * factor(workers)), round(size * factor(workers)))


@contextlib.contextmanager
def counting(note: Callable[[Call], object]) -> Iterator[None]:
    """Pass each collective of ``torch.distributed`` that this worker starts inside this block to ``note``.

    DeepSpeed looks some of them up when it starts, so that the block must begin before.
    """
    # Older versions of torch lack some of them.
    originals = {name: getattr(dist, name) for name in RING if hasattr(dist, name)}

    def counted(name: str, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        note(Call.of(name, args, kwargs, dist.get_world_size(group), dist.get_rank(group)))
        return originals[name](*args, **kwargs)

    for name in originals:
        setattr(dist, name, functools.partial(counted, name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


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

    @contextlib.contextmanager
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
            with counting(self._note):
                yield
        finally:
            setattr(exchange, "exchange_parts", exchange_parts)  # noqa: B010

    def _note(self, call: Call) -> None:
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
        times = [max(_elapsed_ms(start, end) for end in ends) for start, ends in self._steps if ends]
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


@contextlib.contextmanager
def progress(title: str, steps: int, *, shown: bool) -> Iterator[Callable[[float, float], None]]:
    """Show the progress of a training on this worker if ``shown``: a bar on a terminal, and ten lines elsewhere.

    Yields a function to call with (loss, bytes sent so far) after each step.
    """
    bar: Any = None
    if shown and sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(total=steps, desc=f"{title:<16}", unit="step", mininterval=0.5)
    done = 0

    def update(loss: float, bytes_sent: float) -> None:
        nonlocal done
        done += 1
        figures = f"loss {loss:.3f}, {bytes_sent / 1e6:.1f} MB sent"
        if bar is not None:
            bar.set_postfix_str(figures, refresh=False)
            bar.update()
        elif shown and done * 10 // steps > (done - 1) * 10 // steps:
            print(f"{title:<16} step {done}/{steps}: {figures}", file=sys.stderr, flush=True)

    try:
        yield update
    finally:
        if bar is not None:
            bar.close()
