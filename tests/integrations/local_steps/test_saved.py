"""Saved states of local steps: the same bits on the same workers, the same mean on others, and bad files."""

import contextlib
import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import checkpoint
from tests.support.checks import put
from tests.support.distributed import folder, make_test, run
from tests.support.local_steps import NESTEROV, Training, batch, flat, mean, owed, same_bits, theta
from tests.support.training import complaint

EVERY, INTERRUPTED, STEPS = 3, 8, 14
"""It is interrupted in the middle of a round."""

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
Options = tuple[str, dict[str, Any]]
QUICK: list[Options] = [
    ("ternary", {"outer": NESTEROV}),
    ("int4", {"outer": ADAM, "delay": 2}),
    ("rank", {"keep": 1.0, "delay": 1}),
    ("alternating", {}),
]
MORE: list[Options] = [
    ("ternary", {}),
    ("exact", {"outer": NESTEROV}),
    ("sparse", {"keep": 1.0}),
    ("rank", {}),
    ("budget", {"outer": NESTEROV, "delay": 1}),
]


M, G = "matrices/0.weight", "local_steps/outer/param_groups/0"
# {field of a saved state: (what it must not be, what is said)}
CRAFTED: list[tuple[str, Any, str]] = [
    (f"{M}/shared", torch.full((20, 12), torch.inf), "'shared' of '0.weight' .* finite tensor of shape .20, 12.; got"),
    (f"{M}/changes", torch.zeros(20, 1), r"'changes' of '0.weight' .*got torch.float32 \(20, 1\)"),
    (f"{M}/own", None, "'own' of '0.weight' .*got None"),
    (f"{M}/outer_momentum_buffer", torch.full((20, 12), torch.nan), "'outer_momentum_buffer' of '0.weight' .* finite"),
    (f"{M}/outer_momentum_buffer", torch.zeros(()), "'outer_momentum_buffer' of '0.weight' .*got torch.float32"),
    ("matrices/0.bias", [], "matrices.0.bias is .*form of {}"),
    ("local_steps", {"steps": 1}, "local_steps is {'steps': 1}"),
    ("local_steps/steps", -1, "numbers of steps"),
    ("local_steps/since", "2", "local_steps.since is '2'"),
    ("local_steps/worker", [0], "local_steps.worker is .0."),
    ("local_steps/outer/state", {"0.bias": 3}, "local_steps.outer.state.0.bias is 3"),
    (f"{G}/lr", float("nan"), "param_groups.0.lr is nan"),
    (f"{G}/nesterov", "yes", "param_groups.0.nesterov is 'yes'"),
    ("tensors/0.bias", [20], "expected tensors"),
]


def training(worker: int, config: str = "ternary", options: dict[str, Any] | None = None) -> Training:
    return Training(worker, config, EVERY, optimizer=ADAMW, **(options or {}))


def changes(of: Training) -> Tensor:
    """What was changed since θ, and what is owed: mean over the workers, as ``flat`` is laid out."""
    return mean(theta(of.sync) - flat(of.net) + owed(of.sync))


def save(of: Training, path: Path) -> None:
    with of.sync.shared_parameters():
        of.sync.save(path)
    torch.save({"changes": changes(of), "steps": of.sync.steps}, path / "expected")


def goes_on(worker: int, _world_size: int, cases: list[Options], saved_in: str) -> None:
    """The same workers go on with the same bits."""
    for index, (config, options) in enumerate(cases):
        path = Path(saved_in) / str(index)
        first, second = training(worker, config, options), training(worker, config, options)
        first.train(INTERRUPTED)
        save(first, path)
        saved = copy.deepcopy(first.optimizer.state_dict())
        first.train(STEPS - INTERRUPTED)
        second.train(2)
        # Models may be evaluated then.
        with second.sync.shared_parameters():
            assert torch.equal(flat(second.net), theta(second.sync))
            second.sync.load(path)
            assert torch.equal(flat(second.net), theta(second.sync))
        second.optimizer.load_state_dict(saved)
        second.done = INTERRUPTED
        second.train(STEPS - INTERRUPTED)
        assert torch.equal(flat(first.net), flat(second.net)), (config, options)
        assert torch.equal(owed(first.sync), owed(second.sync)), (config, options)
        for name in ("steps", "since", "iteration"):
            assert getattr(first.sync, name) == getattr(second.sync, name), (config, options, name)


def saves_a_step_that_does_not_count_yet(worker: int, _world_size: int) -> None:
    """What was changed before ``step`` is called, also if it would be the first step of a round."""
    first, second = training(worker), training(worker)
    first.train(EVERY)
    first.advance(*batch(worker, EVERY))
    second.sync.load_state_dict(first.sync.state_dict())
    assert not torch.equal(flat(first.net), theta(first.sync))
    assert torch.equal(flat(first.net), flat(second.net))


def finishes_what_others_kept(worker: int, _world_size: int) -> None:
    """What was kept in the workers' own parameters, where nothing is kept, and before a step is taken."""
    first, second = training(worker, options={"keep": 1.0}), training(worker)
    first.train(EVERY)
    second.sync.load_state_dict(first.sync.state_dict())
    assert not same_bits(flat(second.net))
    second.sync.finish()
    assert torch.equal(flat(second.net), theta(second.sync))


def goes_on_elsewhere(worker: int, _world_size: int, cases: list[Options], saved_in: str) -> None:
    """Another number of workers goes on from the mean changes, and saves them in the same folder."""
    for index, (config, options) in enumerate(cases):
        path = Path(saved_in) / str(index)
        other, expected = training(worker, config, options), torch.load(path / "expected")
        other.sync.load(path)
        missing = float((changes(other) - expected["changes"]).abs().max())
        assert missing < 2e-6, (config, options, missing)
        assert other.sync.steps == expected["steps"]
        assert other.sync.since == expected["steps"] % EVERY == 2
        other.train(EVERY)
        save(other, path)
        other.sync.finish()
        assert torch.allclose(mean(flat(other.net)), flat(other.net), atol=1e-6), (config, options)


