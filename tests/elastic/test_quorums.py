"""Workers under torchft's Manager that are killed or do not hear of a step's end. ``make faults`` does more of it."""

from pathlib import Path

import pytest

from tests.support.elastic import table
from tests.support.elastic.ledger import Outcome
from tests.support.elastic.processes import run
from tests.support.elastic.trainers import Fault, Scenario
from tests.support.programs import DOCS, output_of, snippets

pytest.importorskip("torchft")

TIMEOUT = 40


def check(outcome: Outcome, *, faults: int, split: int) -> None:
    assert not (said := outcome.wrong(table.LOST)), said
    assert outcome.split >= split
    # The others hear of a fault long before the group's timeout. A machine may be busy with other work.
    assert len(outcome.delays) == faults
    assert max(outcome.delays) < 0.7 * TIMEOUT


@pytest.mark.parametrize("name", ["`Compressor`, fp32", "DDP, fp32", '`LocalSteps`, `quantize="ternary"`'])
def test_two_workers_do_not_hear_of_a_step_and_another_one_is_killed(name: str):
    door, config, collectives = table.CONFIGS[name]
    # The others wait for the second one in the next collective.
    faults = Fault(2, 2, collectives, "deaf"), Fault(1, 4, 1, "deaf"), Fault(0, 6, collectives, "inside")
    check(run(Scenario(config, door, faults, steps=8, heartbeat=2.0, timeout=TIMEOUT)), faults=3, split=1)


@pytest.mark.slow
def test_the_example_prints_what_the_guide_says(tmp_path: Path):
    printed = output_of(DOCS / "examples" / "train_torchft.py", cwd=tmp_path).splitlines()
    expected = snippets(DOCS / "guides" / "torchft.md", "text")[0].splitlines()
    assert sorted(line for line in printed if line.startswith("worker ")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("title", table.ROWS)
def test_faults(title: str):
    for scenario in table.ROWS[title]():
        outcome = run(scenario)
        assert not outcome.wrong(table.LOST), outcome
