"""Bytes that a worker sends in collectives, each counted as a ring sends it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

# {collective: (position and name of the argument counted, bytes sent for each of its bytes by W workers)}. Of reduce
# and broadcast a worker sends at most that much.
RING: dict[str, tuple[int, str, Callable[[int], float]]] = {
    "all_reduce": (0, "tensor", lambda workers: 2 * (workers - 1) / workers),
    "all_gather": (1, "tensor", lambda workers: workers - 1),
    "all_gather_into_tensor": (1, "input_tensor", lambda workers: workers - 1),
    "all_gather_single": (1, "input_tensor", lambda workers: workers - 1),
    "all_to_all": (1, "input_tensor_list", lambda workers: (workers - 1) / workers),
    "all_to_all_single": (1, "input", lambda workers: (workers - 1) / workers),
    "reduce_scatter": (1, "input_list", lambda workers: (workers - 1) / workers),
    "reduce_scatter_tensor": (1, "input", lambda workers: (workers - 1) / workers),
    "reduce_scatter_single": (1, "input", lambda workers: (workers - 1) / workers),
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
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], workers: int, index: int) -> Call:
        """Count a call of a collective.

        Args:
            name: Key of ``RING``.
            args, kwargs: Arguments of the collective.
            workers: Number of workers of the group.
            index: Index of this worker in the group.
        """
        position, keyword, factor = RING[name]
        argument = kwargs[keyword] if keyword in kwargs else args[position]
        tensors = [argument] if isinstance(argument, Tensor) else argument
        if kwargs.get("input_split_sizes"):
            # An all_to_all_single with rows of several lengths.
            sizes = [kwargs[f"{which}_split_sizes"] for which in ("input", "output")]
            sent, received = ((sum(rows) - rows[index]) * argument.element_size() for rows in sizes)
            return cls(name, workers, sent, received)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return cls(name, workers, round(size * factor(workers)), round(size * factor(workers)))


@contextlib.contextmanager
def counting(note: Callable[[Call], object] | None = None) -> Iterator[collections.Counter[str]]:
    """Count the bytes that this worker sends inside this block, by collective of ``torch.distributed``.

    A collective on a group of one worker sends nothing. DeepSpeed looks some of them up when it starts, so that the
    block must begin before. ``note`` gets each call.
    """
    sent: collections.Counter[str] = collections.Counter()
    # Older versions of torch lack some of them.
    originals = {name: getattr(dist, name) for name in RING if hasattr(dist, name)}
    for name, original in originals.items():
        setattr(dist, name, _counted(name, original, sent, note))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _counted(
    name: str, collective: Callable[..., Any], sent: collections.Counter[str], note: Callable[[Call], object] | None
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        call = Call.of(name, args, kwargs, dist.get_world_size(group), dist.get_rank(group))
        sent[name] += call.sent
        if note is not None:
            note(call)
        return collective(*args, **kwargs)

    return counted
