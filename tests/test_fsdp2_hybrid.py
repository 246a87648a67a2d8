"""HSDP on gloo workers: full rank equals FSDP's own HSDP; bytes, errors, replicas, wrong use."""

from __future__ import annotations

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
from powersgd_triton.layout import compressed_rank
from tests.distributed import outcome
from tests.sharded_training import (
    BFLOAT16,
    FULL_RANK,
    RANK_2,
    STEPS,
    Net,
    compare,
    hybrid,
    hybrid_mesh,
    in_one_group,
    sent_elements,
    sharded,
    train,
)
from tests.small import complaint

MESHES = {2: (2, 1), 3: (3, 1), 4: (2, 2)}
LIMITS = {"gradient": 1e-5, "parameters": 1e-6}


def freeze(model: Net) -> None:
    model.tokens.weight.requires_grad_(False)
    model.get_parameter("blocks.1.up.weight").requires_grad_(False)


def against_native(
    worker: int,
    world_size: int,
    *,
    accumulate: str = "",
    prepare: Any = None,
    unused: bool = False,
    reduce_unused: bool = False,
    divide: float | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Six steps of FSDP's own HSDP, and of ours at full rank."""
    runs, sent = [], []
    for native in (True, False):
        mesh = hybrid_mesh(*MESHES[world_size])
        # Native replicas must start from the same parameters, ours are made to.
        model = Net(seed=0 if native else dist.get_rank(mesh["replicate"].get_group()))
        if prepare is not None:
            prepare(model)
        if native:
            module = sharded(model, mesh, **(options or {}))
        else:
            module, _ = hybrid(model, mesh, FULL_RANK, **(options or {}))
        if reduce_unused:
            module.set_reduce_scatter_unused_params(True)
        if divide is not None:
            for child in [module, *module.blocks]:
                child.set_gradient_divide_factor(divide)
                child.set_force_sum_reduction_for_comms(True)

        def before_micro(step: int, last: bool, module: Any = module) -> None:
            if accumulate == "no sync":
                module.set_requires_gradient_sync(last)
            elif accumulate == "no all-reduce":
                module.set_requires_all_reduce(last)

        def before_step(step: int, module: Any = module) -> None:
            module.use = not unused or step % 2 == 0

        with sent_elements(mesh["replicate"].get_group()) as counts:
            runs.append(
                train(
                    module,
                    worker,
                    micro_batches=2 if accumulate else 1,
                    before_micro=before_micro,
                    before_step=before_step,
                    **settings,
                )
            )
        sent.append(sum(counts))
    return {**compare(runs[1], runs[0]), "sent": sent}


def plain(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size)


def several_backwards(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size, accumulate="each")


def no_sync(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size, accumulate="no sync")


def no_all_reduce(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size, accumulate="no all-reduce")


def clipping(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size, clip=0.1)


def mixed_precision(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size, options={"mp_policy": BFLOAT16})


def frozen(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size, prepare=freeze)


def unused(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size, unused=True)


def unused_reduced(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size, unused=True, reduce_unused=True)


def divide_factor(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size, divide=8.0)


def checkpointing(worker: int, world_size: int) -> dict[str, Any]:
    return against_native(worker, world_size, prepare=lambda model: setattr(model, "checkpointing", False))


CASES = [
    plain, several_backwards, no_sync, no_all_reduce, clipping, mixed_precision, frozen, unused, unused_reduced,
    divide_factor, checkpointing,
]  # fmt: skip


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


# Wrong use ----------------------------------------------------------------------------------------------------------


def wrong_use(worker: int, world_size: int) -> dict[str, str]:
    mesh = hybrid_mesh(2, 2)
    group = mesh["replicate"].get_group()
    applied, _ = hybrid(Net(), mesh, RANK_2)
    on_dim_1: Any = nn.Linear(4, 4, bias=False)
    fully_shard(on_dim_1, mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(1))
    attempts = {
        "twice": lambda: apply_powersgd(applied, RANK_2, replicate_group=group),
        "2-D mesh": lambda: apply_powersgd(sharded(Net(), mesh), RANK_2, replicate_group=group),
        "2-D mesh, no group": lambda: apply_powersgd(sharded(Net(), mesh), RANK_2),
        "shard group": lambda: apply_powersgd(
            sharded(Net(), mesh["shard"]), RANK_2, replicate_group=mesh["shard"].get_group()
        ),
        "not sharded": lambda: apply_powersgd(Net(), RANK_2, replicate_group=group),
        "no config": lambda: apply_powersgd(sharded(Net(), mesh["shard"]), {"rank": 2}, group),  # type: ignore[arg-type]
        "dim 1": lambda: apply_powersgd(on_dim_1, RANK_2, replicate_group=group),
    }
    return {name: complaint(attempt) for name, attempt in attempts.items()}


# Tests --------------------------------------------------------------------------------------------------------------


@functools.cache
def four() -> dict[str, list[Any]]:
    return in_one_group([*CASES, low_rank, start_iter, wrong_use], 4)


def check(found: list[dict[str, Any]]) -> None:
    for seen in found:
        for key, limit in LIMITS.items():
            assert seen[key] <= limit, seen
        assert seen["moved"] != 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_full_rank_equals_native(case: Any) -> None:
    found = outcome(four(), case)
    check(found)
    assert all(ours > 0 for seen in found for ours in [seen["sent"][1]])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_replicas_of_one_worker_each(workers: int) -> None:
    results = in_one_group([plain, low_rank], workers)
    check(outcome(results, plain))
    check_sizes(outcome(results, low_rank))


def test_what_is_sent_and_kept_at_low_rank() -> None:
    check_sizes(outcome(four(), low_rank))


def check_sizes(found: list[dict[str, Any]]) -> None:
    for seen in found:
        print({key: seen[key] for key in ("sent", "error")})
        assert seen["sent"] == seen["expected_sent"] == seen["stats"]
        assert seen["error"] == seen["expected_error"] > 0
        assert seen["iteration"] == STEPS
        assert seen["losses"][-1] < seen["losses"][0]


def test_unequal_replicas_are_noticed() -> None:
    messages = [seen["differing"] for seen in outcome(four(), low_rank)]
    assert all("RuntimeError: replicas differ in 1 tensors, the first of them ['tokens.weight']" in m for m in messages)


def test_accumulation_without_all_reduce_sends_once() -> None:
    for once, each in zip(outcome(four(), no_all_reduce), outcome(four(), several_backwards), strict=True):
        assert 2 * once["sent"][1] == each["sent"][1]


def test_exact_averaging_until_start_iter() -> None:
    for seen in outcome(four(), start_iter):
        assert seen["gradient"] <= 1e-6
        assert seen["before"] == 0 < seen["after"]
        assert seen["iteration"] == 4


@pytest.mark.parametrize(
    ("attempt", "parts"),
    [
        ("twice", ["ValueError", "apply_powersgd called before"]),
        ("2-D mesh", ["ValueError", "two-dimensional mesh", 'mesh["shard"]', 'mesh["replicate"].get_group()']),
        ("2-D mesh, no group", ["ValueError", "two-dimensional mesh", 'mesh["shard"]']),
        ("shard group", ["ValueError", "replicate_group has the workers", 'mesh["replicate"]']),
        ("not sharded", ["ValueError", "fully_shard"]),
        ("no config", ["TypeError", "PowerSGDConfig", "dict"]),
        ("dim 1", ["ValueError", "dim 0", "'weight'"]),
    ],
)
def test_wrong_use_is_explained(attempt: str, parts: list[str]) -> None:
    for found in outcome(four(), wrong_use):
        assert all(part in found[attempt] for part in parts), found[attempt]
