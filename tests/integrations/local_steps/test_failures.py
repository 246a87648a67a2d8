"""What goes wrong on one worker, or at an odd time: all hear of it, nothing is lost, and training goes on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from powersgd_triton.comm.agreement import DisagreementError
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.distributed import folder, outcome, run, run_cases
from tests.support.local_steps import CONFIGS, TERNARY, backward, flat, mean, model, owed, theta

EVERY = 3


class Training:
    """Local steps of a small model, and the sum of what this worker has changed."""

    def __init__(self, worker: int, config: str, **options: Any) -> None:
        self.worker, self.net, self.done = worker, model(), 0
        self.sync = LocalSteps(self.net, CONFIGS[config], options.pop("every", EVERY), **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.start, self.changed = flat(self.net), torch.zeros_like(flat(self.net))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            backward(self.net, self.worker, self.done)
            before = flat(self.net)
            self.optimizer.step()
            self.changed += before - flat(self.net)
            self.done += 1
            self.sync.step()

    def missing(self) -> float:
        """What neither θ nor the errors nor the local parameters have of all changes."""
        local = theta(self.sync) - flat(self.net)
        lost = mean(self.changed) - (self.start - theta(self.sync)) - mean(owed(self.sync) + local)
        return float(lost.abs().max())

    def same(self) -> bool:
        return same_everywhere(theta(self.sync))


def same_everywhere(tensor: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return all(torch.equal(tensor, other) for other in everyone)


def raises_in_telemetry(worker: int, _world_size: int) -> list[tuple[bool, float, int]]:
    found = []
    for config in ("ternary", "rank"):
        training = Training(worker, config)

        def callback(_record: object) -> None:
            raise KeyError("a user's mistake")

        if worker == 0:
            training.sync.telemetry(callback, every=2)
        for _ in range(4):
            try:
                training.train(EVERY)
            except KeyError:
                training.sync.telemetry(every=0)
        found.append((training.same(), training.missing(), training.sync.since))
    return found


def saves_after_a_failure(worker: int, _world_size: int, path: str) -> float:
    """The mean error of a state that is saved after a failed exchange, against the mean of the workers' errors."""
    training = Training(worker, "rank")
    training.train(EVERY)
    advance, engine = training.sync._engine.advance, training.sync._engine

    def failing(*, finish: bool) -> bool:
        engine.advance = advance  # type: ignore[method-assign]
        raise RuntimeError("injected")

    engine.advance = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="injected"):
        training.train(EVERY)
    expected = mean(owed(training.sync))
    saved = training.sync.state_dict()["matrices"]
    errors = [saved[name].get("error", torch.zeros(1)) for name in training.sync.shared()]
    found = torch.cat(
        [
            error.reshape(-1) if error.numel() > 1 else torch.zeros(shared.numel())
            for error, shared in zip(errors, training.sync.shared().values(), strict=True)
        ]
    )
    training.train(2 * EVERY)
    assert training.missing() < 3e-6
    return float((found - expected).abs().max())


def saves_what_is_not_finite(worker: int, _world_size: int) -> bool:
    with folder(worker) as path:
        training = Training(worker, "ternary")
        training.train(EVERY + 1)
        if worker == 0:
            next(training.net.parameters()).data[0, 0] = torch.nan
        training.sync.save(path)
        training.sync.load(path)
        training.train(EVERY)
    return bool(flat(training.net).isfinite().all()) and training.same()


def freezes(worker: int, _world_size: int) -> tuple[bool, float]:
    training = Training(worker, "ternary")
    training.train(EVERY)
    first = next(training.net.parameters())
    first.requires_grad_(False)
    training.train(EVERY)
    first.requires_grad_(True)
    training.train(EVERY)
    return training.same(), training.missing()


def differs_in_states(worker: int, _world_size: int) -> str:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    sync = LocalSteps(net, TERNARY, 1, optimizer=optimizer)
    backward(net, worker, 0)
    if worker == 1:
        next(net.parameters()).grad = None
    optimizer.step()
    with pytest.raises(DisagreementError, match="shapes of the optimizer's states") as raised:
        sync.step()
    return str(raised.value)


def averages_buffers_that_are_finite(worker: int, world_size: int) -> tuple[list[float], int]:
    norm: Any = nn.BatchNorm1d(3)
    norm.register_buffer("mask", torch.ones(500, dtype=torch.bool))
    norm.register_buffer("least", torch.full((2,), -torch.inf))
    sync = LocalSteps(norm, TERNARY, 1)
    norm.running_mean.fill_(worker + 1.0)
    if worker == world_size - 1:
        norm.running_mean[0] = torch.nan
    before = sync._engine.sent
    sync.step()
    # Nothing of the mask was sent, which did not change.
    return norm.running_mean.tolist(), sync._engine.sent - before


def finishes_unevenly(worker: int, _world_size: int) -> tuple[bool, float, bool]:
    training = Training(worker, "ternary", every=4)
    training.train(4 + worker)
    training.sync.finish()
    first = training.same(), training.missing(), torch.equal(flat(training.net), theta(training.sync))
    training.sync.finish()
    return first


