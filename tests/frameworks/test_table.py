"""Each framework with each wrapper; and that the table in docs/frameworks.md has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks import table
from tests.support.frameworks.job import DDP, FSDP2, REPLICATE, WRAPPERS

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
NOT_OFFERED = {("Accelerate", REPLICATE), ("transformers' Trainer", REPLICATE)}

pytestmark = pytest.mark.slow


def need(framework: str, wrapper: str) -> None:
    """Skip what is not installed."""
    if framework != "plain loop":
        pytest.importorskip(table.FRAMEWORKS[framework])
    if wrapper.startswith("DeepSpeed"):
        pytest.importorskip("deepspeed")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("framework", table.FRAMEWORKS)
def test_trains_and_resumes_as_the_framework_does(framework: str, wrapper: str):
    need(framework, wrapper)
    cell = table.measure(framework, wrapper)
    assert cell.problems() == []
    assert bool(cell.not_offered) == ((framework, wrapper) in NOT_OFFERED), cell.not_offered


@pytest.mark.parametrize("wrapper", [DDP, FSDP2])
@pytest.mark.parametrize("framework", table.FRAMEWORKS)
def test_mixed_precision(framework: str, wrapper: str):
    need(framework, wrapper)
    cell = table.measure(framework, wrapper, bf16=True)
    assert not cell.not_offered
    assert max(cell.full_rank, cell.resumed) <= table.BF16_LIMIT
    start, native, end = cell.losses
    assert end < start
    assert native < start


def test_documentation_has_every_cell():
    text = (ROOT / table.PAGE).read_text(encoding="utf-8")
    for framework in table.FRAMEWORKS:
        for wrapper in WRAPPERS:
            assert f"| {framework} | {wrapper} |" in text
