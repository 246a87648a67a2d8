"""FSDP2 without replicas on gloo workers: full rank equals FSDP's reduce-scatter; bytes, errors, wrong use."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.layout.layout import compressed_rank
from tests.support.sharded_training import (
    CASES,
    RANK_2,
    STEPS,
    Net,
    against_native,
    check_full_rank,
    full_mesh,
    full_shard,
    in_one_group,
    outcome,
    sent_elements,
    sharded,
    train,
)
from tests.support.small import complaint

# A flag of native HSDP means nothing here, and a factor to divide by needs sums.
FULL_RANK_CASES = {
    name: functools.partial(against_native, mode="full", **case)
    for name, case in CASES.items()
    if name != "no all-reduce"
}
# The others but for two are quick with replicas.
FAST = ["plain", "no sync", "frozen", "unused, reduced", "divide factor"]


def low_rank(worker: int, world_size: int) -> dict[str, Any]:
    """Elements sent, errors' sizes, and the shapes at rank 2."""
    module, state = full_shard(Net(), full_mesh(world_size), RANK_2)
    with sent_elements() as counts:
        ours = train(module, worker)
    sent = error = 0
    for parameter in module.parameters():
        n, m = parameter.shape[0], parameter.numel() // parameter.shape[0]
        rank = compressed_rank(parameter.shape, RANK_2)
        sent += (n + m) * rank if rank else n * m
        error += n * m if rank else 0
    return {
        "sent": sum(counts), "expected_sent": STEPS * sent, "stats": state.compression_stats()[2],
        "error": state.error_numel(), "expected_error": error, "iteration": state.iteration, "losses": ours.losses,
        "owed": {name: tuple(error.shape) for name, error in state.error().items()},
    }  # fmt: skip


def wrong_use(worker: int, world_size: int) -> dict[str, str]:
    mesh = full_mesh(world_size)
    applied, _ = full_shard(Net(), mesh, RANK_2)
    divided, _ = full_shard(Net(), mesh, RANK_2)
    divided.set_gradient_divide_factor(8.0)
    return {
        "twice": complaint(apply_powersgd, applied, RANK_2),
        "not sharded": complaint(apply_powersgd, Net(), RANK_2),
        "other reduce-scatter": complaint(apply_powersgd, sharded(other(mesh), mesh), RANK_2),
        "factor": complaint(train, divided, worker),
    }


def other(mesh: Any) -> Any:
    """A model with a block that has a custom reduce-scatter."""
    model: Any = Net()
    fully_shard(model.head, mesh=mesh)
    model.head.set_custom_reduce_scatter(nn.Identity())
    return model


@functools.cache
def three() -> dict[str, list[Any]]:
    return in_one_group(
        {name: FULL_RANK_CASES[name] for name in FAST} | {"low rank": low_rank, "wrong use": wrong_use}, 3
    )


@pytest.mark.parametrize("case", FAST)
def test_full_rank_equals_native(case: str) -> None:
    check_full_rank(outcome(three(), case))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_full_rank_equals_native_on_other_numbers_of_workers(workers: int) -> None:
    results = in_one_group(FULL_RANK_CASES, workers)
    for name in FULL_RANK_CASES:
        check_full_rank(outcome(results, name))


def test_what_is_sent_and_kept_at_low_rank() -> None:
    for seen in outcome(three(), "low rank"):
        print({key: seen[key] for key in ("sent", "error")})
        assert seen["sent"] == seen["expected_sent"] == seen["stats"]
        assert seen["error"] == seen["expected_error"] > 0
        assert seen["iteration"] == STEPS
        assert seen["losses"][-1] < seen["losses"][0]
        assert seen["owed"]["blocks.0.up.weight"] == (101, 25)


@pytest.mark.parametrize(
    ("attempt", "parts"),
    [
        ("twice", ["ValueError", "apply_powersgd called before"]),
        ("not sharded", ["ValueError", "fully_shard"]),
        ("factor", ["RuntimeError", "set_gradient_divide_factor", "set_force_sum_reduction_for_comms(True)"]),
        ("other reduce-scatter", ["ValueError", "'head'", "custom reduce-scatter (Identity)"]),
    ],
)
def test_wrong_use_is_explained(attempt: str, parts: list[str]) -> None:
    for found in outcome(three(), "wrong use"):
        assert all(part in found[attempt] for part in parts), found[attempt]
