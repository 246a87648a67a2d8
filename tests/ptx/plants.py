"""Mistakes planted in the kernels' PTX, of which the emulator must find a share. See ``plugin.py`` for how to run it.

A dropped barrier need not be a mistake: some follow others with no access in between.
"""

import collections
import ctypes
import random
import re
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest

from tests.ptx import cases
from tests.ptx.decode import Kernel
from tests.ptx.emulator import same, storages
from tests.ptx.plugin import EMULATOR

LONGEST = 100_000
"""Instructions of warps in launches that are kept."""

SCHEDULES = 6
AT_MOST = 8
"""Mistakes of a kind in one kernel."""

OFFSET = r"((?:ld|st)\.(?:global|shared)\.(?:v\d\.)?b(?:32|64) [^\[]*\[ ?%\w+ ?)(?:\+ ?(\d+) ?)?\]"

PLANTS: dict[str, tuple[str, Callable[[re.Match[str]], str], float]] = {
    # What is replaced in a line, by what, and the share that must be found.
    "a barrier dropped": (r"\tbar\.sync .*", lambda _: "", 0.8),
    "an atomic that does not release": (r"acq_rel", lambda _: "acquire", 1.0),
    "an atomic that does not acquire": (r"acq_rel", lambda _: "release", 1.0),
    "an access that is not aligned": (OFFSET, lambda found: f"{found[1]}+{int(found[2] or 0) + 2}]", 1.0),
    "a wait for copies dropped": (r"\tcp\.async\.wait_group.*", lambda _: "", 0.8),
}


class Kept(NamedTuple):
    """A launch with a copy of its memory, and what it left."""

    grid: tuple[int, int]
    values: list[int]
    memory: dict[int, np.ndarray]
    left: dict[int, np.ndarray]
    steps: int

    def run(self, kernel: Kernel, seed: int, most: int = 10**9) -> tuple[bool, dict[int, np.ndarray], int]:
        places = [(address, data.size, data.ctypes.data) for address, data in self.memory.items()]
        found, left, steps = kernel.run(self.grid, self.values, places, seed, most)
        return bool(found), left, steps


@pytest.fixture(scope="module")
def launches() -> dict[str, list[Kept]]:
    """Launches of each kernel's PTX, of which each executes something that those before did not."""
    kept: dict[str, list[Kept]] = collections.defaultdict(list)

    def keep(kernel: Kernel, grid: tuple[int, int], values: list[int]) -> None:
        copy = {at: np.frombuffer(ctypes.string_at(data, size), np.uint8) for at, size, data in storages()}
        launch = Kept(grid, values, copy, {}, 0)
        before = (kernel.hits > 0).sum()
        found, left, steps = launch.run(kernel, 1)
        if (kernel.hits > 0).sum() > before and steps < LONGEST and not found:
            kept[kernel.text].append(launch._replace(left=left, steps=steps))
        run(kernel, grid, values)

    run = EMULATOR.launch
    with mock.patch.object(EMULATOR, "launch", keep):
        for rank in (4, 40):
            cases.test_nothing_is_lost(rank, "float32", "standard")
        cases.test_wire(4, "int4")
    return kept


def is_found(kernel: Kernel, launches: list[Kept]) -> bool:
    for launch in launches:
        for seed in range(SCHEDULES):
            found, left, _ = launch.run(kernel, seed, 4 * launch.steps + 10_000)
            if found or not same(left, launch.left):
                return True
    return False


@pytest.mark.parametrize("kind", PLANTS)
def test_planted_mistakes_are_found(kind: str, launches: dict[str, list[Kept]]):
    pattern, change, floor = PLANTS[kind]
    draw, found = random.Random(0), []
    for text, kept in launches.items():
        whole, lines = EMULATOR.kernels[text], text.splitlines()
        executed = [place for place, hits in zip(whole.places, whole.hits, strict=True) if hits]
        numbers = [int(place.partition(":")[0].removeprefix("line ")) - 1 for place in executed]
        numbers = [number for number in numbers if re.search(pattern, lines[number])]
        for number in draw.sample(numbers, min(AT_MOST, len(numbers))):
            planted = [*lines[:number], re.sub(pattern, change, lines[number]), *lines[number + 1 :]]
            found.append(is_found(Kernel(whole.name, "\n".join(planted), whole.shared), kept))
    print(f"{kind}: {sum(found)} of {len(found)} found")
    assert found
    assert sum(found) >= floor * len(found)
