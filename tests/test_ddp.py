"""The DDP hook on several gloo workers: at full rank it equals DDP's own averaging, however DDP is used."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.checks import random_states
from tests.distributed import outcome, run, run_cases
from tests.training import (
    Images,
    Run,
    WithUnused,
    batch,
    digest,
    flat,
    gradients_of,
    linear_stack,
    local_gradients,
    patched,
    relative,
    squared_error,
    step_differences,
    total,
    train,
    worst_parameter,
)

# What issue 2 asks for.
LIMIT = 1e-5
FULL_RANK = {"matrix_approximation_rank": 256, "start_powerSGD_iter": 0, "min_compression_rate": 0}
Make = Callable[[], nn.Module]


def state_for(model: nn.Module | None, group: dist.ProcessGroup | None = None, **settings: Any) -> PowerSGDState:
    return PowerSGDState(group, module=model, **{**FULL_RANK, **settings})


def against_ddp(make: Make, worker: int, **options: Any) -> dict[str, Any]:
    """The same training with DDP alone and with the hook at full rank."""
    expected = train(make(), worker, None, **options)
    model = make()
    got = train(model, worker, state_for(model, options.get("group")), **options)
    return summary(got, expected)


def summary(got: Run, expected: Run) -> dict[str, Any]:
    return {
        "steps": step_differences(got.gradients, expected.gradients),
        "parameter": worst_parameter(got.gradients, expected.gradients),
        "digests": got.digests,
        "buckets": got.buckets,
    }


def check(found: list[dict[str, Any]], steps: int) -> None:
    for seen in found:
        assert len(seen["steps"]) == steps
        assert max(seen["steps"]) <= LIMIT, seen["steps"]
        assert seen["parameter"] <= LIMIT
        assert seen["digests"] == found[0]["digests"], "workers hold different bits"


# Full rank on 2, 3 and 4 workers ----------------------------------------------------------------------------------


def full_rank(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(linear_stack, worker)


def check_full_rank(found: list[dict[str, Any]]) -> None:
    check(found, steps=10)
    for seen in found:
        before, after = seen["buckets"][0], seen["buckets"][-1]
        assert len(after) > 10
        assert before != after, "DDP did not rebuild its buckets, so the test does not test that"


# Ways of using DDP, on two workers ----------------------------------------------------------------------------------


def default_numbered(worker: int, world_size: int) -> dict[str, Any]:
    """Without module=, so that parameters are numbers."""
    make = lambda: linear_stack(6)  # noqa: E731
    expected = train(make(), worker, None, steps=range(4))
    return summary(train(make(), worker, state_for(None), steps=range(4)), expected)


def gradient_as_bucket_view(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(lambda: linear_stack(6), worker, steps=range(4), gradient_as_bucket_view=True)


def static_graph(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(lambda: linear_stack(6), worker, steps=range(5), static_graph=True)


def static_graph_and_bucket_view(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(lambda: linear_stack(6), worker, steps=range(5), static_graph=True, gradient_as_bucket_view=True)


def accumulation(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(lambda: linear_stack(6), worker, steps=range(4), accumulate=3)


def exact_first(worker: int, world_size: int) -> dict[str, Any]:
    """Two steps of exact averaging before compression, which begins after the buckets are rebuilt."""
    expected = train(linear_stack(6), worker, None, steps=range(5))
    got = train(linear_stack(6), worker, state_for(None, start_powerSGD_iter=2), steps=range(5))
    return summary(got, expected)


def unused(worker: int, world_size: int, **options: Any) -> dict[str, Any]:
    runs = []
    for hooked in (False, True):
        model = WithUnused()

        def use_by_turns(step: int, model: WithUnused = model) -> None:
            model.use = (step + worker) % 3 == 0

        runs.append(
            train(
                model,
                worker,
                state_for(model) if hooked else None,
                steps=range(6),
                before_step=use_by_turns,
                find_unused_parameters=True,
                **options,
            )
        )
    expected, got = runs
    return {**summary(got, expected), "names": [sorted(seen) for seen in got.gradients]}


def find_unused_parameters(worker: int, world_size: int) -> dict[str, Any]:
    return unused(worker, world_size)


def find_unused_parameters_and_bucket_view(worker: int, world_size: int) -> dict[str, Any]:
    return unused(worker, world_size, gradient_as_bucket_view=True)


def channels_last(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(Images, worker, steps=range(4), bucket_cap_mb=0.001, width=192)


def channels_last_and_bucket_view(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(Images, worker, steps=range(4), bucket_cap_mb=0.001, width=192, gradient_as_bucket_view=True)


def two_models(worker: int, world_size: int) -> dict[str, Any]:
    """Two replicated models in one backward pass, whose buckets come in turns."""

    def both(hooked: bool) -> Run:
        result = Run()
        models = [linear_stack(5, 64, seed=1), linear_stack(7, 64, seed=2)]
        replicas = [DistributedDataParallel(model, bucket_cap_mb=0.02) for model in models]
        if hooked:
            for replica, model in zip(replicas, models, strict=True):
                replica.register_comm_hook(state_for(model), powerSGD_hook)
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            inputs, targets = batch(worker, step, width=64)
            torch.stack([squared_error(replica(inputs), targets) for replica in replicas]).sum().backward()
            result.gradients.append(gradients_of(nn.ModuleList(models)))
            optimizer.step()
            result.digests.append(
                digest([*result.gradients[-1].values(), *(p for m in models for p in m.parameters())])
            )
        return result

    expected = both(hooked=False)
    return summary(both(hooked=True), expected)


def group_set_later(worker: int, world_size: int) -> dict[str, Any]:
    """The state is made without a group and gets one before the first step, and another one after two steps."""
    groups = [dist.new_group(range(world_size)) for _ in range(2)]
    expected = train(linear_stack(6), worker, None, steps=range(5))
    model = linear_stack(6)
    state = state_for(model)

    def assign(step: int) -> None:
        if step in (0, 2):
            state.process_group = groups[step // 2]

    used = []
    original = dist.all_reduce

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        used.append(groups.index(kwargs["group"]) if kwargs.get("group") in groups else None)
        return original(tensor, *args, **kwargs)

    with patched(dist, "all_reduce", noting):
        got = train(model, worker, state, steps=range(5), before_step=assign)
    return {**summary(got, expected), "groups": used}


def uneven_inputs(worker: int, world_size: int) -> dict[str, Any]:
    """Join: worker 1 has two steps more than worker 0."""
    make = lambda: linear_stack(6)  # noqa: E731
    expected = train(make(), worker, None, steps=range(3 + 2 * worker), uneven=True)
    model = make()
    got = train(model, worker, state_for(model), steps=range(3 + 2 * worker), uneven=True)
    low = make()
    coarse = train(low, worker, PowerSGDState(None, 2, 0), steps=range(3 + 2 * worker), uneven=True)
    return {
        **summary(got, expected),
        "finite": all(flat(seen).isfinite().all() for seen in coarse.gradients),
        "parameters": [digest(model.parameters()), digest(low.parameters())],
    }


EVEN = {
    default_numbered: 4,
    gradient_as_bucket_view: 4,
    static_graph: 5,
    static_graph_and_bucket_view: 5,
    accumulation: 4,
    exact_first: 5,
    find_unused_parameters: 6,
    find_unused_parameters_and_bucket_view: 6,
    channels_last: 4,
    channels_last_and_bucket_view: 4,
    two_models: 5,
    group_set_later: 5,
}


# 16-bit and fp64 parameters ------------------------------------------------------------------------------------------


def against_local(worker: int, world_size: int, dtype: torch.dtype, hook: Any, **settings: Any) -> float:
    """Largest |Ĝ − Ḡ| over what roundings allow, with Ḡ the mean of the workers' gradients, taken in fp64.

    Parameters stay as they are, so that E holds roundings only.
    """
    model = linear_stack(4, 64).to(dtype)
    own = local_gradients(model)
    replica = DistributedDataParallel(model, bucket_cap_mb=0.02)
    replica.register_comm_hook(state_for(model, **settings), hook)
    worst = 0.0
    for step in range(4):
        model.zero_grad()
        inputs, targets = batch(worker, step, width=64)
        # fp16's smallest normal number is 6e-5: keep the elements of the gradients above it.
        (64 * squared_error(replica(inputs.to(dtype)).double(), targets)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            mean = total(own[name]) / world_size
            allowed = allowance(own[name], mean, dtype, half=hook is not powerSGD_hook, workers=world_size)
            excess = (parameter.grad.double() - mean).abs() / allowed
            worst = max(worst, float(excess.max()))
    return worst


def allowance(own: Tensor, mean: Tensor, dtype: torch.dtype, half: bool, workers: int) -> Tensor:
    """Elementwise bound: the result is rounded once to the gradient's dtype; the factors are fp32 (or fp64).

    ``half``: fp16_compress_wrapper rounds the gradient to fp16 before, and the result again.
    """
    u = torch.finfo(torch.float16 if half else dtype).eps / 2
    compute = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    # Project, orthogonalize, backproject, reconstruct: four times sums of 64 products, each of at most ‖M‖.
    allowed = 1.05 * u * mean.abs() + 4 * 64 * compute * total(own.double().norm()) / workers
    if dtype == torch.float16 or half:
        allowed = allowed + torch.finfo(torch.float16).smallest_normal * u
    return allowed + 1.05 * u * total(own.abs()) / workers if half else allowed


def dtypes(worker: int, world_size: int) -> dict[str, float]:
    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return {str(dtype): against_local(worker, world_size, dtype, powerSGD_hook) for dtype in kinds}


def fp16_wrapper(worker: int, world_size: int) -> float:
    return against_local(worker, world_size, torch.float32, fp16_compress_wrapper(powerSGD_hook))


# Low rank ----------------------------------------------------------------------------------------------------------


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


# What a step does to the rest of the process -------------------------------------------------------------------------

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
            numels.append(args[0].numel())
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


TWO = [full_rank, *EVEN, uneven_inputs, dtypes, fp16_wrapper, several_buckets, collectives]


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return run_cases(TWO, 2)


def test_full_rank_equals_ddp_on_two_workers(two: dict[str, list[Any]]) -> None:
    check_full_rank(outcome(two, full_rank))


@pytest.mark.parametrize("case", EVEN, ids=lambda case: case.__name__)
def test_full_rank_equals_ddp_however_it_is_used(two: dict[str, list[Any]], case: Callable[..., Any]) -> None:
    check(outcome(two, case), steps=EVEN[case])


@pytest.mark.parametrize("case", [find_unused_parameters, find_unused_parameters_and_bucket_view])
def test_unused_parameters_are_unused(two: dict[str, list[Any]], case: Callable[..., Any]) -> None:
    """That the parameter which some workers use has a gradient, and the one that none does has not."""
    for seen in outcome(two, case):
        assert "first.weight" in seen["names"][0]
        assert not any("never.weight" in names for names in seen["names"])
        assert ["sometimes.weight" in names for names in seen["names"]] == [True, False, True] * 2


def test_group_is_the_one_set_last(two: dict[str, list[Any]]) -> None:
    for seen in outcome(two, group_set_later):
        assert None not in seen["groups"]
        assert seen["groups"] == sorted(seen["groups"])
        assert set(seen["groups"]) == {0, 1}


def test_uneven_inputs(two: dict[str, list[Any]]) -> None:
    found = outcome(two, uneven_inputs)
    for worker, seen in enumerate(found):
        assert len(seen["steps"]) == 3 + 2 * worker
        assert max(seen["steps"]) <= LIMIT, seen["steps"]
        assert seen["finite"]
        assert seen["parameters"] == found[0]["parameters"]


def test_gradients_of_any_float_dtype(two: dict[str, list[Any]]) -> None:
    for seen in outcome(two, dtypes):
        assert max(seen.values()) <= 1, seen


def test_fp16_compress_wrapper(two: dict[str, list[Any]]) -> None:
    assert max(outcome(two, fp16_wrapper)) <= 1


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
        for step in seen["steps"]:
            assert step["numel"] == 24 * (128 * 128 + 128)
            assert [name for name, _ in step["calls"]] == ["all_reduce"] * (2 * step["buckets"])
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
    model = linear_stack(1, 8)
    replica = DistributedDataParallel(model)
    replica.register_comm_hook(state_for(model, group if worker == 1 else None), powerSGD_hook)
    if worker == 1:
        try:
            squared_error(replica(torch.ones(4, 8)), torch.zeros(4, 8)).backward()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def three() -> dict[str, list[Any]]:
    return run_cases([full_rank, some_workers, outsider], 3)


def test_full_rank_equals_ddp_on_three_workers(three: dict[str, list[Any]]) -> None:
    check_full_rank(outcome(three, full_rank))


def test_process_group_of_some_workers(three: dict[str, list[Any]]) -> None:
    first, _, last = outcome(three, some_workers)
    check([first, last], steps=4)


def test_process_group_without_this_process(three: dict[str, list[Any]]) -> None:
    assert "not a member" in outcome(three, outsider)[1]


def test_full_rank_equals_ddp_on_four_workers() -> None:
    check_full_rank(run(full_rank, 4))


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
    survivor, victim = run(peer_dies, 2, timeout=100, casualties=[1])
    assert victim is None
    assert survivor["step"] == 2
    assert survivor["error"]
    assert survivor["seconds"] < 70


def test_relative_notices_a_difference() -> None:
    """The measure that the tests above rely on."""
    ones = torch.ones(4)
    assert relative(ones, ones) == 0
    assert relative(ones * 1.001, ones) == pytest.approx(1e-3, rel=1e-3)
    assert relative(ones * float("nan"), ones) == float("inf")
    assert relative(ones, ones * 0) == float("inf")
