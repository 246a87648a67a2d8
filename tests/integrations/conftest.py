"""Runs the jobs of a file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.deepspeed_training import Job
from tests.support.distributed import outcome
from tests.support.sharded_training import in_one_group


@pytest.fixture(scope="module")
def finish(request: pytest.FixtureRequest) -> Callable[[Job], None]:
    """Runs all selected jobs of a kind in one set of processes, when the first of them is asked for."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    chosen = [test.callspec.params["job"] for test in tests if "job" in test.callspec.params]

    @functools.cache
    def together(*kind: Any) -> dict[str, list[Any]]:
        return in_one_group({str(job): job for job in chosen if job.kind() == kind}, kind[0])

    def finished(job: Job) -> None:
        outcome(together(*job.kind()), str(job))

    return finished
