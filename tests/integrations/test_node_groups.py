"""Two levels with DeepSpeed, with four processes as two nodes of two: the same training as on one level.

The table has two levels with DDP and FSDP1.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("deepspeed")

from torch import Tensor

from tests.support.deepspeed_training import (
    FP32_LIMIT,
    FULL_RANK,
    RANK_4,
    STEPS,
    Case,
    engine_for,
    largest_difference,
    losses,
    result,
    run_all,
    train,
)
from tests.support.distributed import run
from tests.support.training import flat, relative, total

NODE = 2
SAME = 1e-3
"""Relative difference at a low rank between one level and two. It grows from step to step."""


def same_as_on_one_level(stage: int) -> None:
    """Full rank is DeepSpeed itself. At rank 4, what is learned and owed is as on one level, where rows are shared."""
    case = Case("two levels", stage)
    plain = train(case, None)
    assert plain[0] - plain[-1] > 0.5, "nothing was learned"
    learned: dict[str, list[float]] = {}
    owed: dict[str, dict[str, Tensor]] = {}
    for name, fields in (
        ("full rank", {**FULL_RANK, "node_group": "auto"}),
        ("one level", {**RANK_4, "node_group": None}),
        ("two levels", {**RANK_4, "node_group": "auto"}),
    ):
        with engine_for(case, fields) as engine:
            learned[name] = losses(engine, range(STEPS))
            owed[name] = {key: total(error) for key, error in engine.powersgd.error().items()}
            assert (engine.powersgd._engine.communicator.inside is not None) == (fields["node_group"] is not None)
    assert largest_difference(learned["full rank"], plain) <= FP32_LIMIT
    assert largest_difference(learned["two levels"], learned["one level"]) <= SAME
    # Of all matrices together, since the error of one that is sent at full rank is only rounding.
    assert owed["two levels"].keys() == owed["one level"].keys()
    assert relative(flat(owed["two levels"]), flat(owed["one level"])) <= SAME


def all_stages(worker: int, world_size: int) -> object:
    # As torchrun sets them. DeepSpeed reads them when it begins.
    def in_nodes(stage: int) -> None:
        os.environ.update(LOCAL_WORLD_SIZE=str(NODE), LOCAL_RANK=str(worker % NODE))
        same_as_on_one_level(stage)

    return run_all(worker, world_size, [(f"stage {stage}", in_nodes, (stage,)) for stage in range(4)])


@pytest.mark.slow
def test_deepspeed_trains_as_on_one_level() -> None:
    found = run(all_stages, 4)
    for stage in range(4):
        result(found, f"stage {stage}")
