"""What goes wrong on one worker, or at an odd time: all hear of it, nothing is lost, and training goes on."""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from powersgd_triton.comm import communicator
from powersgd_triton.comm.agreement import DisagreementError
from powersgd_triton.core import schedule
from powersgd_triton.integrations.local_steps import LocalSteps, pending_exchange
from tests.support.distributed import folder, outcome, run, run_cases
from tests.support.local_steps import (
    CONFIGS,
    LOST,
    NESTEROV,
    TERNARY,
    Training,
    backward,
    flat,
    mean,
    model,
    owed,
    same_bits,
    theta,
)
from tests.support.small import logged, warnings

EVERY = 3
FAILING = (("rank", 0), ("int8 factors", 2), ("alternating", 0), ("ternary", 0))


def raises_in_telemetry(worker: int, _world_size: int) -> None:
    """An exception of a user's function after the exchange does not undo it."""
    for config in ("ternary", "rank"):
        training = Training(worker, config)
        told: list[int] = []

        def callback(_record: object, told: list[int] = told) -> None:
            told.append(1)
            raise KeyError("a user's mistake")

        if worker == 0:
            training.sync.telemetry(callback, every=2)
        for _ in range(4):
            try:
                training.train(EVERY)
            except KeyError:
                training.sync.telemetry(every=0)
        assert len(told) == (worker == 0)
        assert training.sync.since == 0
        training.check()


def saves_after_a_failure(worker: int, _world_size: int) -> None:
    """A state that is saved after a failed exchange has the mean of the workers' errors."""
    training = Training(worker, "rank")
    training.train(EVERY)
    with (
        mock.patch.object(training.sync._engine, "advance", side_effect=RuntimeError("injected")),
        pytest.raises(RuntimeError, match="injected"),
    ):
        training.train(EVERY)
    expected = mean(owed(training.sync))
    saved = training.sync.state_dict()["matrices"]
    found = [
        saved[name]["error"].reshape(-1) if saved[name].get("error", torch.zeros(1)).numel() > 1 else 0 * t.reshape(-1)
        for name, t in training.sync.shared().items()
    ]
    assert expected.any()
    assert (torch.cat(found) - expected).abs().max() < 1e-7
    training.train(2 * EVERY)
    training.check()


def fails_anywhere(worker: int, _world_size: int, configs: Any = FAILING, levels: bool = False) -> None:
    """Whichever message of several fragments fails: nothing is lost, and the next exchange sends what this has not."""
    mesh = init_device_mesh("cpu", (2, 2)) if levels else None
    for config, delay in configs:
        training = Training(worker, config, EVERY, delay=delay, node_group=mesh)
        training.train(EVERY)
        for last in itertools.count(1):
            training.train(EVERY - training.sync.since - 1)
            training.sync._advance(finish=True)
            kept, waits, failures = owed(training.sync), itertools.count(1), []

            def wait(work: Any, last: int = last, waits: Any = waits) -> None:
                communicator.wait(work)
                if next(waits) == last:
                    raise RuntimeError("injected")

            # The smallest one has each tensor in a fragment of its own.
            with (
                mock.patch.object(pending_exchange, "FRAGMENT", 50 if last % 2 else 200),
                mock.patch.object(schedule, "wait", wait),
            ):
                try:
                    training.train(1 + delay)
                    training.sync._advance(finish=True)
                except RuntimeError as failure:
                    failures.append(str(failure))
            training.check()
            if not failures:
                break
            assert failures == ["injected"]
            assert training.sync.since >= EVERY
            # On two levels, rows of the errors may have moved to another worker of the node.
            changed = mean(kept - owed(training.sync)) if levels else kept - owed(training.sync)
            assert float(changed.abs().max()) < LOST, (config, last)
            training.train(1)
        assert last > 2, "no message has failed"
        training.finish()


def saves_what_is_not_finite(worker: int, _world_size: int) -> None:
    """A worker that is not finite saves the shared parameters."""
    with folder(worker) as path:
        training = Training(worker)
        training.train(EVERY + 1)
        if worker == 0:
            next(training.net.parameters()).data[0, 0] = torch.nan
        training.sync.save(path)
        training.sync.load(path)
        training.train(EVERY)
    assert flat(training.net).isfinite().all()
    assert same_bits(theta(training.sync))


