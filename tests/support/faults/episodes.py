"""Faults that all workers survive: each is injected between ordinary steps, and every step is entered in a ledger."""

import dataclasses
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.distributed import PROCESS_GROUP_TIMEOUT, regroup
from tests.support.faults.local import Local
from tests.support.faults.saved import resume
from tests.support.faults.trainer import BIASES, CAPS, MATRICES, SHAPES, Gradients, Setting, Trainer

INF, NAN = float("inf"), float("nan")
LARGEST = torch.finfo(torch.float32).max


KINDS = ("lost", "hung", "poisoned")
Problems = list[str]
"""What went wrong in one injection of a fault, each with one of ``KINDS`` before it."""


def problems(trainer: Any) -> Problems:
    found = {"lost": trainer.lost, "poisoned": trainer.poisoned}
    return [f"{kind}: {said}, with {trainer.setting}" for kind, each in found.items() for said in each]


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

    def __call__(self, worker: int, world_size: int, times: int, folder: Path) -> list[Problems]:
        """A case for ``run_cases``: so many episodes of some steps before, the fault, and a step or two after it.

        In a group of its own, so that collectives that a fault has left open are not another one's.
        """
        regroup(folder / f"{self.title}.store", worker, world_size, PROCESS_GROUP_TIMEOUT.total_seconds())
        found, dice = list[Problems](), random.Random(self.title)
        trainer: Any = (Local if self.local else Trainer)(worker, world_size, dice)
        for _ in range(times):
            setting = Setting.draw(dice, scaled=self.scaled, algorithm=self.algorithm)
            trainer.lost, trainer.poisoned = [], []
            start = time.monotonic()
            try:
                self._episode(trainer, setting, folder)
            except Exception:
                # Whoever waited in vain hung; whoever got anything else lost the run. The others are not waited for.
                late = time.monotonic() - start >= PROCESS_GROUP_TIMEOUT.total_seconds()
                return [*found, [f"{'hung' if late else 'lost'}: {setting}: {traceback.format_exc()}"]]
            found.append(problems(trainer))
        return found

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
