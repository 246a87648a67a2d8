"""Every wrapper against every property, on gloo workers. ``make test`` runs some cells of each row and column."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import properties
from tests.support.distributed import outcome, run_cases
from tests.support.ways import WAYS
from tests.support.wrapper_table import FORMATS, WRAPPERS


@dataclasses.dataclass(frozen=True)
class Cell:
    """A property, which is a function of ``properties.py``, of a wrapper with so many workers."""

    wrapper: str
    check: Callable[..., None]
    workers: int
    options: tuple[tuple[str, Any], ...] = ()
    # Whether only ``make test-all`` runs it.
    slow: bool = False

    def __str__(self) -> str:
        words = [self.check.__name__, self.wrapper, *(str(value) for _, value in self.options)]
        return "-".join(words) + (f"-{self.workers} workers" if self.workers != WRAPPERS[self.wrapper].workers else "")

    def bound(self, folder: Path) -> Callable[..., None]:
        # All cells share it.
        given = {"folder": str(folder)} if "folder" in inspect.signature(self.check).parameters else {}
        return functools.partial(self.check, wrapper=self.wrapper, **given, **dict(self.options))

    def kind(self) -> tuple[Any, ...]:
        """Cells of one kind run in the same processes."""
        return self.workers, self.slow, bool(self.needs()), self.wrapper.startswith("DeepSpeed")

    def needs(self) -> list["Cell"]:
        """What must have run before."""
        source = dict(self.options).get("source", self.wrapper)
        return [saved(source)] if self.check is properties.taken_over else []


def saved(wrapper: str) -> Cell:
    """The cell that saves what others take over."""
    return Cell(wrapper, properties.resume, WRAPPERS[wrapper].workers, slow=bool(WRAPPERS[wrapper].thin))


SOURCES = [
    *(("replicate", "HSDP"), ("FSDP2", "HSDP"), ("FSDP1", "HSDP"), ("HSDP", "FSDP1"), ("HSDP", "HSDP by group")),
    # A matrix of three rows is compressed whole and not in shards.
    ("HSDP by group", "replicate"),
]
"""(wrapper, the one whose saved state it loads), on four workers. See also test_sharded_checkpoints.py."""


BY_TURNS: list[Callable[..., None]] = [
    properties.exact_first,
    properties.traffic,
    properties.attached,
    properties.watched,
    properties.damaged,
]
THIN: list[Callable[..., None]] = [properties.full_rank, properties.conservation]
FORMS = {
    "DDP": ("int8 alternating", "quantized"),
    "FSDP1": ("int8 standard", "bf16 standard"),
    "FSDP2": ("bf16 alternating", "bypass"),
    "Compressor": ("iterations", "fp16 standard"),
    "local steps": ("int4 alternating",),
    "DeepSpeed 0": ("alternating",),
    "DeepSpeed 2": ("int4 standard",),
    "DeepSpeed 3": ("fp16 alternating",),
}
"""Formats that are quick, beside fp32."""
OWNED = {"DDP": "int8 standard", "Compressor": "int4 alternating"}


def cells() -> list[Cell]:
    """Each wrapper with each property. Of the ways to train and the formats some are quick, by turns.

    A plain way is slow where another way or property is quick that cannot hold without it.
    """
    found: list[Cell] = []
    for index, (name, wrapper) in enumerate(WRAPPERS.items()):
        few = wrapper.workers

        def add(
            check: Callable[..., None], workers: int = few, *, turn: bool | int = False, name: str = name, **more: Any
        ) -> None:
            chosen = [value for _, value in more.get("options", ())]
            words = {check.__name__, *chosen, *(f"{check.__name__} {value}" for value in chosen)}
            if not words & WRAPPERS[name].lacks.keys():
                quick = not turn and (not WRAPPERS[name].thin or check in THIN)
                found.append(Cell(name, check, workers, slow=not quick, **more))

        # ``void`` keeps books too.
        redundant = {"plain": any(name in how.quick for how in WAYS.values()), "fp32": "void" not in wrapper.lacks}
        if wrapper.thin:
            redundant = {"plain": wrapper.thin != "full_rank", "fp32": wrapper.thin != "conservation"}
        for way, how in WAYS.items():
            if how.fits(name):
                add(properties.full_rank, options=(("way", way),), turn=redundant.get(way, name not in how.quick))
        for form in FORMATS:
            turn = redundant.get(form, form not in FORMS.get(name, ()))
            add(properties.conservation, options=(("form", form),), turn=turn)
        add(properties.resume)
        add(properties.resume, options=(("form", "alternating"),), turn=index % 5)
        if wrapper.elsewhere:
            add(properties.taken_over, wrapper.elsewhere)
        for pair in (pair for pair in SOURCES if pair[0] == name):
            add(properties.taken_over, 4, turn=1, options=(("source", pair[1]),))
        add(properties.budget, turn=index % 2)
        add(properties.stateless, turn=index % 3)
        add(properties.void)
        for number, check in enumerate(BY_TURNS):
            add(check, turn=(number + index) % 2)
        for workers in {2, 3, 4} - {few} if few == 2 else ():
            add(properties.full_rank, workers, options=(("way", "plain"),), turn=1)
            add(properties.conservation, workers, options=(("form", "fp32"),), turn=1)
        if name in OWNED:
            # From three workers on each of them owns a part of a message.
            add(properties.conservation, 3, options=(("form", OWNED[name]),))
    return found


CELLS = cells()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell], None]:
    """Runs all selected cells of a number of workers in one set of processes, when the first of them is asked for."""
    folder = tmp_path_factory.mktemp("table")
    items: list[Any] = request.session.items
    chosen = [item.callspec.params["cell"] for item in items if "cell" in getattr(item, "fixturenames", ())]
    chosen = list(dict.fromkeys([*(needed for cell in chosen for needed in cell.needs()), *chosen]))

    @functools.cache
    def together(*kind: Any) -> dict[str, list[Any]]:
        wanted = [cell for cell in chosen if cell.kind() == kind]
        for needed in {needed for cell in wanted for needed in cell.needs()}:
            result(needed)
        return run_cases({str(cell): cell.bound(folder) for cell in wanted}, wanted[0].workers)

    def result(cell: Cell) -> None:
        outcome(together(*cell.kind()), str(cell))

    return result


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=[pytest.mark.slow] if cell.slow else []) for cell in CELLS]
)
def test_cell(cell: Cell, results: Callable[[Cell], None]) -> None:
    """See the docstrings of ``tests/support/properties.py``."""
    if cell.wrapper.startswith("DeepSpeed"):
        pytest.importorskip("deepspeed")
    results(cell)
