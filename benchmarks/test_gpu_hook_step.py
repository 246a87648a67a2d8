"""One communication-hook step on a GPU: this package beside torch's hook, its reference backend and a plain copy."""

import gc
from typing import Any

import pytest
import torch

from benchmarks.buckets import FilledBucket
from benchmarks.cases import ALLOWED_DISTANCE, Case
from benchmarks.launches import bytes_of_step
from benchmarks.measuring import fits, record
from benchmarks.providers import STEP_PROVIDERS
from benchmarks.results_file import Results
from benchmarks.timing import Clock
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import Layout

pytestmark = pytest.mark.gpu


def test_hook_step(benchmark: Any, step_case: Case, clock: Clock, results: Results) -> None:
    case = step_case
    with fits():
        bucket = case.bucket(clock.device)
        values: dict[str, Any] = {}
        if case.provider == "ours":
            # The time of another result is worth nothing.
            values["difference"] = _difference(bucket, case.rank)
            assert values["difference"] <= ALLOWED_DISTANCE[case.dtype]
        gc.collect()
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
        size, before = bucket.buffer().nbytes, _allocated(clock)
        step = STEP_PROVIDERS[case.provider](case.rank)
        for _ in range(2):
            bucket.refill()
            step(bucket)
        values["persistent"] = (_allocated(clock) - before) / size
        bucket.refill()
        if clock.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(clock.device)
            step(bucket)
            values["peak"] = (torch.cuda.max_memory_allocated(clock.device) - before) / size
        values["bytes"] = 2 * size if case.provider == "copy" else _bytes(bucket, case.rank)
        record(
            benchmark, clock, results, "step", case, lambda: step(bucket), bucket.refill, gradient_bytes=size, **values
        )  # fmt: skip


def _difference(bucket: FilledBucket, rank: int) -> float:
    """‖ours − reference‖ / ‖reference‖ after one step."""
    found = []
    for provider in ("ours", "reference"):
        bucket.refill()
        STEP_PROVIDERS[provider](rank)(bucket)
        found.append(bucket.buffer().clone())
    ours, reference = found
    norm = torch.linalg.vector_norm
    return float(norm(ours - reference, dtype=torch.float64) / norm(reference, dtype=torch.float64))


def _bytes(bucket: FilledBucket, rank: int) -> int:
    shapes = {str(index): tuple(gradient.shape) for index, gradient in enumerate(bucket.gradients())}
    return bytes_of_step(Layout.build(shapes, PowerSGDConfig(rank=rank)), bucket.buffer().itemsize)


def _allocated(clock: Clock) -> int:
    return torch.cuda.memory_allocated(clock.device) if clock.device.type == "cuda" else 0
