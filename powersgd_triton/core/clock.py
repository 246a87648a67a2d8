"""The time that the phases of a step take, measured without waiting for the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

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


class Times:
    """The times of one step.

    Args:
        marks: (phase that begins, when) in order. A phase lasts until the next mark. None stands for what is not
            counted, such as the backward pass.
    """

    def __init__(self, marks: Sequence[tuple[str | None, Stamp]]) -> None:
        self._marks = marks

    @property
    def ready(self) -> bool:
        """Whether the device has reached all marks. On the CPU it has."""
        return all(isinstance(stamp, float) or stamp.query() for _, stamp in self._marks)

    def milliseconds(self) -> dict[str, float]:
        """Return {phase: milliseconds, summed over the step's buckets}, and the whole time as ``STEP``.

        Call it when the times are ``ready``.
        """
        found = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in itertools.pairwise(self._marks):
            if phase is not None:
                found[phase] += _between(start, end)
        return {**found, STEP: _between(self._marks[0][1], self._marks[-1][1])}


class Clock:
    """Measures steps from the end of one to the end of the next. Unless it runs, ``mark`` does nothing."""

    def __init__(self) -> None:
        self._marks: list[tuple[str | None, Stamp]] | None = None
        self._on_stream = False

    def start(self, device: torch.device | None) -> None:
        """Measure the next step, whose work is done on ``device``. Call it at the end of a step, with its streams."""
        self._on_stream = device is not None and has_streams(device)
        self._marks = [(None, self._now())]

    def mark(self, phase: str | None) -> None:
        """Count the time from now on to a phase, or to none. On CUDA: the time from here on in the current stream."""
        if self._marks is not None:
            self._marks.append((phase, self._now()))

    def stop(self) -> Times | None:
        """Return the times of the step that ends now. None if it was not measured from its beginning."""
        self.mark(None)
        marks, self._marks = self._marks, None
        return None if marks is None else Times(marks)

    def cancel(self) -> None:
        """Stop without a result, since the step is void."""
        self._marks = None

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
