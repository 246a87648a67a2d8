"""Saved states between the steps, and faults on one worker only: a refused file, an exception, a failed allocation."""

import contextlib
import datetime
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from powersgd_triton import Compressor, DisagreementError, checkpoint
from powersgd_triton.integrations.ddp import PowerSGDState
from powersgd_triton.schemes import factors
from tests.support.checks import same_bits
from tests.support.faults.trainer import CAPS, MATRICES, SHAPES, Trainer
from tests.support.training import complaint, without_memory


def resume(trainer: Trainer, folder: Path, **fields: Any) -> None:
    """Save through a file, and go on with a new state."""
    trainer.audit()
    saved, path = trainer.state.state_dict(), folder / f"saved.{trainer.dice.choice(('pt', 'safetensors'))}"
    if trainer.worker == 0:
        checkpoint.save(saved, path)
    dist.barrier()
    trainer.state = trainer.new_state(**fields)
    trainer.state.load_state_dict(checkpoint.load(path))
    dist.barrier()
    trainer.ledger.load(trainer.state.config, trainer.workers)


def resumed(trainer: Trainer, folder: Path) -> None:
    resume(trainer, folder)
    trainer.step()


def resumed_at_another_rank(trainer: Trainer, folder: Path) -> None:
    ranks = [rank for rank in (1, 2, 3, 5) if rank != trainer.state.config.rank]
    resume(trainer, folder, matrix_approximation_rank=trainer.dice.choice(ranks))
    trainer.step()


def resumed_uncompressed(trainer: Trainer, folder: Path) -> None:
    resume(trainer, folder, min_compression_rate=1e9)
    trainer.step()


@contextlib.contextmanager
def unchanged(trainer: Trainer) -> Iterator[None]:
    """What is refused here must leave the running state as it is."""
    errors, number = trainer.state.error(), trainer.state.iter
    yield
    if not same_bits(trainer.state.error(), errors) or trainer.state.iter != number:
        trainer.lost.append("what was refused has changed the running state")


def _refused(trainer: Trainer, path: Path, original: dict[str, Any]) -> None:
    """A file is refused, or else gives what was saved."""
    with unchanged(trainer), contextlib.suppress(ValueError):
        (tensors, rest), (saved, others) = map(checkpoint.flatten, (checkpoint.load(path), original))
        if rest != others or not same_bits(tensors, saved):
            trainer.lost.append(f"a damaged file was loaded: {path.name}")
    trainer.step()


def _damage(trainer: Trainer, folder: Path, damage: Callable[[bytes], bytes]) -> None:
    trainer.audit()
    saved = trainer.state.state_dict()
    path = folder / f"damaged-{trainer.worker}.{trainer.dice.choice(('pt', 'safetensors'))}"
    checkpoint.save(saved, path)
    path.write_bytes(damage(path.read_bytes()))
    _refused(trainer, path, saved)


def flipped_bit(trainer: Trainer, folder: Path) -> None:
    def damage(content: bytes) -> bytes:
        place = trainer.dice.randrange(len(content))
        return content[:place] + bytes([content[place] ^ 1 << trainer.dice.randrange(8)]) + content[place + 1 :]

    _damage(trainer, folder, damage)


def truncated(trainer: Trainer, folder: Path) -> None:
    _damage(trainer, folder, lambda content: content[: trainer.dice.randrange(len(content))])


def foreign_file(trainer: Trainer, folder: Path) -> None:
    kind = trainer.dice.choice(("text", "model"))
    path = folder / f"foreign-{trainer.worker}.pt"
    if kind == "text":
        path.write_text("not a checkpoint")
    else:
        torch.save({"model": dict(trainer.model.named_parameters())}, path)
    _refused(trainer, path, trainer.state.state_dict())


