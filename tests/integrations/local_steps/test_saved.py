"""Saved states of local steps: the same bits on the same workers, the same mean on others, and bad files."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import PowerSGDConfig, checkpoint
from powersgd_triton.comm.agreement import DisagreementError
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.distributed import run
from tests.support.local_steps import CONFIGS, backward, flat, mean, model, owed, theta

EVERY, INTERRUPTED, STEPS = 5, 13, 22
"""It is interrupted in the middle of a round."""

OUTERS: dict[str, Any] = {
    "averaging": None,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}
CASES = [
    ("ternary", "averaging", 0),
    ("ternary", "nesterov", 0),
    ("int4", "adam", 2),
    ("exact", "nesterov", 0),
    ("rank", "averaging", 0),
    ("budget", "nesterov", 1),
    ("alternating", "averaging", 0),
]


class Training:
    def __init__(self, worker: int, config: str, outer: str, delay: int) -> None:
        self.worker, self.net, self.done = worker, model(worker), 0
        self.sync = LocalSteps(self.net, CONFIGS[config], EVERY, OUTERS[outer], delay=delay)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def until(self, steps: int) -> None:
        while self.done < steps:
            backward(self.net, self.worker, self.done)
            self.optimizer.step()
            self.sync.step()
            self.done += 1

    def changes(self) -> Tensor:
        """What was changed since θ, and what is owed: mean over the workers, as ``flat`` is laid out."""
        return mean(theta(self.sync) - flat(self.net) + owed(self.sync))


def interrupted(worker: int, _world_size: int, folder: str) -> list[tuple[bool, list[int]]]:
    """Train on, and train again from what was saved; whether the bits are equal."""
    found = []
    for index, case in enumerate(CASES):
        path = Path(folder) / str(index)
        first = Training(worker, *case)
        first.until(INTERRUPTED)
        first.sync.save(path)
        own = first.optimizer.state_dict()
        torch.save(own, path / f"optimizer-{worker}")
        torch.save(first.changes(), path / "changes")
        first.until(STEPS)
        second = Training(worker, *case)
        second.until(2)
        second.sync.load(path)
        second.optimizer.load_state_dict(torch.load(path / f"optimizer-{worker}"))
        second.done = INTERRUPTED
        second.until(STEPS)
        equal = torch.equal(flat(first.net), flat(second.net)) and torch.equal(owed(first.sync), owed(second.sync))
        found.append((equal, [second.sync.steps, second.sync.since, second.sync.iteration]))
    return found


def on_others(worker: int, _world_size: int, folder: str) -> list[tuple[float, bool, list[int]]]:
    """Load what another number of workers has saved; what is missing of their mean changes."""
    found = []
    for index, case in enumerate(CASES):
        path = Path(folder) / str(index)
        training = Training(worker, *case)
        training.sync.load(path)
        missing = float((training.changes() - torch.load(path / "changes")).abs().max())
        counts = [training.sync.steps, training.sync.since, training.sync.iteration]
        training.until(STEPS - INTERRUPTED)
        training.sync.finish()
        found.append((missing, torch.allclose(mean(flat(training.net)), flat(training.net), atol=1e-6), counts))
    return found


def bad_files(worker: int, world_size: int, folder: str) -> list[str]:
    """What each worker hears of files that are missing, torn, or of another model."""
    path = Path(folder)
    training = Training(worker, "ternary", "averaging", 0)
    training.until(INTERRUPTED)
    before = flat(training.net)
    texts: list[str] = []

    def attempt(act: Any) -> None:
        try:
            act()
            texts.append("accepted")
        except (FileNotFoundError, ValueError, DisagreementError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        dist.barrier()

    attempt(lambda: training.sync.load(path / "nothing"))
    training.sync.save(path / "early")
    dist.barrier()
    training.until(INTERRUPTED + 1)
    training.sync.save(path / "late")
    dist.barrier()
    if worker == 0:
        # As if a worker had been killed while it saved.
        name = f"powersgd-local-0-of-1-worker-1-of-{world_size}.pt"
        (path / "late" / name).write_bytes((path / "early" / name).read_bytes())
        (path / "damaged").mkdir()
        content = (path / "early" / "powersgd-local-0-of-1.pt").read_bytes()
        (path / "damaged" / "powersgd-local-0-of-1.pt").write_bytes(content[:-100])
    dist.barrier()
    attempt(lambda: training.sync.load(path / "late"))
    attempt(lambda: training.sync.load(path / "damaged"))
    state = training.sync.state_dict()
    attempt(lambda: training.sync.load_state_dict(state if worker else {**state, "matrices": {}}))
    attempt(lambda: training.sync.load_state_dict({} if worker else state))
    dist.barrier()
    assert not torch.equal(before, flat(training.net))
    after = flat(training.net)
    # Nothing was changed, and all can go on.
    training.sync.load_state_dict(state)
    assert torch.equal(after, flat(training.net))
    training.until(STEPS)
    return texts


@pytest.fixture(scope="module", name="folder")
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        yield name


@functools.cache
def saved(folder: str) -> list[Any]:
    return run(interrupted, 2, folder)


def test_the_same_workers_go_on_with_the_same_bits(folder: str):
    for found in saved(folder):
        assert [case for case, (equal, _) in zip(CASES, found, strict=True) if not equal] == []
        assert all(steps == STEPS for _, (steps, *_) in found)


@pytest.mark.parametrize("workers", [1, 3])
def test_other_workers_go_on_from_the_mean(folder: str, workers: int):
    saved(folder)
    for found in run(on_others, workers, folder):
        for case, (missing, same, (steps, since, _)) in zip(CASES, found, strict=True):
            assert missing < 2e-6, case
            assert same, case
            assert (steps, since) == (INTERRUPTED, INTERRUPTED % EVERY), case


def test_bad_files_are_errors_on_all_workers(tmp_path: Path):
    for texts in run(bad_files, 2, str(tmp_path)):
        missing, torn, damaged, other, different = texts
        assert missing.startswith("FileNotFoundError")
        assert torn.startswith("ValueError")
        assert "were not saved together" in torn
        assert "damaged" in damaged
        assert "belongs to another model" in other
        assert "expected a saved state of LocalSteps" in different


def test_a_state_is_one_file(tmp_path: Path):
    """``state_dict`` can be written by ``checkpoint.save``, in both formats."""
    for name in ("state.pt", "state.safetensors"):
        training = Training(0, "ternary", "nesterov", 0)
        training.until(INTERRUPTED)
        checkpoint.save(training.sync.state_dict(), tmp_path / name)
        other = Training(0, "ternary", "nesterov", 0)
        other.sync.load_state_dict(tmp_path / name)
        assert torch.equal(flat(other.net), flat(training.net))


def test_a_state_of_gradients_is_refused():
    sync = LocalSteps(model(), PowerSGDConfig(codes="int8"), 3)
    with pytest.raises(ValueError, match="expected a saved state of LocalSteps"):
        sync.load_state_dict({"matrices": {}})
