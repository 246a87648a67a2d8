"""Each framework with each wrapper; and that the table in docs/frameworks.md has all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.distributed import run
from tests.support.frameworks import job
from tests.support.frameworks.job import CELLS, DDP, FRAMEWORKS, FSDP1, FSDP2, HSDP, ZERO2
from tests.support.programs import ROOT

NARROW = [("Lightning", ZERO2), *((framework, wrapper) for framework in FRAMEWORKS for wrapper in (DDP, FSDP2))]


def need(framework: str, wrapper: str = DDP) -> None:
    """Skip what is not installed."""
    pytest.importorskip(FRAMEWORKS[framework])
    if wrapper == ZERO2:
        pytest.importorskip("deepspeed")


WIDE = [(*cell, False) for cell in (*CELLS, ("Lightning", FSDP1))]


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "wrapper", "bf16"), [*WIDE, *((*cell, True) for cell in NARROW)])
def test_trains_and_resumes_as_the_framework_does(framework: str, wrapper: str, bf16: bool, tmp_path: Path):
    need(framework, wrapper)
    run(job.trains_and_resumes, 4 if wrapper == HSDP else 2, framework, wrapper, tmp_path, bf16)


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "wrapper"), NARROW)
def test_quantized_gradients(framework: str, wrapper: str):
    need(framework, wrapper)
    run(job.quantizes, 2, framework, wrapper)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "workers"), [(job.follows_the_loss_scale, 2), (job.is_off_in_one_process, 1)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_loss_scale_and_one_process(framework: str, case: Callable[..., None], workers: int):
    need(framework)
    run(case, workers, framework)


def test_documentation_has_every_cell():
    text = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert all(f"| {framework} | {wrapper} |" in text for framework, wrapper in CELLS)
