"""Measure the cost of a step: bytes passed to collectives, and time in the communication hook."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from powersgd_triton.comm import exchange
from powersgd_triton.ops.wire import Wire

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

# {collective: (position, name) of the argument with the data that this worker sends}.
_SENT_ARGUMENT = {
    "all_reduce": (0, "tensor"),
    "all_gather": (1, "tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input"),
    "reduce_scatter_single": (1, "input"),
}


class Traffic:
    """Counts the bytes that this process passes to collectives, and those of narrow messages.

    The exchange of a narrow message replaces one all-reduce and counts like one, whichever collectives it takes.

    Args:
        collectives: Names of the collectives to count. Default: all.
    """

    def __init__(self, collectives: Collection[str] | None = None) -> None:
        self.sent = 0
        counted = _SENT_ARGUMENT if collectives is None else collectives
        # Older versions of torch lack some of them.
        self._names = [name for name in counted if hasattr(dist, name)]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count calls of the functions of ``torch.distributed`` inside this block."""
        originals = {name: getattr(dist, name) for name in self._names}
        for name, original in originals.items():
            setattr(dist, name, self._counted(original, *_SENT_ARGUMENT[name]))
        exchange_parts = exchange.exchange_parts

        def counted_exchange(wire: Wire, *args: Any) -> exchange.Schedule:
            self.sent += len(wire.plan.chunks) * wire.plan.size
            yield from exchange_parts(wire, *args)

        setattr(exchange, "exchange_parts", counted_exchange)  # noqa: B010
        try:
            yield
        finally:
            setattr(exchange, "exchange_parts", exchange_parts)  # noqa: B010
            for name, original in originals.items():
                setattr(dist, name, original)

    def _counted(self, collective: Callable[..., Any], position: int, keyword: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            sent = kwargs[keyword] if keyword in kwargs else args[position]
            tensors = [sent] if isinstance(sent, Tensor) else sent
            self.sent += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            return collective(*args, **kwargs)

        return counted


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

    def median_ms(self) -> float:
        """Return the median over steps."""
        return statistics.median(
            max(_elapsed_ms(start, end) for end in completions) for start, completions in self._steps if completions
        )


def _cuda_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(start: Any, end: Any) -> float:
    if isinstance(start, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end))
    return float(end - start) * 1e3
