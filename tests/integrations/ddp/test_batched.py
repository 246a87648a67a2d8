"""The batched hook, for which a bucket of DDP is one matrix."""

import functools
import math
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook
from tests.support.balance import check_same
from tests.support.checks import assert_equal_states
from tests.support.distributed import make_test
from tests.support.training import (
    LIMIT,
    ONE,
    batch,
    complaint,
    flat,
    linear_stack,
    relative,
    squared_error,
    state_for,
    step_differences,
    total,
    training,
)

STEPS, RANK = range(4), 2
train = functools.partial(training, hook=batched_powerSGD_hook)


def one_matrix_a_bucket(worker: int, world_size: int) -> None:
    """A bucket is one matrix, nearly square, which is averaged exactly at full rank, and saved."""
    sizes: list[int] = []

    def noting(state: Any, bucket: Any) -> Any:
        if bucket.index() == 0:
            sizes.clear()
        sizes.append(bucket.buffer().numel())
        return batched_powerSGD_hook(state, bucket)

    expected = training(linear_stack(), worker, None, STEPS)
    full, state = (state_for(None, rank, start_powerSGD_iter=2) for rank in (1000, RANK))
    got = train(linear_stack(), worker, full, STEPS)
    assert max(step_differences(got, expected)) <= LIMIT
    check_same(flat(averages) for averages in got)
    found = train(linear_stack(), worker, state, range(20), hook=noting)
    check_same(found[-1].values())
    assert len(sizes) > 1
    shapes = {f"bucket {i}": (n // (math.isqrt(n - 1) + 1), math.isqrt(n - 1) + 1) for i, n in enumerate(sizes)}
    assert {name: tuple(error.shape) for name, error in state.error().items()} == shapes
    sent = sum(n + RANK * sum(shape) - math.prod(shape) for n, shape in zip(sizes, shapes.values(), strict=True))
    assert state.compression_stats()[1:] == (18 * sum(sizes), 18 * sent)
    loaded = state_for(None, RANK, start_powerSGD_iter=2)
    loaded.load_state_dict(state.state_dict())
    assert_equal_states(state.state_dict(), loaded.state_dict())


def buckets_that_may_change(worker: int, world_size: int) -> None:
    """The batched hook refuses ranks of parameters, and to start before DDP's buckets stay. It notices other ones.

    What a bucket has not sent comes to its parameters in a new wrapper too, whose first buckets are others.
    """
    model = linear_stack()
    exact = {name: torch.zeros_like(parameter).double() for name, parameter in model.named_parameters()}

    def add_exact(step: int) -> None:
        inputs, targets = batch(worker, step)
        gradients = torch.autograd.grad(squared_error(model(inputs), targets), [*model.parameters()])
        for gradient, given in zip(gradients, exact.values(), strict=True):
            given += total(gradient) / world_size

    low, full, other = (state_for(model, rank, start_powerSGD_iter=2) for rank in (1, 1000, 1))
    train(model, worker, low, range(2))
    found = train(model, worker, low, range(2, 6), before_step=add_exact)
    full.load_state_dict(low.state_dict())
    found += train(model, worker, full, range(6, 10), before_step=add_exact)
    for name, expected in exact.items():
        assert relative(torch.stack([averages[name] for averages in found]).sum(0), expected) < LIMIT
    other.load_state_dict(full.state_dict())
    # It is saved again before a step.
    other.load_state_dict(other.state_dict())
    assert "has no matrix named" in complaint(training, model, worker, other, range(10, 11))
    # The DDP model is taken as module= too.
    by_function = PowerSGDState(None, lambda *_: 2, 2, module=DistributedDataParallel(model))
    for state, parts in (
        (state_for(None, 1), ("ValueError", "start_powerSGD_iter must be at least 2; got 0")),
        (by_function, ("batched_powerSGD_hook has one matrix a bucket",)),
        (low, ("RuntimeError", "the same model and bucket_cap_mb")),
    ):
        said = complaint(train, model, worker, state, range(10, 14), cap=ONE)
        assert all(part in said for part in parts), said


test_on_two_workers = make_test([one_matrix_a_bucket, buckets_that_may_change], 2)
