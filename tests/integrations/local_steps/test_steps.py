"""Local steps of a plain module: what they are equal to, what is conserved, and what is refused."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.distributed import outcome, run, run_cases
from tests.support.local_steps import (
    CONFIGS,
    NESTEROV,
    TERNARY,
    WITH_MOMENTUM,
    Training,
    backward,
    flat,
    mean,
    model,
    theta,
)
from tests.support.small import complaint

STEPS, EVERY = 12, 4


def equals_averaging_and_diloco(worker: int, _world_size: int) -> None:
    """Exact messages are averaging of parameters, or DiLoCo with an outer optimizer."""
    for outer in (None, NESTEROV):
        net = model()
        shared = copy.deepcopy(net)
        start = flat(net)
        inner = WITH_MOMENTUM(net.parameters())
        updates = (outer or functools.partial(torch.optim.SGD, lr=1.0))(shared.parameters())
        for step in range(STEPS):
            backward(net, worker, step)
            inner.step()
            if (step + 1) % EVERY == 0:
                for ours, local in zip(shared.parameters(), net.parameters(), strict=True):
                    ours.grad = mean(ours.data - local.data)
                updates.step()
                net.load_state_dict(shared.state_dict())
        training = Training(worker, "exact", EVERY, optimizer=WITH_MOMENTUM, outer=outer)
        assert torch.equal(training.start, start)
        training.train(STEPS)
        assert (flat(net) - flat(training.net)).abs().max() <= 1e-5 < 0.01 < (flat(net) - start).abs().max()


PAIRS = [*itertools.product(CONFIGS, (0, 1, 3))]
"""Messages and delays."""
FEW = [("exact", 1), ("ternary", 0), ("ternary", 3), ("int2", 1), ("int4", 3), ("int8", 0)]
FEW += [("rank", 0), ("rank", 3), ("budget", 1), ("alternating", 0), ("alternating", 3)]


def conserves(worker: int, world_size: int) -> None:
    """Nothing is lost, and all workers have the same bits."""
    for config, delay in FEW if world_size == 2 else PAIRS:
        training = Training(worker, config, EVERY, optimizer=WITH_MOMENTUM, delay=delay)
        training.train(STEPS)
        assert training.sync.iteration == 3 - (delay > 0), (config, delay)
        training.finish()
        assert training.sync.iteration == 3, (config, delay)


def averages_buffers(worker: int, _world_size: int) -> None:
    """Exactly, whatever is done with differences. So are an optimizer's states on request."""
    norm: Any = nn.BatchNorm1d(3)
    net = nn.Sequential(nn.Linear(3, 3), norm)
    optimizer = torch.optim.Adam(net.parameters())
    sync = LocalSteps(net, TERNARY, every=2, optimizer=optimizer)
    for step in range(2):
        net(torch.randn(4, 3, generator=torch.Generator().manual_seed(worker + 10 * step))).square().sum().backward()
        optimizer.step()
        if step == 1:
            averages = [optimizer.state[p]["exp_avg"] for p in net.parameters()]
            found = [norm.running_mean, norm.running_var, *averages]
            own = [tensor.clone() for tensor in found]
            expected = [mean(tensor) for tensor in found]
        sync.step()
    for average, exact, before in zip(found, expected, own, strict=True):
        assert (average - exact).abs().max() <= 1e-6 * exact.abs().max()
        assert not torch.equal(average, before)
    assert int(norm.num_batches_tracked) == 2


def goes_on_after_nan(worker: int, world_size: int) -> None:
    """The last worker's parameters become NaN in the first round: its changes are lost, and no others."""
    for config, delay in (("ternary", 0), ("ternary", 2), ("rank", 0), ("exact", 1)):
        training = Training(worker, config, EVERY, delay=delay)
        training.train(1)
        if worker == world_size - 1:
            next(training.net.parameters()).data[0, 0] = torch.nan
        training.train(EVERY - 1)
        if worker == world_size - 1:
            training.changed.zero_()
        training.train(STEPS - EVERY)
        training.finish()
        assert flat(training.net).isfinite().all(), (config, delay)


REFUSED: list[tuple[Callable[[bool], dict[str, Any]], str]] = [
    (lambda first: {"every": 0 if first else 4}, "ValueError.*every must be at least 1; got 0"),
    (lambda first: {"every": 5 if first else 4}, "DisagreementError.*every: (5 instead of 4|4 instead of 5)"),
    (lambda _: {"delay": 4}, "ValueError.*delay must be below every=4"),
    (lambda first: {"outer": (lambda _: 3) if first else None}, "must return a torch.optim.Optimizer; got int"),
    (lambda first: {"config": PowerSGDConfig(codes="int4") if first else TERNARY}, "DisagreementError.*config.codes"),
    (lambda _: {"config": PowerSGDConfig(compression="auto")}, "ValueError.*compression='auto' compares a step"),
    (
        lambda _: {"config": PowerSGDConfig(compression=20, max_overhead=0.1)},
        "ValueError.*max_overhead is a share of a step",
    ),
    (lambda first: {"model": nn.Linear(2, 3 if first else 4)}, "DisagreementError.*shape of 'bias'"),
    (lambda _: {"model": nn.ReLU()}, "ValueError.*no parameters that require gradients"),
    (lambda _: {"config": {"rank": 4}}, "TypeError.*config must be a PowerSGDConfig or None; got dict"),
]
"""Arguments of the first worker (True) and of others, and what all hear."""


def refuses(worker: int, _world_size: int) -> None:
    for arguments, pattern in REFUSED:
        said = complaint(LocalSteps, **{"model": model(), "config": TERNARY, "every": 4, **arguments(worker == 0)})
        assert re.search(pattern, said, re.DOTALL), (pattern, said)
    # All can go on.
    Training(worker).train(3)


def takes_two_levels(worker: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size // 2, 2))
    for config in ("ternary", "rank"):
        training = Training(worker, config, EVERY, node_group=mesh)
        training.train(2 * EVERY)
        assert training.sync._engine.communicator.inside is not None
        training.finish()


CASES = [equals_averaging_and_diloco, conserves, averages_buffers, goes_on_after_nan, refuses]


@functools.cache
def results(workers: int) -> dict[str, list[Any]]:
    return run_cases(CASES, workers)


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_workers(case: Any, workers: int) -> None:
    outcome(results(workers), case)


def test_two_levels() -> None:
    run(takes_two_levels, 4)


def test_one_worker() -> None:
    assert not dist.is_initialized()
    training = Training(0)
    training.train(6)
    assert not torch.equal(flat(training.net), training.start)
    assert torch.equal(flat(training.net), theta(training.sync))
    assert training.sync.iteration == 2
    assert "An exchange comes every 3 steps" in str(training.sync.report())
    with pytest.raises(TypeError, match="have no loss scale"):
        training.sync.attach(torch.amp.GradScaler("cpu"))


def test_codes_are_for_local_steps_only_and_stand_alone() -> None:
    for make in (
        lambda: Compressor(TERNARY, {"w": (4, 4)}),
        lambda: PowerSGDState(TERNARY, process_group=None),
    ):
        with pytest.raises(ValueError, match="codes are for local steps"):
            make()
    for field in ({"rank": 4}, {"compression": 20}, {"bytes_per_step": 1000}, {"wire_dtype": "int4"}):
        with pytest.raises(ValueError, match=f"{next(iter(field))} has no use beside them"):
            PowerSGDConfig(codes="int4", **field)
    with pytest.raises(ValueError, match="codes must be None or one of ternary, int2, int4, int8; got 'int3'"):
        PowerSGDConfig(codes="int3")
