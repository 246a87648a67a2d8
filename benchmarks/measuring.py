"""One measurement of a GPU benchmark: device events, the host's clock, and where they are kept."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.cases import Case
from benchmarks.results_file import Results
from benchmarks.timing import CaptureError, Clock, Timing, Work, gigabytes_per_second

HOST_ROUNDS = 5


def record(
    benchmark: Any,
    clock: Clock,
    results: Results,
    kind: str,
    case: Case,
    work: Work,
    before: Work = lambda: None,
    *,
    capture: bool = False,
    **values: Any,
) -> None:
    """Time ``work`` and add a row.

    The row's ``device_ms`` and ``device_iqr_ms`` are of device events around work that was enqueued before the device
    began with it. ``host_ms`` is the median time until ``work`` returns, with nothing under way before: on a GPU, what
    it takes to enqueue it. ``replay_ms`` is of device events around a CUDA graph's replay.

    Args:
        benchmark: pytest-benchmark's fixture.
        clock, results: the session's.
        kind: of the row.
        case: what is measured.
        work: what is timed.
        before: what is done before each round.
        capture: also replay it as a CUDA graph; its ``replay_ms`` is None and ``no_replay`` the reason if it fails.
        values: further values of the row. Of ``bytes``, GB/s and the share of the copy bandwidth are derived.
    """
    timing = clock.measure(work, before)
    row: dict[str, Any] = {"kind": kind, **case.labels(), **values}
    row |= {"device_ms": timing.median, "device_iqr_ms": timing.iqr, "rounds": timing.rounds}
    best = timing
    if capture:
        row |= replay(clock, work, before)
        if row["replay_ms"] is not None:
            best = Timing(row["replay_ms"], 0.0, 1)
    if "bytes" in row:
        row["gbps"] = gigabytes_per_second(row["bytes"], best)
        row["share_of_copy"] = row["gbps"] / clock.copy_bandwidth

    def prepare() -> None:
        before()
        clock.flush()
        clock.synchronize()

    benchmark.group = f"{kind}, {case.gradients}, rank {case.rank}, {case.dtype} {case.phase}".strip()
    benchmark.extra_info.update(row)
    benchmark.pedantic(work, setup=prepare, rounds=min(timing.rounds, HOST_ROUNDS))
    row["host_ms"] = benchmark.stats.stats.median * 1e3 if benchmark.stats else None
    results.add(row)


def replay(clock: Clock, work: Work, before: Work = lambda: None) -> dict[str, Any]:
    """Values of a row: the time of a CUDA graph's replay, or why there is none."""
    try:
        replayed = clock.measure(clock.capture(work), before)
    except CaptureError as error:
        return {"replay_ms": None, "no_replay": str(error)}
    return {"replay_ms": replayed.median, "replay_iqr_ms": replayed.iqr}


@contextlib.contextmanager
def fits() -> Iterator[None]:
    """Skip what does not fit into the device's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        pytest.skip(f"out of memory: {str(error).splitlines()[0]}")
