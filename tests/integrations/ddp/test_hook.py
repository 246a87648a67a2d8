"""What only DDP's hook has, beside the table: collectives, torch's wrappers, ways to use DDP."""

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.comm.control import Control
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.balance import Ledger, check_same
from tests.support.checks import random_states
from tests.support.distributed import make_test
from tests.support.sharded_training import Net, loss_of
from tests.support.sharded_training import batch as token_batch
from tests.support.training import (
    LIMIT,
    MANY,
    WIDTH,
    Gradients,
    batch,
    complaint,
    flat,
    gradients_of,
    hooked,
    linear_stack,
    local_gradients,
    relative,
    squared_error,
    state_for,
    step_differences,
    total,
    training,
)
from tests.support.wrappers import Wrapped

STEPS, RANK, SCALE = range(4), 2, 8.0


def check_averages(replica: Any, own: Gradients, allowed: float, dtype: torch.dtype = torch.float32) -> None:
    """That averages of some steps are the means of the workers' own gradients."""
    for step in range(3):
        replica.zero_grad()
        inputs, targets = batch(dist.get_rank(), step)
        # fp16's smallest normal number is 6e-5: keep the elements of the gradients above it.
        (64 * squared_error(replica(inputs.to(dtype)).double(), targets)).backward()
        for name, gradient in gradients_of(replica.module).items():
            assert relative(gradient, total(own[name]) / dist.get_world_size()) <= allowed, (dtype, step, name)


COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "broadcast", "reduce", "barrier", "send", "recv",
    "isend", "irecv", "gather", "scatter",
)  # fmt: skip


def collectives(worker: int, world_size: int) -> None:
    """Two all-reduces a bucket, issued in the hook, and nothing else; no global random state is touched."""
    inside: list[int] = []
    calls: list[str] = []
    seen: list[int] = []

    def hook(state, bucket):
        def in_place(future: Any) -> Tensor:
            # torch's optimizer in the hook reads averages from the bucket.
            averages: Tensor = future.value()[0] if isinstance(future.value(), list) else future.value()
            assert averages.data_ptr() == bucket.buffer().data_ptr()
            return averages

        inside.append(threading.get_ident())
        seen.append(bucket.buffer().numel())
        try:
            return powerSGD_hook(state, bucket).then(in_place)
        finally:
            inside.pop()

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name if inside == [threading.get_ident()] else f"{name} outside of the hook")
            return original(*args, **kwargs)

        return call

    model = linear_stack()
    state = state_for(model, RANK, error_dtype=torch.bfloat16)
    replica = hooked(model, state, hook, bucket_cap_mb=MANY)
    before = random_states()
    with contextlib.ExitStack() as stacked:
        for name in COLLECTIVES:
            stacked.enter_context(mock.patch.object(dist, name, noting(name, getattr(dist, name))))
        stacked.enter_context(mock.patch.object(Control, "start_gather", noting("gather", Control.start_gather)))
        for step in STEPS:
            inputs, targets = batch(worker, step)
            calls.clear()
            seen.clear()
            squared_error(replica(inputs), targets).backward()
            assert sum(seen) == 6 * (WIDTH**2 + WIDTH)
            # Before a new bucket the workers compare it, and whether its memory is there. DDP builds new buckets for
            # the second step.
            expected = ["all_reduce"] * (2 * len(seen)) + ["gather"] * (2 * len(seen) * (step < 2))
            assert sorted(calls) == (expected if world_size > 1 else [])
    assert random_states() == before
    assert {error.dtype for error in state.error().values()} == {torch.bfloat16}
    assert {parts["error"].dtype for parts in state.state_dict()["matrices"].values()} == {torch.float32}