def freezes(worker: int, _world_size: int) -> None:
    """A parameter may be frozen for a time."""
    training = Training(worker)
    training.train(EVERY)
    first = next(training.net.parameters())
    first.requires_grad_(False)
    training.train(EVERY)
    first.requires_grad_(True)
    training.train(EVERY)
    training.check()


def differs_in_states(worker: int, _world_size: int) -> None:
    """Optimizers whose states differ in number are refused."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    sync = LocalSteps(net, TERNARY, 1, optimizer=optimizer)
    backward(net, worker, 0)
    if worker == 1:
        next(net.parameters()).grad = None
    optimizer.step()
    with pytest.raises(DisagreementError, match="shapes of the optimizer's states"):
        sync.step()


def averages_buffers_that_are_finite(worker: int, world_size: int) -> None:
    """A NaN in a buffer stays on its worker only. Nothing of a mask is sent, which does not change."""
    norm: Any = nn.BatchNorm1d(3)
    norm.register_buffer("mask", torch.ones(500, dtype=torch.bool))
    norm.register_buffer("least", torch.full((2,), -torch.inf))
    sync = LocalSteps(norm, TERNARY, 1)
    norm.running_mean.fill_(worker + 1.0)
    if worker == world_size - 1:
        norm.running_mean[0] = torch.nan
    before = sync._engine.sent
    sync.step()
    assert norm.running_mean.tolist() == [1.0, 1.0, 1.0]
    assert sync._engine.sent - before < 500


def finishes_unevenly(worker: int, _world_size: int) -> None:
    """``finish`` takes different numbers of steps."""
    training = Training(worker, every=4)
    training.train(4 + worker)
    training.finish()
    iteration = training.sync.iteration
    training.sync.finish()
    assert training.sync.iteration == iteration == 2


def grows(worker: int, _world_size: int) -> None:
    """Rounds may grow: exchanges after 3 and 9 steps, and the last one."""
    training = Training(worker, delay=2, every=lambda steps: 3 + steps)
    training.train(14)
    training.finish()
    assert training.sync.iteration == 3


def forgets(worker: int, _world_size: int) -> None:
    """``forget`` begins anew."""
    training = Training(worker, outer=NESTEROV, delay=1)
    training.train(EVERY + 2)
    assert owed(training.sync).any()
    assert training.sync.outer.state
    training.sync.forget()
    assert same_bits(theta(training.sync))
    assert torch.equal(flat(training.net), theta(training.sync))
    assert not owed(training.sync).any()
    assert not training.sync.outer.state
    assert training.sync.since == 0


def loads_another_outer(worker: int, _world_size: int) -> None:
    """A state of another outer optimizer is refused, and nothing has changed."""
    training, other = Training(worker, outer=lambda p: torch.optim.Adam(p, lr=0.01)), Training(worker)
    training.train(EVERY)
    other.train(EVERY + 1)
    before = flat(other.net)
    with pytest.raises(ValueError, match="another outer optimizer"):
        other.sync.load_state_dict(training.sync.state_dict())
    assert torch.equal(before, flat(other.net))
    other.train(EVERY)
    other.check()


def loads_the_other_kind(worker: int, _world_size: int) -> None:
    """Codes and factors load each other's states, in the middle of a round and of an exchange under way."""
    for saves, loads in (("ternary", "rank"), ("rank", "ternary"), ("int4", "exact")):
        first, second = Training(worker, saves), Training(worker, loads, delay=2)
        first.train(EVERY + 1)
        second.train(EVERY + 1)
        report = second.sync.load_state_dict(first.sync.state_dict())
        assert report.loaded or report.carried
        second.start, second.changed = first.start, first.changed.clone()
        second.train(2 * EVERY)
        second.finish()


def loads_a_folder_of_two_numbers_of_workers(worker: int, _world_size: int, path: str, known: bool) -> None:
    training = Training(worker)
    if known:
        training.sync.load(path)
        assert training.sync.steps % (EVERY + 1) == 0 < training.sync.steps
    training.train(EVERY + 1)
    training.sync.save(path)


