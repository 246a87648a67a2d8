"""The phases of a step, and times that are measured without waiting for the device."""

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