def groups(worker: int, world_size: int) -> None:
    """The state averages over the group that was set last, before the first step or between steps."""
    made = [dist.new_group(range(world_size)) for _ in range(2)]
    model, used = linear_stack(), []
    state, original = state_for(model, WIDTH), dist.all_reduce

    def assign(step: int) -> None:
        if step in (0, 2):
            state.process_group = made[step // 2]

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        used.append(made.index(kwargs["group"]))
        return original(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", noting):
        got = training(model, worker, state, STEPS, before_step=assign)
    expected = training(linear_stack(), worker, None, STEPS)
    assert max(step_differences(got, expected)) <= LIMIT
    check_same(flat(gradients) for gradients in got)
    assert used == sorted(used)
    assert set(used) == {0, 1}
    # One worker alone. The other one is told that it is not in the group.
    alone = dist.new_group([0])
    assert ("not a member" in complaint(PowerSGDState, alone, module=linear_stack())) == (worker == 1)


def dtypes(worker: int, world_size: int) -> None:
    """Gradients of other float dtypes, and rounded by torch's wrapper, are exact but for their own rounding."""
    rounding_hook = fp16_compress_wrapper(powerSGD_hook)
    for dtype, hook, wire in (
        (torch.bfloat16, powerSGD_hook, torch.bfloat16),
        (torch.float64, powerSGD_hook, torch.float64),
        (torch.float32, rounding_hook, torch.float16),
    ):
        model = linear_stack(3).to(dtype)
        own = local_gradients(model)
        replica = hooked(model, state_for(model, WIDTH), hook, bucket_cap_mb=MANY)
        # Rounded before and after; the workers' gradients may cancel.
        allowed = 2 * torch.finfo(wire).eps + 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        check_averages(replica, own, allowed, dtype)


def two_dtypes_in_a_static_graph(worker: int, world_size: int) -> None:
    """In the first step, DDP says of the buckets of both dtypes that they are the first one. Both are averaged.

    Also if the model is wrapped anew.
    """
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()])
    model.forward = lambda x: model[0](x) + model[1](x.double())
    own, state = local_gradients(model), state_for(model, WIDTH)
    for _ in range(2):
        calls = itertools.count(1)

        def hook(state, bucket, calls=calls):
            future = powerSGD_hook(state, bucket)
            # Otherwise DDP would wait for ever.
            assert next(calls) != 2 or future.done()
            return future

        check_averages(hooked(model, state, hook, static_graph=True), own, LIMIT)


def uneven_inputs(worker: int, world_size: int) -> None:
    """Join: worker 1 has two steps more than worker 0."""
    steps = range(3 + 2 * worker)
    expected = training(linear_stack(), worker, None, steps, uneven=True)
    for rank in (WIDTH, RANK):
        model = linear_stack()
        got = training(model, worker, state_for(model, rank), steps, uneven=True)
        assert all(flat(gradients).isfinite().all() for gradients in got)
        if rank == WIDTH:
            assert max(step_differences(got, expected)) <= LIMIT
        check_same(model.parameters())


class Unused(Wrapped):
    """DDP whose model is called twice before the backward pass, with a loss scale."""

    zeroed = False

    def step(self, batches: Any, **_options: Any) -> None:
        self.optimizer.zero_grad(set_to_none=not self.zeroed)
        (given,) = batches
        self.module(given[0])
        (SCALE * loss_of(self.module, given)).backward()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= SCALE
        self.optimizer.step()


def unused(worker: int, world_size: int) -> None:
    """The error keeps what DDP discards: the average of a parameter that no worker used, which has no gradient."""
    # Each pair of these.
    for view, zeroed in itertools.product((False, True), (False, True)):
        quantize = None if view == zeroed else "int4"
        fields: dict[str, Any] = {"rank": 1, "algorithm": "alternating" if view else "standard"}
        config = PowerSGDConfig(min_compression_rate=0, **({"quantize": quantize} if quantize else fields))
        net = Net()
        model = Unused(net, config, find_unused_parameters=True, gradient_as_bucket_view=view)
        model.zeroed = zeroed
        assert attach(model.module, loss_scale=lambda: SCALE) is model.state
        ledger = Ledger(model)
        for step in range(6):
            net.use = step % 3 == 0 or (step % 3 == 1 and worker == 0)
            ledger.step([token_batch(worker, step)])
            assert (net.sometimes.weight.grad is None) == (step % 3 == 2 and not zeroed)
        ledger.check()
    for config in (PowerSGDConfig(rank=1, min_compression_rate=0), PowerSGDConfig(quantize="int4")):
        # In a static graph, no step uses it. Its error is of a run in which all did.
        before = Wrapped(Net(), config)
        before.step([token_batch(worker, 0)])
        before.net.use = False
        static = Wrapped(before.net, config, static_graph=True)
        static.state.load_state_dict(before.state.state_dict())
        ledger = Ledger(static)
        ledger.train(range(1, 5))
        ledger.check()


test_on_two_workers = make_test([collectives, groups, dtypes, two_dtypes_in_a_static_graph, uneven_inputs, unused], 2)


@pytest.mark.usefixtures("one_worker")
def test_one_worker_sends_nothing() -> None:
    collectives(0, 1)
