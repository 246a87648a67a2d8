"""The FSDP1 hook on gloo workers: full rank equals FSDP's own averaging; bytes, errors, wrong use."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations import ddp
from powersgd_triton.integrations.fsdp1 import PowerSGDState, powerSGD_hook
from powersgd_triton.layout.layout import compressed_rank
from tests.support.fsdp1_training import compressed, train_fsdp1, wrapped
from tests.support.sharded_training import (
    FULL_RANK,
    RANK_2,
    STEPS,
    Net,
    check_full_rank,
    checkpoint,
    compare,
    freeze,
    in_one_group,
    outcome,
    sent_elements,
)
from tests.support.small import complaint

FULL, GRADIENTS, NO = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def against_native(
    worker: int,
    world_size: int,
    *,
    prepare: Callable[[Net], None] | None = None,
    training: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Steps of FSDP1 alone, and with the hook at full rank."""
    base = Net()
    if prepare is not None:
        prepare(base)
    expected = train_fsdp1(wrapped(copy.deepcopy(base), **options), worker, **(training or {}))
    with sent_elements() as counts:
        module, state = compressed(base, FULL_RANK, **options)
        got = train_fsdp1(module, worker, **(training or {}))
    return {**compare(got, expected), "sent": sum(counts), "stats": state.compression_stats()[2]}


def freeze_block(model: Net) -> None:
    """With use_orig_params=False a unit's parameters are frozen together."""
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)


FAST: dict[str, dict[str, Any]] = {
    "full shard": {},
    "flat parameters": {"original": False},
    "gradients sharded, several backwards": {"strategy": GRADIENTS, "training": {"micro_batches": 2}},
    "no shard": {"strategy": NO},
    "mixed precision": {"mixed_precision": BFLOAT16},
    "no sync": {"training": {"micro_batches": 3, "sync_each": False}},
    "frozen": {"prepare": freeze},
    "reentrant checkpointing": {"prepare": functools.partial(checkpoint, use_reentrant=True)},
}


def combinations(original: bool) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "several backwards": {"training": {"micro_batches": 2}},
        "no sync": {"training": {"micro_batches": 2, "sync_each": False}},
        "mixed precision": {"mixed_precision": BFLOAT16},
        "checkpointing": {"prepare": checkpoint},
        "reentrant checkpointing": {"prepare": functools.partial(checkpoint, use_reentrant=True)},
        "frozen": {"prepare": freeze if original else freeze_block},
    }


SLOW: dict[str, dict[str, Any]] = {
    f"{strategy.name}, original {original}, {name}": {**case, "strategy": strategy, "original": original}
    for strategy in (FULL, GRADIENTS, NO)
    for original in (True, False)
    for name, case in combinations(original).items()
}


def low_rank(worker: int, world_size: int) -> dict[str, Any]:
    """Elements sent and kept at rank 2; rows that are reconstructed."""
    model = Net()
    shapes = [tuple(p.shape) for p in model.parameters()]
    module, state = compressed(model, RANK_2)
    with sent_elements() as counts:
        run = train_fsdp1(module, worker)
    sent = error = 0
    for shape in shapes:
        n, m = shape[0], torch.Size(shape).numel() // shape[0]
        rank = compressed_rank(shape, RANK_2)
        sent += (n + m) * rank if rank else n * m
        error += n * m if rank else 0
    return {
        "sent": sum(counts), "expected_sent": STEPS * sent, "stats": state.compression_stats()[2],
        "error": state.error_numel(), "expected_error": error, "iteration": state.iteration, "losses": run.losses,
        "own group": state._engine.communicator.group is not module.process_group,
    }  # fmt: skip


def start_iter(worker: int, world_size: int) -> dict[str, Any]:
    base = Net()
    expected = train_fsdp1(wrapped(copy.deepcopy(base)), worker)
    module, _ = compressed(base, PowerSGDConfig(rank=1, start_iter=STEPS))
    return compare(train_fsdp1(module, worker), expected)


def wrong_use(worker: int, world_size: int) -> dict[str, str]:
    applied, state = compressed(Net(), RANK_2)
    other = wrapped(Net())
    other.register_comm_hook(state, powerSGD_hook)
    of_ddp = wrapped(Net())
    of_ddp.register_comm_hook(ddp.PowerSGDState(None), powerSGD_hook)
    single = dist.new_group([worker], use_local_synchronization=True)
    hybrid = wrapped(Net(), ShardingStrategy.HYBRID_SHARD, process_group=(dist.group.WORLD, single))
    frozen = Net()
    frozen.requires_grad_(False)
    found = {
        "twice": complaint(PowerSGDState, applied, RANK_2),
        "another model": complaint(train_fsdp1, other, worker),
        "state of DDP": complaint(train_fsdp1, of_ddp, worker),
        "hybrid": complaint(PowerSGDState, hybrid, RANK_2),
        "not FSDP": complaint(PowerSGDState, nn.Linear(2, 2), RANK_2),
        "frozen": complaint(PowerSGDState, wrapped(frozen), RANK_2),
        "no config": complaint(PowerSGDState, applied, {"rank": 2}),
        "one worker": complaint(PowerSGDState, wrapped(Net()), {"rank": 2} if worker == 1 else RANK_2),
    }
    return found


@functools.cache
def two() -> dict[str, list[Any]]:
    warnings.filterwarnings("ignore")
    cases = {name: functools.partial(against_native, **case) for name, case in FAST.items()}
    return in_one_group(cases | {"low rank": low_rank, "start_iter": start_iter, "wrong use": wrong_use}, 2)


@pytest.mark.parametrize("case", FAST)
def test_full_rank_equals_native(case: str) -> None:
    found = outcome(two(), case)
    check_full_rank(found)
    assert all(seen["sent"] == seen["stats"] > 0 for seen in found)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_all_combinations_equal_native(workers: int) -> None:
    results = in_one_group({name: functools.partial(against_native, **case) for name, case in SLOW.items()}, workers)
    for name in SLOW:
        check_full_rank(outcome(results, name))


def test_what_is_sent_and_kept_at_low_rank() -> None:
    for seen in outcome(two(), "low rank"):
        print({key: seen[key] for key in ("sent", "error")})
        assert seen["sent"] == seen["expected_sent"] == seen["stats"]
        assert seen["error"] == seen["expected_error"] > 0
        assert seen["iteration"] == STEPS
        assert seen["losses"][-1] < seen["losses"][0]
        assert seen["own group"]


def test_exact_averaging_until_start_iter() -> None:
    check_full_rank(outcome(two(), "start_iter"))


@pytest.mark.parametrize(
    ("attempt", "parts"),
    [
        ("twice", ["ValueError", "communication hook already", "once"]),
        ("another model", ["RuntimeError", "does not know", "Build PowerSGDState from the model"]),
        ("state of DDP", ["TypeError", "integrations.fsdp1", "integrations.ddp.PowerSGDState"]),
        ("hybrid", ["ValueError", "HYBRID_SHARD", "replicate_group"]),
        ("not FSDP", ["TypeError", "Linear", "integrations.fsdp2"]),
        ("frozen", ["ValueError", "no trainable parameters"]),
        ("no config", ["TypeError", "PowerSGDConfig", "dict"]),
        ("one worker", ["TypeError", "PowerSGDConfig", "dict"]),
    ],
)
def test_wrong_use_is_explained(attempt: str, parts: list[str]) -> None:
    for found in outcome(two(), "wrong use"):
        assert all(part in found[attempt] for part in parts), found[attempt]
