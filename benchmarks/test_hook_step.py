"""One communication-hook step on the CPU: this package beside torch's hook and a plain copy."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.buckets import FilledBucket
from benchmarks.providers import STEP_PROVIDERS, Step, ours
from benchmarks.results_file import Row
from benchmarks.shapes import CPU_GRADIENT_SETS, GRADIENT_SETS

PROVIDERS: dict[str, Callable[[int], Step]] = {
    "ours": ours,
    "torch": STEP_PROVIDERS["torch"],
    "torch batched": STEP_PROVIDERS["torch batched"],
    "copy": STEP_PROVIDERS["copy"],
}


ROUNDS = 7


@pytest.mark.parametrize("rank", [1, 4, 16, 64])
@pytest.mark.parametrize("gradients", [*CPU_GRADIENT_SETS, "demo"])
@pytest.mark.parametrize("threads", sorted({1, torch.get_num_threads()}))
def test_hook_step(threads: int, gradients: str, rank: int, cpu_rows: list[Row]) -> None:
    """Time all providers by turns, so that what else runs on the machine slows all of them down."""
    bucket = FilledBucket(GRADIENT_SETS[gradients])
    size = bucket.buffer().numel() * bucket.buffer().element_size()
    before_all = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, steps = [], []
        for provider, make in PROVIDERS.items():
            step = make(rank)
            persistent, peak = _memory_of(step, bucket)
            steps.append(step)
            row = {"gradients": gradients, "rank": rank, "threads": threads, "provider": provider}
            rows.append({**row, "persistent": persistent / size, "peak": peak / size})
        seconds: list[list[float]] = [[] for _ in steps]
        for _ in range(ROUNDS):
            for step, times in zip(steps, seconds, strict=True):
                bucket.refill()
                start = time.perf_counter()
                step(bucket)
                times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before_all)
    for row, times in zip(rows, seconds, strict=True):
        lower, median, upper = statistics.quantiles(times, n=4)
        row |= {"median_ms": median * 1e3, "iqr_ms": (upper - lower) * 1e3}
    cpu_rows += rows


def _memory_of(step: Step, bucket: FilledBucket) -> tuple[int, int]:
    """Take steps. Return the bytes that the provider keeps, and the most that it has during a step."""
    _return_freed_memory()
    before = _memory("VmRSS")
    for _ in range(2):
        bucket.refill()
        step(bucket)
    _return_freed_memory()
    _reset_peak()
    persistent = _memory("VmRSS") - before
    bucket.refill()
    step(bucket)
    return persistent, _memory("VmHWM") - before


def _memory(field: str) -> int:
    """Bytes of this process, current (VmRSS) or at most since the last reset (VmHWM)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def _return_freed_memory() -> None:
    """Make the C library give freed memory back, so that what is resident is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