def fails_in_fragments(worker: int, _world_size: int) -> None:
    """FSDP2: the second of several fragments fails on all workers; later exchanges must not lose others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    across = mesh["replicate"].get_group()
    net = model()
    for layer in net:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    sync = LocalSteps(net, TERNARY, 6, group=across, delay=5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    failed = 0
    for step in range(18):
        backward(net, worker // 2, step)
        optimizer.step()
        engine = sync._engine
        advance = functools.partial(type(engine)._advance_older, engine)
        # Only its first call in this step.
        effects = [RuntimeError("injected"), *[mock.DEFAULT] * 20] if step == 7 else None
        with mock.patch.object(engine, "_advance_older", wraps=advance, side_effect=effects):
            try:
                sync.step()
            except RuntimeError:
                failed += 1
    sync.finish()
    assert failed == 1
    assert same_bits(theta(sync), across)


def fails_on_one_shard(worker: int, _world_size: int) -> None:
    """FSDP2: the exchange of one shard fails. The other shard hears of it at the end, and both send their changes again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    across = mesh["replicate"].get_group()
    for config in ("ternary", "rank"):
        net = fully_shard(model(), mesh=mesh["shard"])
        sync = LocalSteps(net, CONFIGS[config], 1, group=across)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        start, changed = theta(sync), 0 * theta(sync)

        def local(sync: LocalSteps = sync) -> Tensor:
            return torch.cat([tensor.reshape(-1).clone() for _, tensor in sync._outer.local.tensors()])

        for step in range(4):
            backward(net, worker, step)
            before = local()
            optimizer.step()
            changed += before - local()
            effects = [*[mock.DEFAULT] * (step - 1), RuntimeError("injected")] if step and worker % 2 == 0 else None
            with mock.patch.object(schedule, "wait", wraps=communicator.wait, side_effect=effects):
                try:
                    sync.step()
                except RuntimeError as failure:
                    assert "injected" in str(failure)
            assert sync.since == step
            lost = mean(changed + local() - owed(sync), across) - start
            assert float(lost.abs().max()) < LOST, (config, step)
        sync.finish()
        assert same_bits(theta(sync), across)
        assert float((mean(changed - owed(sync), across) - start + theta(sync)).abs().max()) < LOST


def survives(worker: int, _world_size: int, config: str, delay: int) -> None:
    """A peer is gone when the others exchange: the survivor is told, loses nothing, and goes on."""
    every = 4
    training = Training(worker, config, every, delay=delay)
    sync, step_on = training.sync, training.sync.step
    failures: list[str] = []

    def step() -> None:
        local, shared, kept = flat(training.net), theta(sync), owed(sync)
        try:
            step_on()
        except RuntimeError as failure:
            failures.append(str(failure))
            assert torch.equal(local, flat(training.net))
            assert torch.equal(shared, theta(sync))
            assert float((kept - owed(sync)).abs().max()) < LOST
            assert sync.since >= every
            # From here on only this worker's changes count.
            training.changed, training.start = shared - local + kept, shared
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    sync.step = step  # type: ignore[method-assign]
    training.train(10)
    if worker == 1:
        os._exit(1)
    training.train(12)
    (said,) = failures
    assert "a sum over the workers failed" in said or "could not reach" in said
    training.finish()


CASES = [
    raises_in_telemetry,
    fails_anywhere,
    saves_after_a_failure,
    saves_what_is_not_finite,
    freezes,
    averages_buffers_that_are_finite,
    finishes_unevenly,
    grows,
    forgets,
    loads_another_outer,
    loads_the_other_kind,
    differs_in_states,
]


@functools.cache
def results() -> dict[str, list[Any]]:
    return run_cases(CASES, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_workers(case: Any) -> None:
    outcome(results(), case)


def test_a_failed_fragment_of_a_shard() -> None:
    run(fails_in_fragments, 4)


def test_a_failure_of_one_shard() -> None:
    run(fails_on_one_shard, 4)


def test_any_failure_on_two_levels() -> None:
    run(fails_anywhere, 4, [("rank", 0)], True)


def test_a_folder_of_two_numbers_of_workers(tmp_path: Any) -> None:
    for index, workers in enumerate((2, 3, 2)):
        run(loads_a_folder_of_two_numbers_of_workers, workers, str(tmp_path), index > 0)


def test_the_warning_comes_at_the_latest_in_finish() -> None:
    training = Training(0)
    training.train(1)
    next(training.net.parameters()).data[0, 0] = torch.nan
    with logged("powersgd_triton.integrations.local_steps") as messages:
        training.sync.finish()
    assert ["not finite" in text for text in warnings(messages)] == [True]
    assert flat(training.net).isfinite().all()


@pytest.mark.parametrize(("config", "delay"), [("ternary", 0), ("rank", 0), ("ternary", 2), ("exact", 1)])
def test_the_survivor_goes_on(config: str, delay: int) -> None:
    run(survives, 2, config, delay, casualties=[1])
