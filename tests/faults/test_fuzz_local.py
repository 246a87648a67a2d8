"""Random local steps on gloo workers: whatever happens between them, nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.distributed import HUNG, run
from tests.support.faults.local import Local
from tests.support.faults.local_events import EVENTS, takes_steps


def runs(worker: int, workers: int, seeds: Iterable[int], folder: str) -> None:
    """Let random things happen, and keep the books."""
    for seed in seeds:
        dice, seen = random.Random(seed), list[str]()
        local = Local(worker, workers, dice)
        local.begin()
        try:
            for event in dice.choices(EVENTS, k=12):
                seen.append(event.__name__)
                event(local, Path(folder))
                takes_steps(local, Path(folder))
                if dice.random() < 0.5:
                    local.audit()
                assert not local.lost + local.poisoned
            local.audit()
            assert not local.lost + local.poisoned
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {local.config}, {local.setting}: {seen}: {local.lost}") from error


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(100, 200), marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_nothing_is_lost(workers: int, seeds: range, tmp_path: Path) -> None:
    run(runs, workers, seeds, str(tmp_path), timeout=2 * HUNG)
