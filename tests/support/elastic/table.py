"""The faults of workers under a manager, and what came of them: the table in docs/guides/torchft.md."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.elastic.ledger import Outcome
from tests.support.elastic.processes import WORKERS, run
from tests.support.elastic.trainers import Fault, Scenario
from tests.support.programs import DOCS

PAGE = DOCS / "guides" / "torchft.md"
HEAD = (
    "| fault | injected | seconds to the next step: median, most | void steps, most | split votes | lost, most "
    "| other bits | hung |\n|---|---|---|---|---|---|---|---|"
)
LOST = 1e-6
"""Most that a step may lose of what the workers have sent, by rounding in fp32."""

# A name, fields of the configuration, and the collectives of a step.
CONFIGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "`Compressor`, fp32": ("compressor", {"rank": 4}, 2),
    "`Compressor`, fp32, alternating": ("compressor", {"rank": 4, "algorithm": "alternating"}, 1),
    "`Compressor`, int8": ("compressor", {"rank": 4, "wire_dtype": "int8"}, 4),
    "`Compressor`, int8, alternating": ("compressor", {"rank": 4, "wire_dtype": "int8", "algorithm": "alternating"}, 2),
    '`Compressor`, `quantize="ternary"`': ("compressor", {"quantize": "ternary"}, 2),
    "DDP, fp32": ("ddp", {"rank": 8}, 4),
    "DDP, fp32, alternating": ("ddp", {"rank": 8, "algorithm": "alternating"}, 2),
    "DDP, int8": ("ddp", {"rank": 24, "wire_dtype": "int8"}, 6),
    'DDP, `quantize="ternary"`': ("ddp", {"quantize": "ternary"}, 2),
    # The first collective compares the workers.
    "`LocalSteps`, fp32": ("local", {"rank": 4}, 3),
    "`LocalSteps`, int8, alternating": ("local", {"rank": 4, "wire_dtype": "int8", "algorithm": "alternating"}, 3),
    '`LocalSteps`, `quantize="ternary"`': ("local", {"quantize": "ternary"}, 3),
}


def killed(name: str) -> Iterator[Scenario]:
    """In turn each worker, before, inside and after each collective, twice."""
    door, config, collectives = CONFIGS[name]
    places = [(number, place) for number in range(1, collectives + 1) for place in ("before", "inside", "after")]
    for turn, (number, place) in enumerate(places):
        for again in range(2):
            fault = Fault((turn + again) % WORKERS, 4 + turn % 2, number, place)
            rounds = (4, 2) if again and door == "local" else (1, 0)
            yield Scenario(config, door, (fault,), rounds=rounds, error=bool(turn % 2))


def deaf() -> Iterator[Scenario]:
    for turn, (door, config, collectives) in enumerate(CONFIGS.values()):
        yield Scenario(config, door, (Fault(turn % WORKERS, 4, collectives, "deaf"),))
    yield Scenario({"rank": 4}, "local", (Fault(1, 4, 3, "deaf"),), rounds=(4, 2))


def forming() -> Iterator[Scenario]:
    """While the group of the first quorum, or of one after a kill, agrees on what it does."""
    config = {"rank": 4}
    for number in (1, 2, 3, 4, 5):
        yield Scenario(config, "compressor", (Fault(number % WORKERS, 0, number, "inside"),))
        yield Scenario(config, "compressor", (Fault(1, 4, 2, "before"), Fault(2, 4, number, "deaf")))


def returning() -> Iterator[Scenario]:
    planned = {"compression": 10, "replan_every": 3}
    several = {"rank": 3, "iterations": 2}
    kill = (Fault(0, 4, 2, "inside"),)
    for config in ({"rank": 4}, {"quantize": "int4"}, planned, several):
        yield Scenario(config, "compressor", kill, steps=40, pause=0.05, returns=0.5)
    yield Scenario({"rank": 8}, "ddp", kill, steps=40, pause=0.05, returns=0.5)
    yield Scenario({"rank": 4}, "local", kill, steps=40, pause=0.05, returns=0.5)
    yield Scenario({"quantize": "int4"}, "local", kill, steps=20, pause=0.05, returns=0.5, rounds=(4, 2))


def sources() -> Iterator[Scenario]:
    """One that sends a new worker its state, or one whose vote differed; nothing, half or all of it."""
    for halves in (0, 1, 2):
        source = Fault(-1, 4, halves, "source")
        for door, config, last in (
            ("compressor", {"rank": 4}, 2),
            ("ddp", {"quantize": "int4"}, 4),
            ("local", {"rank": 4}, 3),
        ):
            yield Scenario(config, door, (Fault(0, 4, 2, "inside"), source), steps=40, pause=0.05, returns=0.5)
            yield Scenario(config, door, (Fault(halves, 4, last, "deaf"), source))


def stopped() -> Iterator[Scenario]:
    for number, place in ((1, 1), (2, 0), (2, 2)):
        fault = Fault(place, 4, number, "stop", seconds=5)
        yield Scenario({"rank": 4}, "compressor", (fault,), steps=60, pause=0.1, timeout=3)


def storm() -> Iterator[Scenario]:
    kills = [(0, 5, 0), (1, 15, 0), (2, 25, 0), (0, 40, 1), (1, 55, 1), (2, 70, 1)]
    for door, rank in (("compressor", 4), ("ddp", 8), ("local", 4)):
        faults = tuple(Fault(victim, step, 2, "inside", life=life) for victim, step, life in kills)
        yield Scenario({"rank": rank}, door, faults, steps=90, pause=0.1, returns=0.2)


ROWS: dict[str, Callable[[], Iterator[Scenario]]] = {
    **{f"a worker killed before, inside or after a collective: {name}": lambda n=name: killed(n) for name in CONFIGS},  # type: ignore[misc]
    "a worker that does not hear of the last collective's end, so that votes differ": deaf,
    "a worker lost while a new group is formed": forming,
    "a worker killed, and another one in its place": returning,
    "a worker killed that sends its state to one that heals": sources,
    "a worker that stops for longer than the group's timeout, and comes back": stopped,
    "six workers killed one after the other, with others in their places": storm,
}


def row(title: str, found: list[Outcome]) -> str:
    delays = [delay for outcome in found for delay in outcome.delays]
    seconds = f"{statistics.median(delays):.1f}, {max(delays):.1f}" if delays else "–"
    numbers = [
        max(len(delays), len(found)), seconds, max(o.voids for o in found), sum(o.split for o in found),
        f"{max(o.lost for o in found):.0e}", sum(o.unequal for o in found), sum(o.hung for o in found),
    ]  # fmt: skip
    return f"| {title} | " + " | ".join(map(str, numbers)) + " |"


def results(only: str = "") -> Iterator[tuple[str, list[Outcome]]]:
    for title, scenarios in ROWS.items():
        if only in title:
            yield title, [run(scenario) for scenario in scenarios()]
