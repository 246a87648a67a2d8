"""Each framework with each wrapper; and that the table in docs/frameworks.md has all of them."""

from __future__ import annotations

import pytest

from tests.support.distributed import run
from tests.support.frameworks import job
from tests.support.frameworks.job import CELLS, DDP, FRAMEWORKS, FSDP1, FSDP2, ZERO2
from tests.support.programs import ROOT

NARROW = [("Lightning", ZERO2), *((framework, wrapper) for framework in FRAMEWORKS for wrapper in (DDP, FSDP2))]


def need(framework: str, wrapper: str = DDP) -> None:
    """Skip what is not installed."""
    pytest.importorskip(FRAMEWORKS[framework])
    if wrapper == ZERO2:
        pytest.importorskip("deepspeed")


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "wrapper"), [*CELLS, ("Lightning", FSDP1)])
def test_trains_and_resumes_as_the_framework_does(framework: str, wrapper: str):
    need(framework, wrapper)
    job.measure(framework, wrapper)


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "wrapper"), NARROW)
def test_mixed_precision(framework: str, wrapper: str):
    need(framework, wrapper)
    job.measure(framework, wrapper, bf16=True)


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_error_follows_the_loss_scale(framework: str):
    need(framework)
    run(job.follows_the_loss_scale, 2, framework)


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_process_has_nothing_to_compress(framework: str):
    need(framework)
    run(job.is_off_in_one_process, 1, framework)


def test_documentation_has_every_cell():
    text = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert all(f"| {framework} | {wrapper} |" in text for framework, wrapper in CELLS)
