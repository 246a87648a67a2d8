"""Random faults of workers under a simulated manager: nothing is lost, and all have equal averages."""

import random

import pytest

from tests.support.elastic.simulation import Simulation
from tests.support.elastic.trainers import Scenario

SHAPES: dict[str, tuple[int, ...]] = {"bias": (5,), "matrix": (12, 8), "tensor": (3, 6, 10)}
CONFIGS: list[dict[str, object]] = [
    {"rank": 2},
    {"rank": 2, "algorithm": "alternating"},
    {"rank": 3, "wire_dtype": "int8"},
    {"rank": 2, "check_every": 1},
    {"rank": 2, "start_iter": 2},
    {"compression": 2.0, "replan_every": 2, "min_compression_rate": 0},
    {"quantize": "int4"},
    {"quantize": "ternary", "check_every": 1},
]
FAULTS = [
    {"deaf": 0.03},
    {"deaf": 0.02, "heal": 0.3, "stop": 0.02},
    {"kill": 0.02, "deaf": 0.02},
    {"kill": 0.02, "heal": 0.3},
    {"stop": 0.03},
]
LOST = 1e-5
"""Most that a step may lose of what the workers have sent, by rounding in fp32: parameters are larger than changes."""
SEEDS = (2, 11, 15, 20, 25, 27, 28, 29, 30, 33, 45, 55)
"""Of the first sixty, those that found most of ten defects that were put in."""


def check(door: str, seed: int) -> None:
    dice = random.Random(seed)
    config, rounds = dice.choice(CONFIGS), dice.choice([(1, 0), (3, 1), (4, 2)])
    scenario = Scenario(config, door, shapes=SHAPES, rounds=rounds, error=dice.random() < 0.5)
    workers, most, joins = dice.randrange(2, 5), dice.choice([1, 2, 4]), dice.randrange(2)
    outcome = Simulation(scenario, seed, dice.choice(FAULTS), workers=workers, most=most, joins=joins).run()
    assert not (said := outcome.wrong(LOST)), said


@pytest.mark.parametrize("door", ["compressor", "local"])
def test_random_faults(door: str):
    for seed in SEEDS:
        check(door, seed)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["compressor", "ddp", "local"])
def test_many_random_faults(door: str):
    if door == "ddp":
        pytest.importorskip("torchft")
    for seed in range(400):
        check(door, seed)
