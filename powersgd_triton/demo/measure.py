"""What a training costs: bytes that a worker sends, as a ring sends them, and the time in the hook."""

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from powersgd_triton.core.clock import between, now

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

COUNTED: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("all_reduce", "reduce", "broadcast"), (0, "tensor")),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), (1, "input_tensor")),
    **dict.fromkeys(("all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_single"), (1, "input")),
    **{"all_gather": (1, "tensor"), "all_to_all": (1, "input_tensor_list"), "reduce_scatter": (1, "input_list")},
}
"""{collective: position and name of the argument whose bytes are counted}."""


def ring_factor(name: str, workers: int) -> float:
    """Return the bytes that one of W workers sends for each byte counted. Of reduce and broadcast, at most that."""
    if name in ("reduce", "broadcast"):
        return float(workers > 1)
    if name.startswith("all_gather"):
        return workers - 1
    return (2 if name == "all_reduce" else 1) * (workers - 1) / workers


@dataclasses.dataclass(frozen=True)
class Call:
    """Bytes that one worker of a group of so many sends and receives in a collective of ``torch.distributed``.

    ``narrow`` says whether its tensors are bytes, as narrow messages are.
    """

    name: str
    workers: int
    sent: int
    received: int
    narrow: bool = False

    @property
    def as_all_reduce(self) -> float:
        """Return B if it takes as many bytes as an all-reduce of B bytes. Of one worker, 0."""
        return max(self.sent, self.received) / ring_factor("all_reduce", self.workers) if self.workers > 1 else 0.0

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], workers: int, index: int) -> "Call":
        """Count a call of a collective in ``COUNTED``, made by worker ``index`` of a group of so many workers."""
        position, keyword = COUNTED[name]
        argument = kwargs[keyword] if keyword in kwargs else args[position]
        tensors = [argument] if isinstance(argument, Tensor) else argument
        if kwargs.get("input_split_sizes"):
            # An all_to_all_single with rows of several lengths.
            sizes = [kwargs[f"{which}_split_sizes"] for which in ("input", "output")]
            sent, received = ((sum(rows) - rows[index]) * argument.element_size() for rows in sizes)
        else:
            sent = received = round(sum(tensor.nbytes for tensor in tensors) * ring_factor(name, workers))
        return cls(name, workers, sent, received, tensors[0].dtype == torch.uint8)


@contextlib.contextmanager
def counting(note: Callable[[Call], object]) -> Iterator[None]:
    """Pass each collective of ``torch.distributed`` that this worker starts inside this block to ``note``.

    DeepSpeed looks some of them up when it starts, so that the block must begin before.
    """
    # Older versions of torch lack some of them.
    originals = {name: getattr(dist, name) for name in COUNTED if hasattr(dist, name)}

    def counted(name: str, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        note(Call.of(name, args, kwargs, dist.get_world_size(group), dist.get_rank(group)))
        return originals[name](*args, **kwargs)

    stand_ins: dict[str, Any] = {name: functools.partial(counted, name) for name in originals}
    with mock.patch.multiple(dist, **stand_ins):
        yield


class Traffic:
    """Bytes of collectives; also on a scale on which an all-reduce of B bytes counts B on any number of workers.

    ``weights`` says how often to count which collectives, besides those of narrow messages. None counts all once.
    """

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        self._weights = weights
        self.clear()

    def clear(self) -> None:
        self.sent = self.received = 0
        self.as_all_reduces = 0.0

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Count the collectives that this worker starts inside this block."""
        return counting(self._note)

    def _note(self, call: Call) -> None:
        weight = 1 if self._weights is None or call.narrow else self._weights.get(call.name, 0)
        if weight:
            self.sent += call.sent
            self.received += call.received
            self.as_all_reduces += weight * call.as_all_reduce


class HookTimer:
    """Times a hook from a step's first call to the completion of its last Future. Includes waiting for other workers.

    With one bucket, this is the time of the hook alone. With several, it includes the backward pass between them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[tuple[Any, list[Any]]] = []

    def timed(self, hook: Hook) -> Hook:
        """Return the hook with its calls and completions recorded."""

        def timed_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if bucket.index() == 0:
                self._steps.append((now(self._device), []))
            completions = self._steps[-1][1]
            future = hook(state, bucket)
            # On CUDA, the result is ready on the streams that the callback runs with, so an event marks its completion.
            future.add_done_callback(lambda _: completions.append(now(self._device)))
            return future

        return timed_hook

    def median_ms(self) -> float | None:
        """Return the median over steps. None if the hook was not called."""
        times = [max(between(start, end) for end in ends) for start, ends in self._steps if ends]
        return statistics.median(times) if times else None