def saves_after_a_failure(worker: int, _world_size: int) -> None:
    """The mean of the workers' errors, if an exchange has failed; the shared parameters, if its own are not finite."""
    ours = Training(worker, "rank")
    ours.train(EVERY)
    with mock.patch.object(ours.sync._engine.schedule, "advance", side_effect=RuntimeError("injected")):
        assert "injected" in complaint(ours.train, EVERY)
    expected, saved = mean(owed(ours.sync)), ours.sync.state_dict()["matrices"]
    found = [saved[n].get("error", torch.zeros(t.shape)).expand(t.shape) for n, t in ours.sync.shared().items()]
    assert expected.any()
    assert (torch.cat([error.flatten() for error in found]) - expected).abs().max() < 1e-7
    ours.train(2 * EVERY)
    ours.check()
    ours.train(1)
    if worker == 0:
        next(ours.net.parameters()).data[0, 0] = torch.nan
    ours.sync.load_state_dict(ours.sync.state_dict())
    ours.train(EVERY)
    assert flat(ours.net).isfinite().all()
    assert same_bits(theta(ours.sync))


def refuses_bad_files(worker: int, world_size: int) -> None:
    """Files that are missing, torn, or of another model are errors on all workers, and change nothing."""
    ours, other = training(worker, options={"outer": NESTEROV}), training(worker, options={"outer": ADAM})
    ours.train(INTERRUPTED)
    other.train(EVERY)
    with folder(worker) as name:
        path = Path(name)
        ours.sync.save(path / "early")
        ours.train(1)
        with mock.patch("os.fsync", side_effect=OSError("no space")) if worker == 1 else contextlib.nullcontext():
            assert "no space" in complaint(ours.sync.save, path / "early")
        ours.sync.load(path / "early")
        ours.train(1)
        ours.sync.save(path / "late")
        dist.barrier()
        if worker == 0:
            # As if a worker had been killed while it saved.
            own = f"powersgd-local-0-of-1-worker-1-of-{world_size}.pt"
            (path / "late" / own).write_bytes((path / "early" / own).read_bytes())
            (path / "damaged").mkdir()
            content = (path / "early" / "powersgd-local-0-of-1.pt").read_bytes()
            (path / "damaged" / "powersgd-local-0-of-1.pt").write_bytes(content[:-100])
        dist.barrier()
        state, before = ours.sync.state_dict(), flat(ours.net)
        attempts: list[tuple[Callable[[], Any], str]] = [
            (lambda: ours.sync.load(path / "nothing"), "^FileNotFoundError"),
            (lambda: ours.sync.load(path / "late"), "^ValueError.* were not saved together"),
            (lambda: ours.sync.load(path / "damaged"), "damaged"),
            (
                lambda: ours.sync.load_state_dict(state if worker else {**state, "matrices": {}}),
                "belongs to another model",
            ),
            (lambda: ours.sync.load_state_dict(other.sync.state_dict()), "another outer optimizer"),
        ]
        for path_, junk, pattern in CRAFTED:
            # On one worker, or on all.
            bad = put(state, path_, junk) if worker == 0 or "local_steps" in path_ else state
            attempts.append((functools.partial(ours.sync.load_state_dict, bad), f"^ValueError.*({pattern})"))
        for attempt, pattern in attempts:
            said = complaint(attempt)
            assert re.search(pattern, said, re.DOTALL), said
            dist.barrier()
        assert torch.equal(before, flat(ours.net))
        ends = []
        for _ in range(2):
            # What was loaded is not changed by training.
            ours.sync.load_state_dict(state)
            assert torch.equal(before, flat(ours.net))
            for parameter in ours.net.parameters():
                parameter.data.mul_(1.5)
            ours.sync.finish()
            ends.append(theta(ours.sync))
        assert torch.equal(*ends)
        ours.train(EVERY)


@pytest.mark.parametrize("cases", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)], ids=["quick", "more"])
def test_runs_go_on(cases: list[Options], tmp_path: Path) -> None:
    """On as many workers as have saved the state, on more, and on fewer, whose own files are older."""
    run(goes_on, 2, cases, str(tmp_path))
    for workers in (3, 2):
        run(goes_on_elsewhere, workers, cases, str(tmp_path))


STATES = [saves_after_a_failure, saves_a_step_that_does_not_count_yet, finishes_what_others_kept, refuses_bad_files]
test_states = make_test(STATES, 2)


@pytest.mark.parametrize("name", ["state.pt", "state.safetensors"])
def test_a_state_is_one_file(tmp_path: Path, name: str) -> None:
    """``state_dict`` can be written by ``checkpoint.save``, in both formats. A state of gradients is refused."""
    outer = functools.partial(torch.optim.SGD, lr=torch.tensor(0.7), momentum=0.9)
    ours, other = (training(0, "ternary", {"outer": outer}) for _ in range(2))
    ours.train(INTERRUPTED)
    checkpoint.save(ours.sync.state_dict(), tmp_path / name)
    other.sync.load_state_dict(tmp_path / name)
    assert torch.equal(flat(other.net), flat(ours.net))
    assert torch.equal(other.sync.outer.param_groups[0]["lr"], torch.tensor(0.7))
    with pytest.raises(ValueError, match="expected a saved state of LocalSteps"):
        other.sync.load_state_dict({"matrices": {}})
