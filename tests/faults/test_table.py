"""A few injections of every fault, and that the table in docs/faults.md is the program's."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton import PowerSGDConfig
from tests.support.distributed import HUNG
from tests.support.faults import table
from tests.support.faults.episodes import Tally
from tests.support.faults.ledger import Fate, Ledger
from tests.support.programs import ROOT

LOST = [title for title, _ in table.LOSSES]


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)])
def injected(request: pytest.FixtureRequest) -> tuple[int, dict[str, Tally]]:
    """Each fault so many times; those that lose a worker twice, of three and then of two."""
    return request.param, table.inject(request.param, rarely=2, timeout=HUNG)


@pytest.mark.parametrize("title", table.titles())
def test_nothing_is_lost_hung_or_poisoned(injected: tuple[int, dict[str, Tally]], title: str):
    times, found = injected
    tally = found[title]
    assert tally.injected == (2 if title in LOST else times)
    assert (tally.lost, tally.hung, tally.poisoned) == (0, 0, 0), "\n".join(tally.details)


def test_documentation_lists_the_same_faults():
    text = (ROOT / table.PAGE).read_text(encoding="utf-8")
    assert table.listed(text) == table.titles()
    made = table.markdown({title: Tally(3) for title in table.titles()}, "command")
    assert table.listed(table.replaced(text, made)) == table.titles()
    assert table.replaced(text, made).count(table.HEAD) == 1


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_the_ledger_notices_what_is_missing(dtype: str | None):
    """It would be of no use if its allowance for rounding were as large as a gradient."""
    shapes = {"w": (24, 18), "b": (24,)}
    generator = torch.Generator().manual_seed(0)
    given = [{name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()} for _ in "ab"]
    mean = {name: (given[0][name] + given[1][name]) / 2 for name in shapes}
    nothing = {name: torch.zeros(shape).double() for name, shape in shapes.items()}
    config = PowerSGDConfig(rank=2, min_compression_rate=0, error_dtype=dtype)

    def missing(fate: Fate, averages: dict[str, torch.Tensor], owed: list[dict[str, torch.Tensor]]) -> int:
        ledger = Ledger(shapes, 2, config)
        for name in shapes:
            ledger.enter(name, fate, [gradients[name] for gradients in given], averages[name])
        return len(ledger.differences(owed))

    assert missing(Fate.APPLIED, mean, [nothing, nothing]) == 0
    assert missing(Fate.CARRIED, mean, given) == 0
    assert missing(Fate.DROPPED, mean, [nothing, nothing]) == 0
    assert missing(Fate.APPLIED, mean, given) == 2
    assert missing(Fate.APPLIED, nothing, [nothing, nothing]) == 2
    assert missing(Fate.CARRIED, mean, [nothing, nothing]) == 2
    assert missing(Fate.DROPPED, mean, given) == 2