def grows(worker: int, _world_size: int) -> tuple[bool, float, int]:
    training = Training(worker, "ternary", delay=2, every=lambda steps: 3 + steps)
    # Exchanges after 3 and 9 steps, and the last one.
    training.train(14)
    training.sync.finish()
    return training.same(), training.missing(), training.sync.iteration


def forgets(worker: int, _world_size: int) -> tuple[bool, float, int]:
    training = Training(worker, "ternary", outer=functools.partial(torch.optim.SGD, lr=1.0, momentum=0.5), delay=1)
    training.train(EVERY + 1)
    training.sync.forget()
    kept = len(training.sync.outer.state)
    return training.same(), float(owed(training.sync).abs().max()), kept


def loads_another_outer(worker: int, _world_size: int) -> tuple[bool, str]:
    training = Training(worker, "ternary", outer=lambda p: torch.optim.Adam(p, lr=0.01))
    training.train(EVERY)
    other = Training(worker, "ternary")
    other.train(EVERY + 1)
    before = flat(other.net)
    with pytest.raises(ValueError, match="another outer optimizer") as raised:
        other.sync.load_state_dict(training.sync.state_dict())
    unchanged = torch.equal(before, flat(other.net))
    other.train(EVERY)
    return unchanged, str(raised.value)


def loads_the_other_kind(worker: int, _world_size: int) -> list[float]:
    """Codes and factors load each other's states, in the middle of a round and of an exchange under way."""
    found = []
    for saves, loads in (("ternary", "rank"), ("rank", "ternary"), ("int4", "exact")):
        first, second = Training(worker, saves), Training(worker, loads, delay=2)
        first.train(EVERY + 1)
        second.train(EVERY + 1)
        report = second.sync.load_state_dict(first.sync.state_dict())
        assert report.loaded or report.carried
        second.start, second.changed = first.start, first.changed.clone()
        second.train(2 * EVERY)
        second.sync.finish()
        found.append(second.missing())
    return found


def fails_in_fragments(worker: int, _world_size: int) -> tuple[bool, bool]:
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
    engine, failed = sync._engine, False
    advance = engine._advance_older
    for step in range(30):
        backward(net, worker // 2, step)
        optimizer.step()
        if step == 7:

            def failing() -> None:
                engine._advance_older = advance  # type: ignore[method-assign]
                raise RuntimeError("injected")

            engine._advance_older = failing  # type: ignore[method-assign]
        try:
            sync.step()
        except RuntimeError:
            failed = True
    sync.finish()
    return failed, same_everywhere(theta(sync), across)


CASES = [
    raises_in_telemetry,
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


def test_an_exception_after_the_exchange_does_not_undo_it():
    for found in outcome(results(), raises_in_telemetry):
        assert all(same and missing < 3e-6 and since == 0 for same, missing, since in found), found


def test_a_failed_exchange_leaves_errors_that_are_averaged_when_saved(tmp_path: Path):
    assert max(run(saves_after_a_failure, 2, str(tmp_path))) < 1e-7


def test_a_worker_that_is_not_finite_saves_the_shared_parameters():
    assert all(outcome(results(), saves_what_is_not_finite))


def test_a_parameter_may_be_frozen_for_a_time():
    assert all(same and missing < 3e-6 for same, missing in outcome(results(), freezes))


def test_states_that_differ_in_number_are_refused():
    assert len(outcome(results(), differs_in_states)) == 2


def test_a_nan_in_a_buffer_stays_on_its_worker_only():
    for found, sent in outcome(results(), averages_buffers_that_are_finite):
        assert found == [1.0, 1.0, 1.0]
        assert sent < 500


def test_finish_takes_different_numbers_of_steps():
    for same, missing, equal in outcome(results(), finishes_unevenly):
        assert same
        assert equal
        assert missing < 3e-6


def test_rounds_may_grow():
    for same, missing, exchanges in outcome(results(), grows):
        assert same
        assert missing < 3e-6
        assert exchanges == 3


def test_forget_begins_anew():
    assert outcome(results(), forgets) == [(True, 0.0, 0)] * 2


def test_a_state_of_another_outer_optimizer_is_refused():
    assert all(unchanged for unchanged, _ in outcome(results(), loads_another_outer))


def test_codes_and_factors_load_each_other():
    for found in outcome(results(), loads_the_other_kind):
        assert max(found) < 3e-6


def test_a_failed_fragment_of_a_shard():
    assert run(fails_in_fragments, 4) == [(True, True)] * 4


def test_a_folder_of_two_numbers_of_workers(tmp_path: Path):
    for workers in (2, 3, 2):
        run(saves_and_loads, workers, str(tmp_path))


def saves_and_loads(worker: int, _world_size: int, path: str) -> None:
    training = Training(worker, "ternary")
    if any(Path(path).iterdir()):
        training.sync.load(path)
    dist.barrier()
    training.train(EVERY + 1)
    training.sync.save(path)


def test_the_warning_comes_at_the_latest_in_finish(caplog: pytest.LogCaptureFixture):
    training = Training(0, "ternary")
    training.train(1)
    next(training.net.parameters()).data[0, 0] = torch.nan
    training.sync.finish()
    assert "not finite" in caplog.text
    assert bool(flat(training.net).isfinite().all())
