"""Faults that all workers survive: each is injected between ordinary steps, and every step is entered in a ledger."""

from __future__ import annotations

import dataclasses
import random
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import checkpoint
from tests.support.distributed import PROCESS_GROUP_TIMEOUT
from tests.support.faults.local import Local
from tests.support.faults.trainer import BIASES, CAPS, MATRICES, SHAPES, Gradients, Setting, Trainer

INF, NAN = float("inf"), float("nan")
LARGEST = torch.finfo(torch.float32).max


@dataclasses.dataclass
class Tally:
    """What has become of a fault's injections, as one worker saw it."""

    injected: int = 0
    lost: int = 0
    hung: int = 0
    poisoned: int = 0
    details: list[str] = dataclasses.field(default_factory=list)

    def add(self, *, lost: list[str], poisoned: list[str], hung: list[str] = ()) -> None:  # type: ignore[assignment]
        """Count one injection."""
        self.injected += 1
        self.lost += bool(lost)
        self.poisoned += bool(poisoned)
        self.hung += bool(hung)
        self.details += [*(f"lost: {d}" for d in lost), *(f"poisoned: {d}" for d in poisoned)]
        self.details += [f"hung: {d}" for d in hung]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        title: what happens.
        outcome: what the user sees.
        inject: does it, with its step.
        scaled: whether the loss is scaled; None for at random.
        early: whether half of the injections come in a state's first step.
        algorithm: None for at random.
        local: whether it happens in local steps.
    """

    title: str
    outcome: str
    inject: Callable[[Any, Path], None]
    scaled: bool | None = None
    early: bool = False
    algorithm: str | None = None
    local: bool = False

    @property
    def __name__(self) -> str:
        return str(zlib.crc32(self.title.encode()))

    def __call__(self, worker: int, world_size: int, times: int, folder: Path) -> Tally:
        """A case for ``run_cases``: so many episodes of some steps before, the fault, and a step or two after it."""
        tally = Tally()
        dice = random.Random(self.title)
        trainer: Any = (Local if self.local else Trainer)(worker, world_size, dice)
        for _ in range(times):
            setting = Setting.draw(dice, scaled=self.scaled, algorithm=self.algorithm)
            start = time.monotonic()
            try:
                trainer.lost, trainer.poisoned = [], []
                self._episode(trainer, setting, folder)
                tally.add(lost=trainer.lost, poisoned=trainer.poisoned)
            except Exception:
                # Whoever waited in vain hung; whoever got anything else lost the run. The others are not waited for.
                late = time.monotonic() - start >= PROCESS_GROUP_TIMEOUT.total_seconds()
                reason = [f"{setting}: {traceback.format_exc()}"]
                tally.add(lost=[] if late else reason, poisoned=[], hung=reason if late else [])
                break
            if trainer.lost or trainer.poisoned:
                tally.details.append(f"… with {trainer.setting}")
        return tally

    def _episode(self, trainer: Any, setting: Setting, folder: Path) -> None:
        dice = trainer.dice
        trainer.begin(setting)
        for _ in range(0 if self.early and dice.random() < 0.5 else dice.randrange(1, 5)):
            trainer.step()
        if dice.random() < 0.5:
            trainer.audit()
        self.inject(trainer, folder)
        if dice.random() < 0.5:
            trainer.audit()
        for _ in range(dice.randrange(1, 3)):
            trainer.step()
        trainer.audit()


# Gradients that are not finite, or do not stay so ---------------------------------------------------------------------


def _put(given: Gradients, name: str, dice: random.Random, value: float) -> None:
    flat = given[name].view(-1)
    flat[dice.randrange(flat.numel())] = value


def _spoil(trainer: Trainer, name: str, value: float) -> None:
    given = trainer.gradients()
    dice = random.Random(trainer.dice.random())
    if trainer.worker == dice.randrange(trainer.workers):
        _put(given, name, dice, value)
    trainer.step(given, spoiled=[name])


def infinite_in_a_matrix(trainer: Trainer, folder: Path) -> None:
    _spoil(trainer, trainer.dice.choice(MATRICES), trainer.dice.choice((INF, -INF, NAN)))


def nan_in_a_bias(trainer: Trainer, folder: Path) -> None:
    _spoil(trainer, trainer.dice.choice(BIASES), NAN)


def overflow_in_the_last_bucket(trainer: Trainer, folder: Path) -> None:
    _spoil(trainer, "first", INF)
    assert "first" in trainer.buckets[-1]
    assert len(trainer.buckets) > 2, trainer.buckets


def several_in_a_row(trainer: Trainer, folder: Path) -> None:
    for _ in range(trainer.dice.randrange(2, 6)):
        _spoil(trainer, trainer.dice.choice(list(SHAPES)), INF)


def sum_overflows(trainer: Trainer, folder: Path) -> None:
    given = trainer.gradients()
    name = trainer.dice.choice(BIASES)
    _put(given, name, random.Random(trainer.dice.random()), LARGEST)
    trainer.step(given, spoiled=[name])


def product_overflows(trainer: Trainer, folder: Path) -> None:
    given = trainer.gradients()
    name = trainer.dice.choice(MATRICES)
    dice = random.Random(trainer.dice.random())
    if trainer.worker == dice.randrange(trainer.workers):
        given[name] = torch.full(SHAPES[name], LARGEST)
        if dice.random() < 0.5:
            given[name] *= torch.rand(SHAPES[name], generator=trainer.generator) * 2 - 1
    trainer.step(given, spoiled=None)


# Gradients that carry little ------------------------------------------------------------------------------------------


def a_layer_of_zeros(trainer: Trainer, folder: Path) -> None:
    given = trainer.gradients()
    given[trainer.dice.choice(list(SHAPES))].zero_()
    trainer.step(given)


def zeros(trainer: Trainer, folder: Path) -> None:
    for _ in range(trainer.dice.randrange(1, 4)):
        trainer.step(trainer.gradients(0.0))


def denormals(trainer: Trainer, folder: Path) -> None:
    size = 10.0 ** trainer.dice.uniform(-44, -38)
    for _ in range(trainer.dice.randrange(1, 4)):
        trainer.step(trainer.gradients(size))


def dependent_columns(trainer: Trainer, folder: Path) -> None:
    kind = trainer.dice.choice(("equal", "one column", "one row", "rank one", "one element"))
    given = trainer.gradients()
    for name in MATRICES:
        matrix = given[name].view(SHAPES[name][0], -1)
        if kind == "equal":
            matrix.copy_(matrix[:, :1].expand_as(matrix).clone())
        elif kind == "one column":
            matrix[:, 1:] = 0
        elif kind == "one row":
            matrix[1:] = 0
        elif kind == "rank one":
            matrix.copy_(torch.outer(matrix[:, 0], matrix[0]))
        else:
            matrix.view(-1)[1:] = 0
    trainer.step(given)


# What a training loop does --------------------------------------------------------------------------------------------


def unused_on_one_worker(trainer: Trainer, folder: Path) -> None:
    given = trainer.gradients()
    dice = random.Random(trainer.dice.random())
    unused = dice.sample(list(SHAPES), dice.randrange(1, 4))
    if trainer.worker == dice.randrange(trainer.workers):
        for name in unused:
            del given[name]
    trainer.step(given)


def unused_on_all_workers(trainer: Trainer, folder: Path) -> None:
    given = trainer.gradients()
    for name in trainer.dice.sample(list(SHAPES), trainer.dice.randrange(1, 4)):
        del given[name]
    trainer.step(given)


def loss_scale_changes(trainer: Trainer, folder: Path) -> None:
    for _ in range(trainer.dice.randrange(1, 5)):
        trainer.scaler.update(trainer.scaler.get_scale() * trainer.dice.choice((0.5, 2.0, 4.0, 2.0**10)))
        trainer.step()


def loss_scale_overflows(trainer: Trainer, folder: Path) -> None:
    """Until the scaler has halved the scale so often that a gradient of 2¹⁰⁸ is finite."""
    name = trainer.dice.choice(list(SHAPES))
    trainer.scaler.update(2.0 ** trainer.dice.randrange(21, 24))
    before = trainer.scaler.get_scale()
    # The same on all workers, since the sum over two would overflow once more.
    while trainer.scaler.get_scale() * 2.0**108 > LARGEST:
        given = trainer.gradients()
        if trainer.worker == 0:
            given[name].view(-1)[0] = 2.0**108
        trainer.step(given, spoiled=[name])
    assert trainer.scaler.get_scale() < before


def accumulation(trainer: Trainer, folder: Path) -> None:
    before = [trainer.gradients() for _ in range(trainer.dice.randrange(1, 5))]
    trainer.step(before=before)


def exception_in_backward(trainer: Trainer, folder: Path) -> None:
    if trainer.dice.random() < 0.25:
        resume(trainer, folder, min_compression_rate=1e9)
    for _ in range(trainer.dice.choice((1, 1, 2))):
        trainer.fail(trainer.dice.choice(list(SHAPES)))


def exception_then_save(trainer: Trainer, folder: Path) -> None:
    trainer.fail(trainer.dice.choice(list(SHAPES)))
    resume(trainer, folder)


def other_buckets(trainer: Trainer, folder: Path) -> None:
    trainer.wrap(trainer.dice.choice([cap for cap in CAPS if cap != trainer.setting.cap]))
    trainer.step()


# Saved states ---------------------------------------------------------------------------------------------------------


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
    ranks = [rank for rank in (1, 2, 3, 5) if rank != trainer.setting.rank]
    resume(trainer, folder, matrix_approximation_rank=trainer.dice.choice(ranks))
    trainer.step()


def resumed_uncompressed(trainer: Trainer, folder: Path) -> None:
    resume(trainer, folder, min_compression_rate=1e9)
    trainer.step()


def _refused(trainer: Trainer, path: Path, original: dict[str, Any]) -> None:
    """Whether a file is refused, or else gives what was saved, and the running state stays as it is."""
    before = bytes_of(trainer.state.error())
    try:
        loaded = checkpoint.load(path)
    except ValueError:
        loaded = original
    if checkpoint.flatten(loaded)[1] != checkpoint.flatten(original)[1] or bytes_of_state(loaded) != bytes_of_state(
        original
    ):
        trainer.lost.append(f"a damaged file was loaded: {path.name}")
    if bytes_of(trainer.state.error()) != before:
        trainer.lost.append("a refused file has changed the running state")
    trainer.step()


def bytes_of(named: dict[str, Tensor]) -> dict[str, list[int]]:
    """Tensors' bits, comparable."""
    return {name: tensor.contiguous().view(-1).view(torch.uint8).tolist() for name, tensor in named.items()}


def bytes_of_state(state: dict[str, Any]) -> dict[str, list[int]]:
    return bytes_of(checkpoint.flatten(state)[0])


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
    before = bytes_of(trainer.state.error())
    try:
        trainer.state.load_state_dict(other)
    except ValueError:
        pass
    else:
        trainer.lost.append(f"a {kind} state was loaded")
    if bytes_of(trainer.state.error()) != before:
        trainer.lost.append("a refused state has changed the running one")
    trainer.step()
