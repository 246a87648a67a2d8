"""A few injections of every fault, and that the table in docs/faults.md is the program's."""

import pytest

from tests.support.distributed import HUNG
from tests.support.faults import table
from tests.support.faults.episodes import Tally
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
