"""One communication-hook step on the CPU: this package beside torch's hook and a plain copy."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.buckets import FilledBucket
from benchmarks.providers import STEP_PROVIDERS, Step, ours
from benchmarks.shapes import CPU_GRADIENT_SETS

PROVIDERS: dict[str, Callable[[int], Step]] = {
    "ours": ours,
    "torch": STEP_PROVIDERS["torch"],
    "torch batched": STEP_PROVIDERS["torch batched"],
    "copy": STEP_PROVIDERS["copy"],
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("gradients", CPU_GRADIENT_SETS)
def test_hook_step(benchmark: Any, gradients: str, rank: int, provider: str) -> None:
    bucket = FilledBucket(CPU_GRADIENT_SETS[gradients])
    step = PROVIDERS[provider](rank)
    size = bucket.buffer().numel() * bucket.buffer().element_size()
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
    peak = _memory("VmHWM") - before
    benchmark.group = f"{gradients}, rank {rank}"
    benchmark.extra_info.update(
        gradients=gradients, rank=rank, provider=provider, persistent=persistent / size, peak=peak / size
    )
    benchmark.pedantic(step, args=(bucket,), setup=bucket.refill, rounds=31)


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
