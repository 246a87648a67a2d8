"""Factors of low rank for matrices, and the other tensors in few bits beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping

from torch import Tensor

from powersgd_triton.comm.communicator import Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.scheme import Average, Ranges, Scheme, Task
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.schemes.low_rank import LowRank
from powersgd_triton.schemes.quantized import Quantized


class Mixed(Scheme):
    """The scheme of ``PowerSGDConfig(bypass=…)``: what has no factors travels in few bits, in messages of its own.

    These tensors are rounded stochastically. A step leaves nothing of them, and what is lost has the mean 0.
    """

    def __init__(self, config: PowerSGDConfig) -> None:
        self._factors, self._rest = LowRank(), Quantized()
        self._config = PowerSGDConfig(quantize=config.bypass, seed=config.seed, backend=config.backend)

    def prepare(self, task: Task) -> Backend:
        """Return the backend of the bucket, whose messages have no bypass tensors."""
        return self._factors.prepare(task)

    def average(self, task: Task) -> Generator[Work, None, Both]:
        layout, backend, parts = task.layout, task.memory, list[Average]()
        # Whole tensors too have errors left from the time when they had factors.
        gradients = task.residuals.whole.add_remaining(layout, task.gradients, task.step)
        task = dataclasses.replace(task, gradients=gradients)
        if layout.compressed or layout.bypass:
            parts.append((yield from self._factors.average(task)))
        if layout.rounded.segments:
            # All of it, also where workers need parts: it is small.
            rest = dataclasses.replace(task, layout=layout.rounded, config=self._config, memory={}, ranges=None)
            parts.append((yield from self._rest.average(rest)))
        return Both(backend.bucket, tuple(parts))


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
