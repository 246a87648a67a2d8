"""What compression computes in a step, timed on this device without other workers."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import matrix_shape

if TYPE_CHECKING:
    from powersgd_triton.core.engine import Engine

RANKS = (4, 16, 64)
"""Ranks at which a step is timed."""
ROUNDS = 2
LARGEST = 1 << 22
"""Elements that are timed of a larger model."""


class _Echo(Communicator):
    """Collectives of one process that stands for two: what it receives is what it sends."""

    @property
    def world_size(self) -> int:
        return 2

    @property
    def index(self) -> int:
        return 0

    def all_reduce(self, tensor: Tensor) -> dist.Work | None:  # noqa: ARG002
        return None

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> dist.Work | None:  # type: ignore[override]
        gathered.copy_(tensor.expand_as(gathered))
        return None

    def gather(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:  # noqa: ARG002
        return tensor.expand(2, *tensor.shape)


@dataclasses.dataclass(frozen=True)
class ComputeTime:
    """Seconds that compression computes in a step, as a quadratic function of a common rank.

    Attributes:
        ranks: The ranks at which it was measured, in increasing order. Three, or fewer for matrices of low rank.
        seconds: What was measured there.
    """

    ranks: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, rank: float) -> float:
        """Return the seconds at a rank, by interpolation (Lagrange)."""
        total = 0.0
        for r, seconds in zip(self.ranks, self.seconds, strict=True):
            for other in self.ranks:
                if other != r:
                    seconds *= (rank - other) / (r - other)
            total += seconds
        return max(total, 0.0)


def time_compute(
    engine: Callable[..., Engine],
    config: PowerSGDConfig,
    tensors: Mapping[str, Sequence[int]],
    device: torch.device,
) -> ComputeTime:
    """Time the steps of an engine on this device, on random gradients in fp32. The host waits for the device.

    Args:
        engine: The class ``Engine``, which itself times with this function.
        config: Configuration of the compression. Its rank or budget does not matter.
        tensors: {name: shape} of the model's tensors. If it is large, a part is timed.
    """
    count = sum(math.prod(shape) for shape in tensors.values())
    every = -(-count // LARGEST)
    sample = {name: _at_most(shape, LARGEST) for name, shape in list(tensors.items())[::every]}
    sampled = sum(math.prod(shape) for shape in sample.values())
    gradients = {name: torch.randn(*shape, device=device) for name, shape in sample.items()}
    fields: dict[str, Any] = {"compression": None, "bytes_per_step": None, "max_rank": None, "max_overhead": None}
    fields |= {"start_iter": 0, "check_every": 0, "min_compression_rate": 0.0}
    most = max((min(matrix_shape(shape)) for shape in sample.values() if len(shape) > 1), default=0)
    ranks = sorted({min(rank, most) for rank in RANKS} - {0})
    seconds = []
    for rank in ranks:
        tried = engine(dataclasses.replace(config, rank=rank, **fields), _Echo(), lambda: sample, device)
        rounds = [_time_steps(tried, gradients, device) for _ in range(1 + ROUNDS)]
        seconds.append(min(rounds[1:]) * count / max(1, sampled))
    return ComputeTime(tuple(map(float, ranks)), tuple(seconds))


def _at_most(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """Return the shape with fewer rows, if it has more elements than that."""
    rest = math.prod(shape[1:])
    return (min(shape[0], max(1, numel // max(1, rest))), *shape[1:]) if shape else ()


def _time_steps(engine: Engine, gradients: Mapping[str, Tensor], device: torch.device) -> float:
    """Return the mean seconds of two steps, in which the alternating algorithm computes both of its products."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(2):
        layout = engine.begin("trial", lambda: {n: tuple(g.shape) for n, g in gradients.items()}, device, last=True)
        engine.average(layout, gradients)
    synchronize(device)
    return (time.perf_counter() - begin) / 2


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
