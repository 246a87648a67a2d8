"""However DDP is used: at full rank the hook equals DDP's own averaging, up to the roundings of the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.distributed import outcome, run_cases
from tests.support.small import MANY, WIDTH, stack
from tests.support.training import (
    LIMIT,
    Images,
    Run,
    WithUnused,
    against_ddp,
    batch,
    check,
    digest,
    flat,
    gradients_of,
    linear_stack,
    local_gradients,
    patched,
    squared_error,
    state_for,
    summary,
    total,
    train,
)

SMALL: dict[str, Any] = {"width": WIDTH, "bucket_cap_mb": MANY}

# Ways of using DDP --------------------------------------------------------------------------------------------------


def default_numbered(worker: int, world_size: int) -> dict[str, Any]:
    """Without module=, so that parameters are numbers."""
    expected = train(stack(), worker, None, steps=range(4), **SMALL)
    return summary(train(stack(), worker, state_for(None), steps=range(4), **SMALL), expected)


def gradient_as_bucket_view(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(stack, worker, steps=range(4), **SMALL, gradient_as_bucket_view=True)


def static_graph(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(stack, worker, steps=range(5), **SMALL, static_graph=True)


def static_graph_and_bucket_view(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(stack, worker, steps=range(5), **SMALL, static_graph=True, gradient_as_bucket_view=True)


def accumulation(worker: int, world_size: int) -> dict[str, Any]:
    return against_ddp(stack, worker, steps=range(4), **SMALL, accumulate=3)


def exact_first(worker: int, world_size: int) -> dict[str, Any]:
    """Two steps of exact averaging before compression, which begins after the buckets are rebuilt."""
    expected = train(stack(), worker, None, steps=range(5), **SMALL)
    got = train(stack(), worker, state_for(None, start_powerSGD_iter=2), steps=range(5), **SMALL)
    return summary(got, expected)


def unused(worker: int, world_size: int, **options: Any) -> dict[str, Any]:
    runs = []
    for hooked in (False, True):
        model = WithUnused(WIDTH)

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
                **SMALL,
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
    expected = train(stack(), worker, None, steps=range(5), **SMALL)
    model = stack()
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
        got = train(model, worker, state, steps=range(5), **SMALL, before_step=assign)
    return {**summary(got, expected), "groups": used}


def uneven_inputs(worker: int, world_size: int) -> dict[str, Any]:
    """Join: worker 1 has two steps more than worker 0."""
    expected = train(stack(), worker, None, steps=range(3 + 2 * worker), **SMALL, uneven=True)
    model = stack()
    got = train(model, worker, state_for(model), steps=range(3 + 2 * worker), **SMALL, uneven=True)
    low = stack()
    coarse = train(low, worker, PowerSGDState(None, 2, 0), steps=range(3 + 2 * worker), **SMALL, uneven=True)
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


# 16-bit and fp64 parameters -----------------------------------------------------------------------------------------


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


# On two workers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return run_cases([*EVEN, uneven_inputs, dtypes, fp16_wrapper], 2)


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
