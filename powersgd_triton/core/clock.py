"""The time that the phases of a step take, measured without waiting for the device."""

from __future__ import annotations

import itertools
import time

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
        self._on_stream = device is not None and has_streams(device)
        # (phase that begins, when) in order. A phase lasts until the next mark.
        self._marks: list[tuple[str | None, Stamp]] = [(None, self._now())]

    def mark(self, phase: str | None) -> None:
        """Count the time from now on to a phase, or to none, such as the backward pass."""
        self._marks.append((phase, self._now()))

    @property
    def ready(self) -> bool:
        """Whether the device has reached all marks. On the CPU it has."""
        return all(isinstance(stamp, float) or stamp.query() for _, stamp in self._marks)

    def milliseconds(self) -> dict[str, float]:
        """Return {phase: milliseconds, summed over the step's buckets}, and the whole time as ``STEP``, when ready."""
        found = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in itertools.pairwise(self._marks):
            if phase is not None:
                found[phase] += _between(start, end)
        return {**found, STEP: _between(self._marks[0][1], self._marks[-1][1])}

    def _now(self) -> Stamp:
        if not self._on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: Stamp, end: Stamp) -> float:
    """Return milliseconds. Both stamps are of one kind and one device."""
    if isinstance(start, float) and isinstance(end, float):
        return 1000 * (end - start)
    assert not isinstance(start, float)
    assert not isinstance(end, float)
    return float(start.elapsed_time(end))
