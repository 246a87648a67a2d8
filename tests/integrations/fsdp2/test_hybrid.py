"""HSDP with a group of replicas, on gloo workers: equal to FSDP's own HSDP at full rank; bytes, replicas, wrong use."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.layout.layout import compressed_rank
from tests.support.sharded_training import (
    CASES,
    MESHES,
    RANK_2,
    STEPS,
    Net,
    against_native,
    check_full_rank,
    compare,
    hybrid,
    hybrid_mesh,
    in_one_group,
    outcome,
    sent_elements,
    sharded,
    train,
)
from tests.support.small import complaint

# At low rank --------------------------------------------------------------------------------------------------------


def low_rank(worker: int, world_size: int) -> dict[str, Any]:
    """Elements sent, errors' sizes, conservation and the replicas' bits at rank 2."""
    replicas, shards = MESHES[world_size]
    mesh = hybrid_mesh(replicas, shards)
    module, state = hybrid(Net(seed=dist.get_rank(mesh["replicate"].get_group())), mesh, RANK_2)
    group = mesh["replicate"].get_group()
    with sent_elements(group) as counts:
        ours = train(module, worker)
    expected_sent = expected_error = 0
    for parameter in module.parameters():
        k = -(-parameter.shape[0] // shards)
        m = parameter.numel() // parameter.shape[0]
        rank = compressed_rank((k, *parameter.shape[1:]), RANK_2)
        expected_sent += (k + m) * rank if rank else k * m
        expected_error += k * m if rank else 0
    state.check_replicas()
    saved = next(module.parameters())
    with torch.no_grad():
        local = saved.to_local()
        if local.numel() and dist.get_rank(group) == 0:
            local.view(-1)[0] += 1e-7 + abs(float(local.view(-1)[0])) * 1e-6
    differing = complaint(state.check_replicas)
    return {
        "sent": sum(counts), "expected_sent": STEPS * expected_sent, "stats": state.compression_stats()[2],
        "error": state.error_numel(), "expected_error": expected_error, "iteration": state.iteration,
        "losses": ours.losses, "differing": differing,
    }  # fmt: skip


def start_iter(worker: int, world_size: int) -> dict[str, Any]:
    """Exact averaging at first."""
    mesh = hybrid_mesh(*MESHES[world_size])
    exact = train(sharded(Net(), mesh), worker, steps=range(3))
    config = PowerSGDConfig(rank=1, min_compression_rate=1, start_iter=3)
    module, state = hybrid(Net(), mesh, config)
    ours = train(module, worker, steps=range(3))
    before = state.error_numel()
    train(module, worker, steps=range(1))
    return {**compare(ours, exact), "before": before, "after": state.error_numel(), "iteration": state.iteration}


def alternating(worker: int, world_size: int) -> dict[str, Any]:
    """One message a step across the replicas, which hold the same bits afterwards."""
    mesh = hybrid_mesh(*MESHES[world_size])
    config = dataclasses.replace(RANK_2, algorithm="alternating")
    module, state = hybrid(Net(), mesh, config)
    with sent_elements(mesh["replicate"].get_group()) as counts:
        ours = train(module, worker)
    state.check_replicas()
    return {"sent": sum(counts), "stats": state.compression_stats()[2], "losses": ours.losses}


# Wrong use ----------------------------------------------------------------------------------------------------------


def wrong_use(worker: int, world_size: int) -> dict[str, str]:
    mesh = hybrid_mesh(2, 2)
    group = mesh["replicate"].get_group()
    applied, _ = hybrid(Net(), mesh, RANK_2)
    on_dim_1: Any = nn.Linear(4, 4, bias=False)
    fully_shard(on_dim_1, mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(1))
    wrong: Any = {"rank": 2}
    attempts = {
        "twice": lambda: apply_powersgd(applied, RANK_2, replicate_group=group),
        "shard group": lambda: apply_powersgd(
            sharded(Net(), mesh["shard"]), RANK_2, replicate_group=mesh["shard"].get_group()
        ),
        "not sharded": lambda: apply_powersgd(Net(), RANK_2, replicate_group=group),
        "no config": lambda: apply_powersgd(sharded(Net(), mesh["shard"]), wrong, group),
        "one worker": lambda: apply_powersgd(sharded(Net(), mesh["shard"]), wrong if worker == 1 else RANK_2, group),
        "dim 1": lambda: apply_powersgd(on_dim_1, RANK_2, replicate_group=group),
    }
    return {name: complaint(attempt) for name, attempt in attempts.items()}


# Tests --------------------------------------------------------------------------------------------------------------


FULL_RANK_CASES = {name: functools.partial(against_native, mode="hybrid", **case) for name, case in CASES.items()}


# The others but for two are quick without replicas.
FAST = ["plain", "several backwards", "no all-reduce", "clipping", "mixed precision", "unused"]


@functools.cache
def four() -> dict[str, list[Any]]:
    others = {
        "low rank": low_rank, "start_iter": start_iter, "alternating": alternating,
        "wrong use": wrong_use,
    }  # fmt: skip
    return in_one_group({name: FULL_RANK_CASES[name] for name in FAST} | others, 4)


@pytest.mark.parametrize("case", FAST)
def test_full_rank_equals_native(case: str) -> None:
    found = outcome(four(), case)
    check_full_rank(found)
    assert all(seen["sent"][1] > 0 for seen in found)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_all_combinations_equal_native(workers: int) -> None:
    results = in_one_group(FULL_RANK_CASES | {"low rank": low_rank}, workers)
    for name in CASES:
        check_full_rank(outcome(results, name))
    check_sizes(outcome(results, "low rank"))


def test_alternating_sends_what_it_counts_and_trains() -> None:
    standard, found = outcome(four(), "low rank")[0], outcome(four(), "alternating")
    for seen in found:
        assert seen["sent"] == seen["stats"] < standard["sent"]
        assert seen["losses"][-1] < seen["losses"][0]


def test_what_is_sent_and_kept_at_low_rank() -> None:
    check_sizes(outcome(four(), "low rank"))


def check_sizes(found: list[dict[str, Any]]) -> None:
    for seen in found:
        print({key: seen[key] for key in ("sent", "error")})
        assert seen["sent"] == seen["expected_sent"] == seen["stats"]
        assert seen["error"] == seen["expected_error"] > 0
        assert seen["iteration"] == STEPS
        assert seen["losses"][-1] < seen["losses"][0]


def test_unequal_replicas_are_noticed() -> None:
    messages = [seen["differing"] for seen in outcome(four(), "low rank")]
    assert all("RuntimeError: replicas differ in 1 tensors, the first of them ['tokens.weight']" in m for m in messages)


def test_accumulation_without_all_reduce_sends_once() -> None:
    for once, each in zip(outcome(four(), "no all-reduce"), outcome(four(), "several backwards"), strict=True):
        assert 2 * once["sent"][1] == each["sent"][1]


def test_exact_averaging_until_start_iter() -> None:
    for seen in outcome(four(), "start_iter"):
        assert seen["gradient"] <= 1e-6
        assert seen["before"] == 0 < seen["after"]
        assert seen["iteration"] == 4


@pytest.mark.parametrize(
    ("attempt", "parts"),
    [
        ("twice", ["ValueError", "apply_powersgd called before"]),
        ("shard group", ["ValueError", "replicate_group has the workers", 'mesh["replicate"]']),
        ("not sharded", ["ValueError", "fully_shard"]),
        ("no config", ["TypeError", "PowerSGDConfig", "dict"]),
        ("one worker", ["TypeError", "PowerSGDConfig", "dict"]),
        ("dim 1", ["ValueError", "dim 0", "'weight'"]),
    ],
)
def test_wrong_use_is_explained(attempt: str, parts: list[str]) -> None:
    for found in outcome(four(), "wrong use"):
        assert all(part in found[attempt] for part in parts), found[attempt]
