"""batched_powerSGD_hook, the alternating algorithm under DDP, and our hooks inside torch's hook idioms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.support.distributed import outcome, run_cases
from tests.support.small import MANY, WIDTH, complaint, stack, training
from tests.support.training import (
    LIMIT,
    batch,
    check,
    flat,
    relative,
    squared_error,
    summary,
)

STEPS = range(6)
RANK = 2


def state(rank: int, model: nn.Module | None = None, **settings: Any) -> PowerSGDState:
    return PowerSGDState(
        None, rank, **{"start_powerSGD_iter": 0, "min_compression_rate": 0, "module": model, **settings}
    )


# Batched --------------------------------------------------------------------------------------------------------------


def batched_at_full_rank(worker: int, world_size: int) -> dict[str, Any]:
    expected = training(stack(), worker, None, STEPS)
    got = training(stack(), worker, state(1000, start_powerSGD_iter=2), STEPS, hook=batched_powerSGD_hook)
    return summary(got, expected)


def batched_at_low_rank(worker: int, world_size: int) -> dict[str, Any]:
    hooked = state(RANK, start_powerSGD_iter=2)
    run = training(stack(), worker, hooked, range(30), hook=batched_powerSGD_hook)
    sizes = [sum(parameters) for parameters in run.buckets[-1]]
    return {
        "digests": run.digests,
        "losses": (run.losses[0], run.losses[-1]),
        "stats": hooked.compression_stats()[1:],
        "sizes": sizes,
        "errors": {name: tuple(error.shape) for name, error in hooked.error().items()},
        "finite": bool(flat(run.gradients[-1]).isfinite().all()),
    }


def batched_from_a_checkpoint(worker: int, world_size: int) -> bool:
    """What was saved is what is loaded, and is used by the first compressed step."""
    model, saved = stack(), state(RANK, start_powerSGD_iter=2)
    training(model, worker, saved, range(4), hook=batched_powerSGD_hook)
    loaded = state(RANK, start_powerSGD_iter=2)
    loaded.load_state_dict(saved.state_dict())
    one, other = saved.state_dict()["matrices"], loaded.state_dict()["matrices"]
    return one.keys() == other.keys() and all(
        torch.equal(one[name][part], other[name][part]) for name in one for part in one[name]
    )


def batched_too_early(worker: int, world_size: int) -> str:
    return complaint(training, stack(), worker, state(1), range(1), hook=batched_powerSGD_hook)


def batched_in_other_buckets(worker: int, world_size: int) -> str:
    hooked = state(1, start_powerSGD_iter=2)
    model = stack()
    training(model, worker, hooked, range(3), hook=batched_powerSGD_hook)
    return complaint(training, model, worker, hooked, range(3, 4), hook=batched_powerSGD_hook)


# Alternating ----------------------------------------------------------------------------------------------------------


def alternating_at_full_rank(worker: int, world_size: int) -> dict[str, Any]:
    expected = training(stack(), worker, None, STEPS)
    model = stack()
    return summary(training(model, worker, state(WIDTH, model, algorithm="alternating"), STEPS), expected)


def alternating_twice_at_low_rank(worker: int, world_size: int) -> list[str]:
    model = stack()
    return training(model, worker, state(RANK, model, algorithm="alternating", iterations=2), STEPS).digests


def alternating_from_a_pickle(worker: int, world_size: int) -> float:
    """Largest difference from an uninterrupted run, of a run that goes on from a checkpoint after three steps."""
    model = stack()
    expected = training(model, worker, state(RANK, model, algorithm="alternating"), STEPS)
    model = stack()
    first = state(RANK, model, algorithm="alternating")
    training(model, worker, first, range(3))
    second = state(RANK, model, algorithm="alternating")
    second.load_state_dict(first.state_dict())
    got = training(model, worker, second, range(3, 6))
    return max(relative(flat(a), flat(b)) for a, b in zip(got.gradients, expected.gradients[3:], strict=True))


def sixteen_bit_error(worker: int, world_size: int) -> dict[str, Any]:
    model = stack()
    hooked = state(RANK, model, error_dtype=torch.bfloat16)
    run = training(model, worker, hooked, range(20))
    return {
        "digests": run.digests,
        "dtypes": {error.dtype for error in hooked.error().values()},
        "saved": {parts["error"].dtype for parts in hooked.state_dict()["matrices"].values()},
        "losses": (run.losses[0], run.losses[-1]),
    }


# Torch's idioms -------------------------------------------------------------------------------------------------------


def scaled_for_accumulation(worker: int, world_size: int) -> dict[str, Any]:
    """A hook that divides by the number of micro-batches before it hands the bucket on."""

    def scaled(hooked: Any, bucket: Any) -> Any:
        bucket.buffer().div_(3)
        return powerSGD_hook(hooked, bucket)

    expected = training(stack(), worker, None, range(4), accumulate=3, lr=0.01)
    for gradients in expected.gradients:
        for gradient in gradients.values():
            gradient.div_(3)
    # A third of the gradient at three times the rate is the same step.
    model = stack()
    got = training(model, worker, state(WIDTH, model), range(4), accumulate=3, lr=0.03, hook=scaled)
    return summary(got, expected)


def in_bf16(worker: int, world_size: int) -> float:
    """Relative difference of the first gradient at full rank, compressed in 16 bits."""
    expected = training(stack(), worker, None, range(1))
    model = stack()
    wrapped = bf16_compress_wrapper(powerSGD_hook)
    got = training(model, worker, state(WIDTH, model), range(1), hook=wrapped)
    return relative(flat(got.gradients[0]), flat(expected.gradients[0]))


class Descent:
    """Gradient descent in the form that torch's optimizer overlap asks for."""

    def step_param(self, parameter: Tensor, gradient: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(gradient, alpha=0.05)


def with_overlapped_optimizer(worker: int, world_size: int) -> float:
    """Largest difference of the parameters from those of an optimizer that steps after the backward pass."""
    expected = stack()
    training(expected, worker, state(RANK, expected), range(4))
    model = stack()
    hooked = state(RANK, model)
    replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
    replica.register_comm_hook(hooked, _hook_then_optimizer(powerSGD_hook, _OptimizerHookState(Descent())))
    for step in range(4):
        replica.zero_grad()
        inputs, targets = batch(worker, step, width=WIDTH)
        squared_error(replica(inputs), targets).backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(relative(got.detach(), truth.detach()) for got, truth in pairs)


CASES = [
    batched_at_full_rank, batched_at_low_rank, batched_from_a_checkpoint, batched_too_early, batched_in_other_buckets,
    alternating_at_full_rank, alternating_twice_at_low_rank, alternating_from_a_pickle, sixteen_bit_error,
    scaled_for_accumulation, in_bf16, with_overlapped_optimizer,
]  # fmt: skip


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return run_cases(CASES, 2)


@pytest.mark.parametrize("case", [batched_at_full_rank, alternating_at_full_rank])
def test_full_rank_equals_ddp(two: dict[str, list[Any]], case: Any) -> None:
    check(outcome(two, case), len(STEPS))


def test_batched_hook_compresses_buckets(two: dict[str, list[Any]]) -> None:
    found = outcome(two, batched_at_low_rank)
    for seen in found:
        assert seen["finite"]
        assert seen["digests"] == found[0]["digests"]
        assert seen["losses"][1] < seen["losses"][0]
        sizes = seen["sizes"]
        assert len(sizes) > 1
        shapes = {f"bucket {i}": (n // (math.isqrt(n - 1) + 1), math.isqrt(n - 1) + 1) for i, n in enumerate(sizes)}
        assert seen["errors"] == shapes
        sent = sum(n + RANK * sum(shape) - math.prod(shape) for n, shape in zip(sizes, shapes.values(), strict=True))
        assert seen["stats"] == (28 * sum(sizes), 28 * sent)


def test_batched_hook_keeps_its_state_in_checkpoints(two: dict[str, list[Any]]) -> None:
    assert outcome(two, batched_from_a_checkpoint) == [True, True]


def test_batched_hook_refuses_buckets_that_may_change(two: dict[str, list[Any]]) -> None:
    for said in outcome(two, batched_too_early):
        assert said.startswith("ValueError")
        assert "start_powerSGD_iter must be at least 2; got 0" in said
    for said in outcome(two, batched_in_other_buckets):
        assert said.startswith("RuntimeError")
        assert "buckets that stay" in said


def test_alternating_workers_hold_the_same_bits(two: dict[str, list[Any]]) -> None:
    first, second = outcome(two, alternating_twice_at_low_rank)
    assert first == second


def test_alternating_goes_on_from_a_checkpoint(two: dict[str, list[Any]]) -> None:
    assert max(outcome(two, alternating_from_a_pickle)) <= LIMIT


def test_16_bit_error_trains_and_is_saved_in_32(two: dict[str, list[Any]]) -> None:
    first, second = outcome(two, sixteen_bit_error)
    assert first["digests"] == second["digests"]
    for seen in (first, second):
        assert seen["dtypes"] == {torch.bfloat16}
        assert seen["saved"] == {torch.float32}
        assert seen["losses"][1] < seen["losses"][0]


def test_gradients_scaled_before_the_hook(two: dict[str, list[Any]]) -> None:
    check(outcome(two, scaled_for_accumulation), 4)


def test_bf16_wrapper(two: dict[str, list[Any]]) -> None:
    """Gradients are rounded to bf16 before and after, by 2⁻⁹ of each element at most."""
    assert max(outcome(two, in_bf16)) <= 2 * 2.0**-9


def test_optimizer_that_steps_in_the_hook(two: dict[str, list[Any]]) -> None:
    assert max(outcome(two, with_overlapped_optimizer)) <= LIMIT
