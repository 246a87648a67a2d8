"""Local steps of a plain module: what they are equal to, what is conserved, and what is refused."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.comm.agreement import DisagreementError
from powersgd_triton.integrations.ddp import PowerSGDState
from powersgd_triton.integrations.local_steps import LocalSteps
from powersgd_triton.integrations.local_steps.replica import Outer
from tests.support.distributed import outcome, run, run_cases
from tests.support.local_steps import CONFIGS, TERNARY, backward, flat, mean, model, owed, theta

STEPS, EVERY = 12, 4
RATE = 0.1


def with_local_steps(
    worker: int, config: PowerSGDConfig | None, every: int, outer: Outer | None = None, **options: Any
) -> tuple[LocalSteps, nn.Module, Tensor]:
    """Train; return also the sum of all that this worker has changed."""
    net = model(worker)
    sync = LocalSteps(net, config, every, outer, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
    changed = torch.zeros_like(flat(net))
    for step in range(STEPS):
        backward(net, worker, step)
        before = flat(net)
        optimizer.step()
        changed += before - flat(net)
        sync.step()
    return sync, net, changed


def equals_ddp(worker: int, _world_size: int) -> float:
    net = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for step in range(STEPS):
        backward(net, worker, step)
        optimizer.step()
    other = model(worker)
    sync = LocalSteps(other, None, every=1)
    optimizer = torch.optim.SGD(other.parameters(), lr=RATE)
    for step in range(STEPS):
        backward(other, worker, step)
        optimizer.step()
        sync.step()
    return float((flat(net) - flat(other)).abs().max())


def equals_averaging(worker: int, _world_size: int) -> float:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
    for step in range(STEPS):
        backward(net, worker, step)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            for parameter in net.parameters():
                parameter.data = mean(parameter.data)
    _, other, _ = with_local_steps(worker, None, EVERY)
    return float((flat(net) - flat(other)).abs().max())


def equals_diloco(worker: int, _world_size: int) -> float:
    net = model()
    shared = copy.deepcopy(net)
    inner = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        backward(net, worker, step)
        inner.step()
        if (step + 1) % EVERY == 0:
            for ours, local in zip(shared.parameters(), net.parameters(), strict=True):
                ours.grad = mean(ours.data - local.data)
            outer.step()
            net.load_state_dict(shared.state_dict())
    nesterov = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    _, other, _ = with_local_steps(worker, None, EVERY, nesterov)
    return float((flat(net) - flat(other)).abs().max())


def conserves(worker: int, world_size: int) -> dict[str, tuple[float, bool]]:
    """{configuration and delay: (what is missing of all changes, whether all workers have the same bits)}."""
    found = {}
    for name, config in CONFIGS.items():
        for delay in (0, 1, 3):
            sync, net, changed = with_local_steps(worker, config, EVERY, delay=delay)
            sync.finish()
            shared = theta(sync)
            arrived = flat(model()) - shared
            missing = float((mean(changed) - arrived - mean(owed(sync))).abs().max())
            everyone = [torch.empty_like(shared) for _ in range(world_size)]
            dist.all_gather(everyone, shared)
            same = all(torch.equal(shared, other) for other in [*everyone, flat(net)])
            found[f"{name}, delay {delay}"] = missing, same
    return found


def averages_buffers(worker: int, _world_size: int) -> tuple[list[float], int]:
    norm: Any = nn.BatchNorm1d(3)
    net = nn.Sequential(nn.Linear(3, 3), norm)
    sync = LocalSteps(net, TERNARY, every=2)
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(2):
        net(torch.randn(4, 3, generator=torch.Generator().manual_seed(worker + 10 * step))).sum().backward()
        optimizer.step()
        if step == 1:
            expected = mean(norm.running_mean)
        sync.step()
    return (norm.running_mean - expected).tolist(), int(norm.num_batches_tracked)


def averages_states(worker: int, _world_size: int) -> bool:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    sync = LocalSteps(net, TERNARY, every=1, optimizer=optimizer)
    backward(net, worker, 0)
    optimizer.step()
    first = next(net.parameters())
    expected = mean(optimizer.state[first]["exp_avg"])
    sync.step()
    return torch.allclose(optimizer.state[first]["exp_avg"], expected)


def goes_on_after_nan(worker: int, world_size: int) -> dict[str, tuple[bool, float]]:
    """The last worker's parameters become NaN in the first round: its changes are lost, and no others."""
    found = {}
    for name, delay in (("ternary", 0), ("ternary", 2), ("rank", 0), ("exact", 1)):
        net = model()
        sync = LocalSteps(net, CONFIGS[name], EVERY, delay=delay)
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        changed = torch.zeros_like(flat(net))
        for step in range(STEPS):
            backward(net, worker, step)
            before = flat(net)
            optimizer.step()
            changed += before - flat(net)
            if step == 1 and worker == world_size - 1:
                next(net.parameters()).data[0, 0] = torch.nan
            if step == EVERY - 1 and worker == world_size - 1:
                changed.zero_()
            sync.step()
        sync.finish()
        missing = mean(changed) - (flat(model()) - theta(sync)) - mean(owed(sync))
        found[f"{name}, delay {delay}"] = bool(flat(net).isfinite().all()), float(missing.abs().max())
    return found


