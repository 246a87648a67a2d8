"""What a hook step launches on a GPU, whether the host waits for it, and how fast it is replayed as a CUDA graph.

These come last: the profiler slows down what comes after it, and a capture that fails may leave traces.
"""

import pytest
import torch

from benchmarks.cases import Case
from benchmarks.measuring import fits, replay
from benchmarks.providers import STEP_PROVIDERS
from benchmarks.results_file import Results
from benchmarks.timing import Clock, Work, why_it_waits
from benchmarks.tracing import trace

pytestmark = pytest.mark.gpu

WARM_UP = 2


def _warm(case: Case, device: torch.device) -> tuple[Work, Work]:
    """A step that has run before, and what refills its bucket."""
    bucket = case.bucket(device)
    step = STEP_PROVIDERS[case.provider](case.rank)
    for _ in range(WARM_UP):
        bucket.refill()
        step(bucket)
    bucket.refill()
    return lambda: step(bucket), bucket.refill


@pytest.fixture(scope="module")
def profiler(clock: Clock) -> None:
    """The first session of a process misses events."""
    trace(clock.flush, clock.device)


def test_launches(launch_case: Case, clock: Clock, results: Results, profiler: None) -> None:
    case = launch_case
    with fits():
        step, refill = _warm(case, clock.device)
        synchronizes = ""
        if case.provider in ("ours", "reference"):
            synchronizes = why_it_waits(step, clock.device)
            refill()
        found = trace(step, clock.device)
    row = {"kind": "launches", **case.labels(), "waits": found.waits, "synchronizes": synchronizes}
    # Without the profiler's access to the device there is nothing to count.
    row["launches"] = len(found.events) or None
    row["by_name"] = {name: count for name, count, _ in found.by_name()[:20]}
    row |= {"span_us": found.span, "busy_us": found.busy}
    results.add(row)
    if case.provider == "ours":
        assert not synchronizes
        assert clock.device.type == "cpu" or not found.waits


def test_replay(replay_case: Case, clock: Clock, results: Results) -> None:
    case = replay_case
    with fits():
        step, refill = _warm(case, clock.device)
        results.add({"kind": "replay", **case.labels(), **replay(clock, step, refill)})
