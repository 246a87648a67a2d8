"""Factors of low rank for matrices, whole tensors in few bits, or both: what the configuration in force asks for."""

import dataclasses
import functools
from collections.abc import Generator, Mapping
from typing import Any

from torch import Tensor

from powersgd_triton.comm.communicator import Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.scheme import Average, Ranges, Scheme, Task
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.schemes.low_rank import LowRank
from powersgd_triton.schemes.quantized import Quantized


class Mixed(Scheme):
    """The scheme of a configuration, which ``compression="auto"`` may change.

    With ``PowerSGDConfig(bypass=…)``, what has no factors travels in few bits, in messages of its own. These tensors
    are rounded stochastically. A step leaves nothing of them, and what is lost has the mean 0.
    """

    def __init__(self) -> None:
        self._factors, self._quantized = LowRank(), Quantized()

    def prepare(self, task: Task) -> Any:
        """Return the backend of the bucket's factors, or the memory of quantized messages."""
        return (self._quantized if _is_quantized(task) else self._factors).prepare(task)

    def average(self, task: Task) -> Generator[Work, None, Average]:
        if _is_quantized(task):
            return self._quantized.average(task)
        return self._both(task) if task.config.bypass else self._factors.average(task)

    def sent_numel(self, layout: Layout, config: PowerSGDConfig, iteration: int) -> int:
        return layout.sent_numel(config, iteration)

    def _both(self, task: Task) -> Generator[Work, None, "Both"]:
        layout, backend, parts = task.layout, task.memory, list[Average]()
        # Whole tensors too have errors left from the time when they had factors.
        gradients = task.residuals.whole.add_remaining(layout, task.gradients, task.step)
        task = dataclasses.replace(task, gradients=gradients)
        if layout.compressed or layout.bypass:
            parts.append((yield from self._factors.average(task)))
        if layout.rounded.segments:
            config = _config_of_rest(task.config.bypass, task.config.seed, task.config.backend)
            # All of it, also where workers need parts: it is small.
            rest = dataclasses.replace(task, layout=layout.rounded, config=config, memory={}, found={}, ranges=None)
            parts.append((yield from self._quantized.average(rest)))
        return Both(backend.bucket, tuple(parts))


def _is_quantized(task: Task) -> bool:
    # The first ``start_iter`` steps of ``Compressor`` have layouts in which nothing is rounded.
    return task.config.quantize is not None and task.layout.rounds


@functools.cache
def _config_of_rest(quantize: str | None, seed: int, backend: str) -> PowerSGDConfig:
    return PowerSGDConfig(quantize=quantize, seed=seed, backend=backend)


@dataclasses.dataclass(frozen=True)
class Both:
    """The averages of a bucket's matrices and of its other tensors. Each part writes its own tensors."""

    bucket: Bucket
    parts: tuple[Average, ...]

    def reconstruct(self, out: Mapping[str, Tensor], overflow: Tensor | None) -> None:
        for part in self.parts:
            part.reconstruct(out, overflow)

    def reconstruct_ranges(self, out: Ranges, overflow: Tensor | None) -> None:
        for part in self.parts:
            part.reconstruct_ranges(out, overflow)
