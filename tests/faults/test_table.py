"""A few injections of every fault, and that the table in docs/faults.md is the program's."""

import itertools

import pytest

from tests.support.distributed import HUNG
from tests.support.faults import table
from tests.support.faults.episodes import Problems

LOST = [title for title, _ in table.LOSSES]


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)])
def injected(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Problems]]]:
    """Each fault so many times; those that lose a worker twice, of three and then of two."""
    return request.param, table.inject(request.param, rarely=2, timeout=HUNG)


@pytest.mark.parametrize("title", table.titles())
def test_nothing_is_lost_hung_or_poisoned(injected: tuple[int, dict[str, list[Problems]]], title: str):
    times, found = injected
    assert not any(found[title]), "\n".join(itertools.chain.from_iterable(found[title]))
    assert len(found[title]) == (2 if title in LOST else times)


def test_documentation_lists_the_same_faults():
    text = table.PAGE.read_text(encoding="utf-8")
    assert table.listed(text) == table.titles()
    made = table.markdown({title: [[]] for title in table.titles()}, "command")
    assert table.listed(table.replaced(text, made)) == table.titles()
    assert table.replaced(text, made).count(table.HEAD) == 1
