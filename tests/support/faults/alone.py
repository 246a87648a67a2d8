"""Faults on one worker only: a refused file, an exception, a failed allocation. The other workers are told."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from powersgd_triton import Compressor, DisagreementError, checkpoint
from powersgd_triton.schemes import factors
from tests.support.faults.peers import refused_step
from tests.support.faults.saved import resume, unchanged
from tests.support.faults.trainer import CAPS, MATRICES, SHAPES, Trainer

TIMEOUT = datetime.timedelta(seconds=1)
"""Of the groups in which one worker does what the others do not."""


def _victim(trainer: Trainer) -> bool:
    """Whether it is this worker's turn."""
    return trainer.worker == trainer.dice.randrange(trainer.workers)


def _check_said(trainer: Trainer, said: str, own: str, others: str, victim: bool) -> None:
    """The victim has its own error, and the others one that names it."""
    if not re.match(own if victim else others, said):
        trainer.lost.append(f"the reason is not given: {said}")


@contextlib.contextmanager
def _refused(trainer: Trainer, own: str, others: str, victim: bool) -> Iterator[None]:
    """What is done here must raise such an error, and leave the running state as it is."""
    with unchanged(trainer):
        try:
            yield
        except (ValueError, DisagreementError) as error:
            _check_said(trainer, f"{type(error).__name__}: {error}", own, others, victim)
        else:
            trainer.lost.append("what one worker refused was done")


def file_refused(trainer: Trainer, folder: Path) -> None:
    saved, victim = trainer.state.state_dict(), _victim(trainer)
    path = folder / f"own-{trainer.worker}.{trainer.dice.choice(('pt', 'safetensors'))}"
    checkpoint.save(saved, path)
    steps, cut = trainer.dice.randrange(1, 4), trainer.dice.random()
    for _ in range(steps):
        trainer.step()
    if victim:
        content = path.read_bytes()
        path.write_bytes(content[: int(cut * len(content))])
    with _refused(trainer, "ValueError: ", r"ValueError: load_state_dict failed on worker \d: Value", victim):
        trainer.state.load_state_dict(path)
    trainer.step()


def different_states(trainer: Trainer, folder: Path) -> None:
    saved, victim = trainer.state.state_dict(), _victim(trainer)
    trainer.step()
    later = trainer.state.state_dict()
    with _refused(trainer, differs := r"DisagreementError: .*worker \d differs from worker \d", differs, victim):
        trainer.state.load_state_dict(later if victim else saved)
    trainer.step()


def loads_alone(trainer: Trainer, folder: Path) -> None:
    """The others step, or save. Their group is lost then, but nothing that they owe."""
    group, victim = dist.new_group(timeout=TIMEOUT), _victim(trainer)
    what, before = trainer.dice.choice(("step", "save")), trainer.dice.randrange(3)
    compressor = Compressor(trainer.state.config, SHAPES, group)
    for _ in range(before):
        compressor.decompress(compressor.compress(trainer.gradients()))
    saved, owed, given = compressor.state_dict(), compressor.error(), trainer.gradients()
    dist.barrier()
    acts: dict[str, Callable[[], Any]] = {
        "load": lambda: compressor.load_state_dict(saved),
        "step": lambda: compressor.compress(given),
        # Before the first step there is nothing to save, and no collective.
        "save": lambda: compressor.state_dict() if before else compressor.compress(given),
    }
    act = "load" if victim else what
    try:
        acts[act]()
    except RuntimeError as error:
        if not any(reason in str(error) for reason in ("load_state_dict", "alone")):
            trainer.lost.append(f"no reason is given: {error}")
    else:
        trainer.lost.append(f"{act} looks complete without the others")
    for name, found in compressor.error().items():
        # A step that was interrupted after the workers had compared is owed.
        expected = owed[name] + given[name] if act == "step" and before else owed[name]
        slack = 0.05 if trainer.setting.error_dtype else 1e-5
        if not torch.allclose(found.float(), expected.float(), rtol=slack, atol=slack):
            trainer.lost.append(f"{act}: {name} is off by {float((found - expected).abs().max()):.3g}")
    dist.barrier()
    dist.destroy_process_group(group)
    trainer.step()


def rank_function(trainer: Trainer, folder: Path) -> None:
    at, victim = trainer.dice.choice(MATRICES), _victim(trainer)
    kind, named = trainer.dice.choice(("raises", "negative")), trainer.dice.random() < 0.5

    def rank(name: str, shape: tuple[int, ...]) -> int:
        if victim and (name == at or (not named and shape == SHAPES[at])):
            if kind == "raises":
                raise LookupError(name)
            return -1
        return trainer.setting.rank

    options: dict[str, Any] = {"matrix_approximation_rank": rank, **({} if named else {"module": None})}
    said = refused_step(trainer, trainer.new_state(**options), LookupError, ValueError, DisagreementError)
    own, kind = (
        ("LookupError: ", "DisagreementError") if kind == "raises" else ("ValueError: the rank of ", "ValueError")
    )
    _check_said(trainer, said, own, rf"{kind}: a step failed on worker \d: {own}", victim)


def no_memory(trainer: Trainer, folder: Path) -> None:
    """One worker has no memory for a bucket that is new, after the model was wrapped in others.

    Then for the rest of one, of which parts that were loaded and not used yet are not lost either.
    """
    _without_memory(trainer, "make_backend", 0)
    resume(trainer, folder)
    _without_memory(trainer, "_fill", 1)


def _without_memory(trainer: Trainer, name: str, call: int) -> None:
    victim, original, calls = _victim(trainer), getattr(factors, name), itertools.count()

    def failing(*args: Any) -> Any:
        if next(calls) == call and victim:
            raise torch.OutOfMemoryError("no memory is left")
        return original(*args)

    trainer.wrap(trainer.dice.choice([cap for cap in CAPS if cap != trainer.setting.cap]))
    given, scale = trainer.gradients(), trainer.scaler.get_scale()
    assert trainer.replica is not None
    trainer.optimizer.zero_grad()
    trainer.buckets = []
    with mock.patch.object(factors, name, failing):
        try:
            trainer.scaler.scale(trainer.replica(given)).backward()
        except (torch.OutOfMemoryError, DisagreementError) as error:
            others = r"the allocation for a bucket failed on worker \d: OutOfMemoryError: no memory is left"
            _check_said(trainer, str(error), "no memory is left", others, victim)
        else:
            trainer.lost.append("a step without memory looks complete")
    # Its gradient was not added to an error yet.
    trainer.buckets.pop()
    trainer.wrap(trainer.setting.cap)
    trainer.enter_void(given, scale)
    trainer.step()
