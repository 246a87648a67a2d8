"""Two levels with FSDP1 and DeepSpeed, with four processes as two nodes of two: the same training as on one level."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.fsdp import ShardingStrategy

from powersgd_triton.integrations.fsdp1 import PowerSGDState, powerSGD_hook
from tests.support import deepspeed_training
from tests.support.distributed import environment, run
from tests.support.fsdp1_training import train_fsdp1, wrapped
from tests.support.sharded_training import FULL_RANK, RANK_2, Net, check_full_rank, compare, in_one_group, outcome
from tests.support.training import flat, relative, total

NODE = 2
SAME = 1e-3
"""Relative difference at a low rank between one level and two. It grows from step to step."""


def owed(errors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: total(error) for name, error in errors.items()}


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all matrices together, since the error of one that is sent at full rank is only rounding."""
    assert got.keys() == expected.keys()
    return relative(flat(got), flat(expected))


# FSDP1 ---------------------------------------------------------------------------------------------------------------


def fsdp1(worker: int, world_size: int, *, strategy: ShardingStrategy) -> dict[str, Any]:
    """Full rank against FSDP1 itself, and rank 2 against one level."""
    with environment(LOCAL_WORLD_SIZE=str(NODE), LOCAL_RANK=str(worker % NODE)):
        plain = train_fsdp1(wrapped(Net(), strategy), worker)
        runs, errors = [], []
        for config, node_group in ((FULL_RANK, "auto"), (RANK_2, None), (RANK_2, "auto")):
            module = wrapped(Net(), strategy)
            state = PowerSGDState(module, config, node_group=node_group)
            module.register_comm_hook(state, powerSGD_hook)
            runs.append(train_fsdp1(module, worker))
            errors.append(owed(state.error()))
            assert (state._engine.communicator.inside is not None) == (node_group is not None)
        return {
            **compare(runs[0], plain),
            "rank 2": compare(runs[2], runs[1])["gradient"],
            "errors": worst(errors[2], errors[1]),
        }


STRATEGIES = {"full shard": ShardingStrategy.FULL_SHARD, "no shard": ShardingStrategy.NO_SHARD}


def test_fsdp1_trains_as_on_one_level() -> None:
    found = in_one_group({name: functools.partial(fsdp1, strategy=value) for name, value in STRATEGIES.items()}, 4)
    for name in STRATEGIES:
        seen = outcome(found, name)
        check_full_rank(seen)
        for one in seen:
            assert max(one["rank 2"], one["errors"]) <= SAME, (name, one)


# DeepSpeed -----------------------------------------------------------------------------------------------------------


def deepspeed(stage: int) -> dict[str, Any]:
    """Losses of DeepSpeed itself and at full rank; differences at rank 4 from one level, where rows are shared."""
    case = deepspeed_training.Case("two levels", stage)
    losses: dict[str, list[float]] = {"plain": deepspeed_training.train(case, None)}
    errors = {}
    for name, fields in (("full rank", deepspeed_training.FULL_RANK), ("rank 4", deepspeed_training.RANK_4)):
        for node_group in (None, "auto"):
            if (name, node_group) == ("full rank", None):
                continue
            with deepspeed_training.engine_for(case, {**fields, "node_group": node_group}) as engine:
                losses[f"{name} {node_group}"] = deepspeed_training.losses(engine, range(deepspeed_training.STEPS))
                errors[f"{name} {node_group}"] = owed(engine.powersgd.error())
                assert (engine.powersgd._engine.communicator.inside is not None) == (node_group is not None)

    def difference(one: str, other: str) -> float:
        return deepspeed_training.largest_difference(losses[one], losses[other])

    return {
        "full rank": difference("full rank auto", "plain"),
        "rank 4": difference("rank 4 auto", "rank 4 None"),
        "errors": worst(errors["rank 4 auto"], errors["rank 4 None"]),
        "learned": losses["plain"][0] - losses["plain"][-1],
    }


def deepspeed_jobs(worker: int, world_size: int, stages: tuple[int, ...]) -> Any:
    def jobs() -> Any:
        os.environ.update(LOCAL_WORLD_SIZE=str(NODE), LOCAL_RANK=str(worker % NODE))
        return {stage: deepspeed(stage) for stage in stages}

    found = deepspeed_training.run_all(worker, world_size, [("two levels", jobs, ())])
    return found


@pytest.mark.slow
def test_deepspeed_trains_as_on_one_level() -> None:
    pytest.importorskip("deepspeed")
    stages = (0, 1, 2, 3)
    for found in deepspeed_training.result(run(deepspeed_jobs, 4, stages), "two levels"):
        for stage in stages:
            seen = found[stage]
            assert seen["full rank"] <= deepspeed_training.FP32_LIMIT, (stage, seen)
            assert max(seen["rank 4"], seen["errors"]) <= SAME, (stage, seen)
            assert seen["learned"] > 0.5