def refuses(worker: int, _world_size: int) -> list[str]:
    """What each worker hears if worker 0 alone is wrong, and if all are."""

    def attempt(**options: Any) -> str:
        try:
            LocalSteps(options.pop("model", model()), options.pop("config", TERNARY), **options)
        except (TypeError, ValueError, DisagreementError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    first = worker == 0
    texts = [
        attempt(every=0 if first else 4),
        attempt(every=5 if first else 4),
        attempt(every=4, delay=4),
        attempt(every=4, outer=(lambda _: 3) if first else None),
        attempt(every=4, config=PowerSGDConfig(codes="int4") if first else TERNARY),
        attempt(every=4, config=PowerSGDConfig(compression="auto")),
        attempt(every=4, config=PowerSGDConfig(compression=20, max_overhead=0.1)),
        attempt(every=4, model=nn.Linear(2, 3 if first else 4)),
        attempt(every=4, model=nn.ReLU()),
        attempt(every=4, config={"rank": 4}),
    ]
    # All can go on.
    with_local_steps(worker, TERNARY, EVERY)
    return texts


def takes_two_levels(worker: int, world_size: int) -> dict[str, tuple[float, bool]]:
    mesh = init_device_mesh("cpu", (world_size // 2, 2))
    found = {}
    for name in ("ternary", "rank"):
        sync, net, changed = with_local_steps(worker, CONFIGS[name], EVERY, node_group=mesh)
        shared = flat(net)
        everyone = [torch.empty_like(shared) for _ in range(world_size)]
        dist.all_gather(everyone, shared)
        missing = mean(changed) - (flat(model()) - shared) - mean(owed(sync))
        found[name] = float(missing.abs().max()), all(torch.equal(shared, other) for other in everyone)
    return found


@functools.cache
def results(workers: int) -> dict[str, list[Any]]:
    cases = [equals_ddp, equals_averaging, equals_diloco, conserves, averages_buffers, averages_states]
    return run_cases([*cases, goes_on_after_nan, refuses], workers)


both = pytest.mark.parametrize("workers", [2, 3])


@both
@pytest.mark.parametrize("case", [equals_ddp, equals_averaging, equals_diloco], ids=lambda case: case.__name__)
def test_exact_messages(workers: int, case: Any):
    assert max(outcome(results(workers), case)) <= 1e-5


@both
def test_nothing_is_lost_and_all_workers_have_the_same_bits(workers: int):
    for found in outcome(results(workers), conserves):
        assert {name for name, (_, same) in found.items() if not same} == set()
        assert {name: missing for name, (missing, _) in found.items() if missing > 3e-6} == {}


@both
def test_buffers_are_averaged_exactly(workers: int):
    for differences, batches in outcome(results(workers), averages_buffers):
        assert max(map(abs, differences)) < 1e-7
        assert batches == 2


@both
def test_states_of_an_optimizer_are_averaged_on_request(workers: int):
    assert all(outcome(results(workers), averages_states))


@both
def test_a_worker_that_is_not_finite_goes_on_from_the_shared_parameters(workers: int):
    for found in outcome(results(workers), goes_on_after_nan):
        assert all(finite and missing < 3e-6 for finite, missing in found.values()), found


@both
def test_bad_arguments_are_errors_on_all_workers(workers: int):
    expected = [
        "ValueError.*every must be at least 1; got 0",
        "DisagreementError.*every: 5 instead of 4|DisagreementError.*every: 4 instead of 5",
        "ValueError.*delay must be below every=4",
        "outer must return a torch.optim.Optimizer; got int",
        "DisagreementError.*config.codes",
        "ValueError.*compression='auto' compares a step",
        "ValueError.*max_overhead is a share of a step",
        "DisagreementError.*shape of 'bias'",
        "ValueError.*no parameters that require gradients",
        "TypeError.*config must be a PowerSGDConfig or None; got dict",
    ]
    for texts in outcome(results(workers), refuses):
        for text, pattern in zip(texts, expected, strict=True):
            assert re.search(pattern, text, re.DOTALL), (pattern, text)


def test_two_levels():
    for found in run(takes_two_levels, 4):
        assert all(same and missing < 3e-6 for missing, same in found.values()), found


def test_one_worker():
    net = model()
    start = flat(net)
    sync = LocalSteps(net, TERNARY, every=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for step in range(4):
        backward(net, 0, step)
        optimizer.step()
        sync.step()
    assert not torch.equal(flat(net), start)
    assert sync.iteration == 2
    assert "An exchange comes every 2 steps" in str(sync.report())
    with pytest.raises(TypeError, match="have no loss scale"):
        sync.attach(torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Compressor(TERNARY, {"w": (4, 4)}),
        lambda: PowerSGDState(TERNARY, process_group=None),
    ],
)
def test_codes_are_for_local_steps_only(make: Any):
    with pytest.raises(ValueError, match="codes are for local steps"):
        make()


@pytest.mark.parametrize("field", [{"rank": 4}, {"compression": 20}, {"bytes_per_step": 1000}, {"wire_dtype": "int4"}])
def test_codes_stand_alone(field: dict[str, Any]):
    with pytest.raises(ValueError, match=f"{next(iter(field))} has no use beside them"):
        PowerSGDConfig(codes="int4", **field)
    with pytest.raises(ValueError, match="codes must be None or one of ternary, int2, int4, int8; got 'int3'"):
        PowerSGDConfig(codes="int3")
