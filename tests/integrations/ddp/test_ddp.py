"""The DDP hook on one to four gloo workers: full rank equals DDP's averaging; collectives, groups, a dead worker."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import powerSGD_hook
from tests.support.checks import random_states
from tests.support.distributed import PROCESS_GROUP_TIMEOUT, outcome, run, run_cases
from tests.support.training import (
    LIMIT,
    against_ddp,
    batch,
    check,
    flat,
    linear_stack,
    relative,
    squared_error,
    state_for,
    step_differences,
    summary,
    train,
)

# Full rank on 2, 3 and 4 workers ------------------------------------------------------------------------------------


def full_rank(worker: int, world_size: int) -> dict[str, Any]:
    """Layers of the size that DDP is used with."""
    return against_ddp(lambda: linear_stack(12), worker, steps=range(5), bucket_cap_mb=0.2)


def full_rank_of_small_layers(worker: int, world_size: int) -> dict[str, Any]:
    """As many layers, each in a bucket of its own too, in a small part of the time."""
    return against_ddp(lambda: linear_stack(12, 64), worker, width=64, bucket_cap_mb=0.01)


def check_full_rank(found: list[dict[str, Any]], steps: int = 10) -> None:
    check(found, steps)
    for seen in found:
        before, after = seen["buckets"][0], seen["buckets"][-1]
        assert len(after) > 10
        assert before != after, "DDP did not rebuild its buckets, so the test does not test that"


# Low rank -----------------------------------------------------------------------------------------------------------


def several_buckets(worker: int, world_size: int) -> dict[str, Any]:
    """24 × Linear(256) in buckets of 0.3 MB, where torch's hook hangs or aborts; then in one bucket."""
    settings: dict[str, Any] = {"matrix_approximation_rank": 4, "min_compression_rate": 2}
    runs = {}
    for name, cap in (("many", 0.3), ("one", 100), ("batched", 1.1)):
        model = linear_stack()
        state = state_for(model, **settings, batch_tensors_with_same_shape=name == "batched")
        runs[name] = train(model, worker, state, steps=range(4), bucket_cap_mb=cap), state.compression_stats()
    many, _ = runs["many"]
    return {
        **summary(many, runs["one"][0]),
        "batched": max(step_differences(runs["batched"][0].gradients, many.gradients)),
        "stats": [seen for _, seen in runs.values()],
        "finite": all(flat(seen).isfinite().all() for seen in many.gradients),
        "counts": [len(seen.buckets[-1]) for seen, _ in runs.values()],
    }


# What a step does to the rest of the process ------------------------------------------------------------------------


COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "broadcast", "reduce", "barrier", "send", "recv",
    "isend", "irecv", "gather", "scatter",
)  # fmt: skip


def collectives(worker: int, world_size: int) -> dict[str, Any]:
    """Names, threads and callers of all collectives; random states before and after."""
    calls: list[tuple[str, bool]] = []
    inside: list[int] = []
    counts: list[int] = []
    numels: list[int] = []

    def hook(state, bucket):
        inside.append(threading.get_ident())
        counts.append(bucket.buffer().numel())
        try:
            return powerSGD_hook(state, bucket)
        finally:
            inside.pop()

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, inside == [threading.get_ident()]))
            # The comparison before the first step gathers lists; it is no gradient.
            numels.append(args[0].numel() if isinstance(args[0], Tensor) else 0)
            return original(*args, **kwargs)

        return call

    model = linear_stack(24, 128)
    state = state_for(model, matrix_approximation_rank=4)
    replica = DistributedDataParallel(model, bucket_cap_mb=0.3)
    replica.register_comm_hook(state, hook)
    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    per_step = []
    before = random_states()
    for name, original in originals.items():
        setattr(dist, name, noting(name, original))
    try:
        for step in range(4):
            inputs, targets = batch(worker, step, width=128)
            for log in (calls, counts, numels):
                log.clear()
            squared_error(replica(inputs), targets).backward()
            per_step.append({"calls": list(calls), "buckets": len(counts), "sent": sum(numels), "numel": sum(counts)})
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return {"steps": per_step, "random": random_states() == before, "stats": state.compression_stats()}


# On two workers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return run_cases([full_rank, several_buckets, collectives], 2)


def test_full_rank_equals_ddp_on_two_workers(two: dict[str, list[Any]]) -> None:
    check_full_rank(outcome(two, full_rank), steps=5)


