"""Saved states of local steps: the same bits on the same workers, the same mean on others, and bad files."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import checkpoint
from tests.support.distributed import run
from tests.support.local_steps import NESTEROV, Training, flat, mean, owed, theta
from tests.support.small import complaint

EVERY, INTERRUPTED, STEPS = 3, 8, 14
"""It is interrupted in the middle of a round."""

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ternary", {}),
    ("ternary", {"outer": NESTEROV}),
    ("int4", {"outer": functools.partial(torch.optim.Adam, lr=0.01), "delay": 2}),
    ("exact", {"outer": NESTEROV}),
    ("rank", {}),
    ("budget", {"outer": NESTEROV, "delay": 1}),
    ("alternating", {}),
]


def training(worker: int, config: str = "ternary", options: dict[str, Any] | None = None) -> Training:
    return Training(worker, config, EVERY, optimizer=ADAMW, **(options or {}))


def changes(of: Training) -> Tensor:
    """What was changed since θ, and what is owed: mean over the workers, as ``flat`` is laid out."""
    return mean(theta(of.sync) - flat(of.net) + owed(of.sync))


def goes_on(worker: int, _world_size: int, folder: str) -> None:
    """The same workers go on with the same bits."""
    for index, (config, options) in enumerate(CASES):
        path = Path(folder) / str(index)
        first, second = training(worker, config, options), training(worker, config, options)
        first.train(INTERRUPTED)
        first.sync.save(path)
        own = first.optimizer.state_dict()
        torch.save(own, path / f"optimizer-{worker}")
        torch.save(changes(first), path / "changes")
        first.train(STEPS - INTERRUPTED)
        second.train(2)
        second.sync.load(path)
        second.optimizer.load_state_dict(torch.load(path / f"optimizer-{worker}"))
        second.done = INTERRUPTED
        second.train(STEPS - INTERRUPTED)
        assert torch.equal(flat(first.net), flat(second.net)), (config, options)
        assert torch.equal(owed(first.sync), owed(second.sync)), (config, options)
        for name in ("steps", "since", "iteration"):
            assert getattr(first.sync, name) == getattr(second.sync, name), (config, options, name)


def goes_on_elsewhere(worker: int, _world_size: int, folder: str) -> None:
    """Another number of workers goes on from the mean changes."""
    for index, (config, options) in enumerate(CASES):
        path = Path(folder) / str(index)
        other = training(worker, config, options)
        other.sync.load(path)
        missing = float((changes(other) - torch.load(path / "changes")).abs().max())
        assert missing < 2e-6, (config, options, missing)
        assert (other.sync.steps, other.sync.since) == (INTERRUPTED, INTERRUPTED % EVERY)
        other.train(STEPS - INTERRUPTED)
        other.sync.finish()
        assert torch.allclose(mean(flat(other.net)), flat(other.net), atol=1e-6), (config, options)


def refuses_bad_files(worker: int, world_size: int, folder: str) -> None:
    """Files that are missing, torn, or of another model are errors on all workers, and change nothing."""
    path = Path(folder)
    ours = training(worker)
    ours.train(INTERRUPTED)
    ours.sync.save(path / "early")
    ours.train(1)
    ours.sync.save(path / "late")
    dist.barrier()
    if worker == 0:
        # As if a worker had been killed while it saved.
        name = f"powersgd-local-0-of-1-worker-1-of-{world_size}.pt"
        (path / "late" / name).write_bytes((path / "early" / name).read_bytes())
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
        (lambda: ours.sync.load_state_dict({} if worker else state), "expected a saved state of LocalSteps"),
    ]
    for attempt, pattern in attempts:
        said = complaint(attempt)
        assert re.search(pattern, said, re.DOTALL), said
        dist.barrier()
    assert torch.equal(before, flat(ours.net))
    ours.sync.load_state_dict(state)
    assert torch.equal(before, flat(ours.net))
    ours.train(EVERY)


def test_runs_go_on(tmp_path: Path) -> None:
    """On as many workers as have saved the state, on more, and on fewer."""
    run(goes_on, 2, str(tmp_path))
    run(goes_on_elsewhere, 1, str(tmp_path))
    run(goes_on_elsewhere, 3, str(tmp_path))


def test_bad_files_are_errors_on_all_workers(tmp_path: Path) -> None:
    run(refuses_bad_files, 2, str(tmp_path))


@pytest.mark.parametrize("name", ["state.pt", "state.safetensors"])
def test_a_state_is_one_file(tmp_path: Path, name: str) -> None:
    """``state_dict`` can be written by ``checkpoint.save``, in both formats. A state of gradients is refused."""
    ours, other = (training(0, "ternary", {"outer": NESTEROV}) for _ in range(2))
    ours.train(INTERRUPTED)
    checkpoint.save(ours.sync.state_dict(), tmp_path / name)
    other.sync.load_state_dict(tmp_path / name)
    assert torch.equal(flat(other.net), flat(ours.net))
    with pytest.raises(ValueError, match="expected a saved state of LocalSteps"):
        other.sync.load_state_dict({"matrices": {}})
