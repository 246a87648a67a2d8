"""The time that the phases of a step take, measured without waiting for the device."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from powersgd_triton.core.streams import has_streams

PROJECT, BACKPROJECT, COMMIT, RECONSTRUCT = "project", "backproject", "commit", "reconstruct"
MESSAGES = "messages"
"""What is done with messages besides waiting for them: narrow ones are encoded and decoded, those of a node cut up."""
COMPUTE = (PROJECT, BACKPROJECT, COMMIT, RECONSTRUCT, MESSAGES)
EXCHANGE = "exchange"
"""Waiting for other workers: by the host on the CPU, by the engine's stream on CUDA."""
TELEMETRY = "telemetry"
STEP = "step"
PHASES = (*COMPUTE, EXCHANGE, TELEMETRY)

Stamp = float | torch.cuda.Event


class Clock:
    """Measures a step from the end of the one before. Its work is done on ``device``, with the current streams."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        # (phase that begins, when) in order. A phase lasts until the next mark.
        self._marks: list[tuple[str | None, Stamp]] = [(None, now(device))]

    def mark(self, phase: str | None) -> None:
        """Count the time from now on to a phase, or to none, such as the backward pass."""
        self._marks.append((phase, now(self._device)))

    @property
    def ready(self) -> bool:
        """Whether the device has reached all marks. On the CPU it has."""
        return all(isinstance(stamp, float) or stamp.query() for _, stamp in self._marks)

    def milliseconds(self) -> dict[str, float]:
        """Return {phase: milliseconds, summed over the step's buckets}, and the whole time as ``STEP``, when ready."""
        found = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in itertools.pairwise(self._marks):
            if phase is not None:
                found[phase] += between(start, end)
        return {**found, STEP: between(self._marks[0][1], self._marks[-1][1])}


def now(device: torch.device | None) -> Stamp:
    """Return the time at which a device has done what its current stream was given so far."""
    if device is None or not has_streams(device):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Return the milliseconds between two times on one device. The host waits for them."""
    if isinstance(start, float):
        return 1000 * float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end))
