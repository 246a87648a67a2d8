"""Every wrapper against every property, on gloo workers. Each cell runs once, with few workers; products are slow."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import properties
from tests.support.properties import FORMATS, WAYS
from tests.support.sharded_training import in_one_group, outcome
from tests.support.wrappers import WRAPPERS


@dataclasses.dataclass(frozen=True)
class Cell:
    """A property of a wrapper.

    Attributes:
        wrapper: Name of a row of ``WRAPPERS``.
        check: A function of ``properties.py``.
        workers: How many.
        options: Of the function.
        folder: Whether it takes one, which all cells share.
        slow: Whether only ``make test-all`` runs it.
    """

    wrapper: str
    check: Callable[..., None]
    workers: int
    options: tuple[tuple[str, Any], ...] = ()
    folder: bool = False
    slow: bool = False

    def __str__(self) -> str:
        words = [self.check.__name__, self.wrapper, *(str(value) for _, value in self.options)]
        return "-".join(words) + (f"-{self.workers} workers" if self.workers != WRAPPERS[self.wrapper].workers else "")

    def bound(self, folder: Path) -> Callable[..., None]:
        given = {"folder": str(folder)} if self.folder else {}
        return functools.partial(self.check, wrapper=self.wrapper, **given, **dict(self.options))

    def needs(self) -> list[Cell]:
        """What must have run before."""
        return [cell for cell in CELLS if self.check is properties.taken_over and cell == saved(self.wrapper)]


def saved(wrapper: str) -> Cell:
    return Cell(wrapper, properties.resume, WRAPPERS[wrapper].workers, folder=True)


ALWAYS: list[Callable[..., None]] = [
    properties.exact_first,
    properties.traffic,
    properties.attached,
    properties.watched,
    properties.void,
    properties.damaged,
]
THIN = [properties.full_rank, properties.conservation, properties.resume, properties.taken_over, properties.void]


def cells() -> list[Cell]:
    """Each wrapper with each property. Of the ways to train and the formats some are quick, by turns."""
    found: list[Cell] = []
    for index, (name, wrapper) in enumerate(WRAPPERS.items()):
        few = wrapper.workers

        def add(
            check: Callable[..., None], workers: int = few, *, turn: int = 0, name: str = name, **more: Any
        ) -> None:
            chosen = [value for _, value in more.get("options", ())]
            words = {check.__name__, *chosen, *(f"{check.__name__} {value}" for value in chosen)}
            if not words & WRAPPERS[name].lacks.keys():
                quick = turn == 0 and (not WRAPPERS[name].thin or check in THIN and not {*chosen} - {"plain", "fp32"})
                found.append(Cell(name, check, workers, slow=not quick, **more))

        for number, way in enumerate(way for way in WAYS if WAYS[way].fits(name)):
            turn = 0 if way == "plain" else (number + index) % 3
            add(properties.full_rank, options=(("way", way),), turn=turn)
        for number, form in enumerate(FORMATS):
            turn = 0 if form == "fp32" else (number + index) % 5
            add(properties.conservation, options=(("form", form),), turn=turn)
        add(properties.resume, folder=True)
        add(properties.resume, folder=True, options=(("form", "alternating"),), turn=index % 3)
        if wrapper.elsewhere:
            add(properties.taken_over, wrapper.elsewhere, folder=True)
        add(properties.budget, folder=True)
        for check in ALWAYS:
            add(check)
        for workers in {2, 3, 4} - {few} if few == 2 else ():
            add(properties.full_rank, workers, options=(("way", "plain"),), turn=1)
            add(properties.conservation, workers, options=(("form", "fp32"),), turn=1)
    return found


CELLS = cells()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell], None]:
    """Runs all selected cells of a number of workers in one set of processes, when the first of them is asked for."""
    folder = tmp_path_factory.mktemp("table")
    chosen = [
        item.callspec.params["cell"] for item in request.session.items if "cell" in getattr(item, "fixturenames", ())
    ]
    chosen = list(dict.fromkeys([*(needed for cell in chosen for needed in cell.needs()), *chosen]))

    @functools.cache
    def together(workers: int, slow: bool, later: bool) -> dict[str, list[Any]]:
        wanted = [c for c in chosen if (c.workers, c.slow, bool(c.needs())) == (workers, slow, later)]
        return in_one_group({str(cell): cell.bound(folder) for cell in wanted}, workers)

    def result(cell: Cell) -> None:
        for needed in cell.needs():
            result(needed)
        outcome(together(cell.workers, cell.slow, bool(cell.needs())), str(cell))

    return result


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=[pytest.mark.slow] if cell.slow else []) for cell in CELLS]
)
def test_cell(cell: Cell, results: Callable[[Cell], None]) -> None:
    """See the docstrings of ``tests/support/properties.py``."""
    results(cell)