def test_several_buckets_at_low_rank(two: dict[str, list[Any]]) -> None:
    found = outcome(two, several_buckets)
    check(found, steps=4)
    for seen in found:
        assert seen["finite"]
        assert seen["batched"] <= LIMIT
        many, one, batched = seen["counts"]
        assert many > 10
        assert one == 1
        assert 1 < batched < many
        # 24 matrices at rank 4, 24 biases as they are; how they are spread over buckets does not matter.
        before, after = 24 * (256 * 256 + 256), 24 * (2 * 256 * 4 + 256)
        assert seen["stats"] == [(before / after, 4 * before, 4 * after)] * 3


def test_two_all_reduces_a_bucket_and_nothing_else(two: dict[str, list[Any]]) -> None:
    for seen in outcome(two, collectives):
        for number, step in enumerate(seen["steps"]):
            assert step["numel"] == 24 * (128 * 128 + 128)
            # Before a new bucket the workers compare it, and whether its memory is there. DDP builds new buckets for
            # the second step.
            compared = 2 * step["buckets"] * (number < 2)
            sent = [name for name, _ in step["calls"]]
            assert sorted(sent) == ["all_gather"] * compared + ["all_reduce"] * (2 * step["buckets"])
            assert all(inside for _, inside in step["calls"]), "a collective was issued outside of the hook"
        assert seen["steps"][-1]["buckets"] > 1
        # What the statistics say travels is what travels.
        assert sum(step["sent"] for step in seen["steps"]) == seen["stats"][2]


def test_no_global_random_state_is_touched(two: dict[str, list[Any]]) -> None:
    assert all(seen["random"] for seen in outcome(two, collectives))


# Three and four workers, and one ------------------------------------------------------------------------------------


def some_workers(worker: int, world_size: int) -> dict[str, Any]:
    """Workers 0 and 2 train; worker 1 is not in their group."""
    group = dist.new_group([0, 2])
    if worker == 1:
        return {}
    return against_ddp(lambda: linear_stack(6), worker, steps=range(4), group=group)


def outsider(worker: int, world_size: int) -> str:
    """What a process is told that uses a group it is not in."""
    group = dist.new_group([0, 2])
    if worker == 1:
        try:
            state_for(linear_stack(1, 8), group)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def three() -> dict[str, list[Any]]:
    return run_cases([full_rank_of_small_layers, some_workers, outsider], 3)


def test_full_rank_equals_ddp_on_three_workers(three: dict[str, list[Any]]) -> None:
    check_full_rank(outcome(three, full_rank_of_small_layers))


def test_process_group_of_some_workers(three: dict[str, list[Any]]) -> None:
    first, _, last = outcome(three, some_workers)
    check([first, last], steps=4)


def test_process_group_without_this_process(three: dict[str, list[Any]]) -> None:
    assert "not a member" in outcome(three, outsider)[1]


def test_full_rank_equals_ddp_on_four_workers() -> None:
    check_full_rank(run(full_rank_of_small_layers, 4))


def test_one_worker_sends_nothing() -> None:
    (case,) = run(collectives, 1)
    assert case["random"]
    assert all(step["calls"] == [] for step in case["steps"])


# A worker that dies -------------------------------------------------------------------------------------------------


def peer_dies(worker: int, world_size: int) -> dict[str, Any]:
    """Worker 1 ends in the middle of the third backward pass."""
    model = linear_stack(6, 64)
    step = 0

    def die(gradient: Tensor) -> None:
        if worker == 1 and step == 2:
            os._exit(17)

    dict(model.named_parameters())["2.weight"].register_hook(die)
    replica = DistributedDataParallel(model, bucket_cap_mb=0.02)
    replica.register_comm_hook(state_for(model, matrix_approximation_rank=4), powerSGD_hook)
    start = time.monotonic()
    try:
        for step in range(4):
            inputs, targets = batch(worker, step, width=64)
            squared_error(replica(inputs), targets).backward()
    except RuntimeError as error:
        return {"step": step, "error": str(error), "seconds": time.monotonic() - start}
    return {"step": None}


def test_death_of_a_worker_is_an_exception_in_backward() -> None:
    survivor, victim = run(peer_dies, 2, casualties=[1])
    assert victim is None
    assert survivor["step"] == 2
    assert survivor["error"]
    # Told of the death, and not by the timeout.
    assert survivor["seconds"] < PROCESS_GROUP_TIMEOUT.total_seconds()


def test_relative_notices_a_difference() -> None:
    """The measure that the tests above rely on."""
    ones = torch.ones(4)
    assert relative(ones, ones) == 0
    assert relative(ones * 1.001, ones) == pytest.approx(1e-3, rel=1e-3)
    assert relative(ones * float("nan"), ones) == float("inf")
    assert relative(ones, ones * 0) == float("inf")