def foreign_state(trainer: Trainer, folder: Path) -> None:
    """A sound file, of another model."""
    trainer.audit()
    saved = trainer.state.state_dict()
    kind = trainer.dice.choice(("renamed", "reshaped", "format"))
    matrices = dict(saved["matrices"])
    name = trainer.dice.choice(sorted(matrices))
    other: dict[str, Any] = {**saved, "matrices": matrices}
    if kind == "renamed":
        matrices["other"] = matrices.pop(name)
    elif kind == "reshaped":
        matrices[name] = {part: torch.zeros(3, 3) for part in matrices[name]}
    else:
        other["format_version"] = 999
    with unchanged(trainer), contextlib.suppress(ValueError):
        trainer.state.load_state_dict(other)
        trainer.lost.append(f"a {kind} state was loaded")
    trainer.step()


TIMEOUT = datetime.timedelta(seconds=1)
"""Of the groups in which one worker does what the others do not."""


def _victim(trainer: Trainer) -> bool:
    """Whether it is this worker's turn."""
    return trainer.worker == trainer.dice.randrange(trainer.workers)


def _check_said(trainer: Trainer, said: str, own: str, others: str, victim: bool) -> None:
    """The victim has its own error, and the others one that names it."""
    if not re.match(own if victim else others, said, re.DOTALL):
        trainer.lost.append(f"the reason is not given: {said}")


def _refused_by_all(trainer: Trainer, state: Any, own: str, others: str, victim: bool) -> None:
    """Loading it must raise such errors, and leave the running state as it is."""
    with unchanged(trainer):
        said = complaint(trainer.state.load_state_dict, state)
    _check_said(trainer, said, own, others, victim)
    trainer.step()


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
    others = r"ValueError: load_state_dict failed on worker \d: Value"
    _refused_by_all(trainer, path, "ValueError: ", others, victim)


def different_states(trainer: Trainer, folder: Path) -> None:
    saved, victim = trainer.state.state_dict(), _victim(trainer)
    trainer.step()
    later = trainer.state.state_dict()
    differs = r"DisagreementError: .*worker \d differs from worker \d"
    _refused_by_all(trainer, later if victim else saved, differs, differs, victim)


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
    told = r"(DisagreementError|RuntimeError): .*(load_state_dict|alone)"
    _check_said(trainer, complaint(acts[act]), told, told, victim)
    for name, found in compressor.error().items():
        # A step that was interrupted after the workers had compared is owed.
        expected = owed[name] + given[name] if act == "step" and before else owed[name]
        slack = 0.05 if trainer.state.config.error_dtype else 1e-5
        if not torch.allclose(found.float(), expected.float(), rtol=slack, atol=slack):
            trainer.lost.append(f"{act}: {name} is off by {float((found - expected).abs().max()):.3g}")
    dist.barrier()
    dist.destroy_process_group(group)
    trainer.step()


def refused_step(trainer: Trainer, state: PowerSGDState, *expected: type[Exception]) -> str:
    """A backward pass with another state, which is refused, and how; then the step with the trainer's own."""
    own, trainer.state = trainer.state, state
    said = trainer.interrupted(trainer.gradients(), *expected)
    trainer.state = own
    trainer.wrap(trainer.setting.cap)
    trainer.step()
    return said


def rank_function(trainer: Trainer, folder: Path) -> None:
    at, victim = trainer.dice.choice(MATRICES), _victim(trainer)
    kind, named = trainer.dice.choice(("raises", "negative")), trainer.dice.random() < 0.5
    usual: Any = trainer.state.config.rank

    def rank(name: str, shape: tuple[int, ...]) -> Any:
        if victim and (name == at or (not named and shape == SHAPES[at])):
            if kind == "raises":
                raise LookupError(name)
            return -1
        return usual

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
    victim = _victim(trainer)
    trainer.wrap(trainer.dice.choice([cap for cap in CAPS if cap != trainer.setting.cap]))
    given = trainer.gradients()
    with without_memory(factors, name, call) if victim else contextlib.nullcontext():
        said = trainer.interrupted(given, torch.OutOfMemoryError, DisagreementError)
    own = "OutOfMemoryError: no memory is left"
    _check_said(
        trainer, said, own, rf"DisagreementError: the allocation for a bucket failed on worker \d: {own}", victim
    )
    # Its gradient was not added to an error yet.
    trainer.buckets.pop()
    trainer.enter_void(given)
    trainer.step()
