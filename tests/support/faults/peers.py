"""Workers that differ, die or stop: the others are told, and go on from what was saved."""

import functools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from powersgd_triton import Compressor, DisagreementError, checkpoint
from powersgd_triton.core import schedule
from tests.support.distributed import regroup, run_cases, vanish
from tests.support.faults.episodes import Problems, problems
from tests.support.faults.ledger import Ledger
from tests.support.faults.local import LOST, Local
from tests.support.faults.saved import refused_step
from tests.support.faults.trainer import SHAPES, Gradients, Setting, Trainer
from tests.support.training import at_call, complaint

PATIENCE = 240.0
"""Seconds after which whoever still waits for a lost peer counts as hung."""

GROUP_TIMEOUT = {"dies": 200.0, "stops": 10.0, "dies in local steps": 200.0}


# Workers that differ --------------------------------------------------------------------------------------------------


def other_configuration(trainer: Trainer, folder: Path) -> None:
    field = trainer.dice.choice(("matrix_approximation_rank", "random_seed", "algorithm", "start_powerSGD_iter"))
    config: Any = trainer.state.config
    other: dict[str, Any] = {
        "matrix_approximation_rank": config.rank + 1,
        "random_seed": 7,
        "algorithm": {"standard": "alternating", "alternating": "standard"}[config.algorithm],
        "start_powerSGD_iter": 3,
    }
    differs = trainer.worker == trainer.dice.randrange(trainer.workers)
    _disagree(trainer, {field: other[field]} if differs else {}, 0)


def other_iteration(trainer: Trainer, folder: Path) -> None:
    steps = trainer.dice.randrange(1, 9)
    _disagree(trainer, {}, steps if trainer.worker == trainer.dice.randrange(trainer.workers) else 0)


def _disagree(trainer: Trainer, fields: dict[str, Any], steps: int) -> None:
    """A step with states of which one differs; then the step with those that agree."""
    state = trainer.new_state(**fields)
    state.iter += steps
    refused_step(trainer, state, DisagreementError)


def other_tensors(trainer: Trainer, folder: Path) -> None:
    """DDP compares shapes by itself, so this is about ``Compressor``."""
    shapes, config = dict(SHAPES), trainer.state.config
    name, kind = trainer.dice.choice(list(SHAPES)), trainer.dice.choice(("another shape", "one less", "one more"))
    if trainer.worker == trainer.dice.randrange(trainer.workers):
        if kind == "another shape":
            shapes[name] = (*shapes[name][:-1], shapes[name][-1] + 1)
        elif kind == "one less":
            del shapes[name]
        else:
            shapes["more"] = (4, 4)
    said = complaint(Compressor(config, shapes).compress, {n: torch.ones(shape) for n, shape in shapes.items()})
    if not said.startswith("DisagreementError"):
        trainer.lost.append(f"workers with other tensors say: {said}")
    trainer.step()


# Workers that are lost ------------------------------------------------------------------------------------------------


def losses(
    worker: int, world_size: int, folder: Path, *, kind: str, victims: Sequence[int], seed: int
) -> list[Problems]:
    """A case for ``run_cases``: workers are lost one after the other, and the rest goes on as a smaller group.

    Args:
        kind: "dies" (by SIGKILL), perhaps "in local steps", or "stops" (until the others have gone on without it).
        victims: which, in this order.
        seed: of all that is drawn.
    """
    found, dice = list[Problems](), random.Random(seed)
    alive = list(range(world_size))
    for victim in victims:
        # Nobody leaves a group that others are still entering.
        dist.barrier()
        name = f"{kind}-{seed}-{len(alive)}"
        regroup(folder / f"{name}.before", alive.index(worker), len(alive), GROUP_TIMEOUT[kind])
        trainer: Any = (Local if "local" in kind else Trainer)(worker, len(alive), dice)
        trainer.begin(Setting.draw(dice, scaled=False))
        for _ in range(dice.randrange(1, 4)):
            trainer.step()
        trainer.audit()
        saved = trainer.state.state_dict()
        if worker == alive[0]:
            checkpoint.save(saved, folder / f"{name}.pt")
        dist.barrier()
        done = folder / f"{name}.done"
        end = functools.partial(vanish, done if kind == "stops" else None, 2 * PATIENCE)
        start = time.monotonic()
        (_lose_local if "local" in kind else _lose)(trainer, victim, end)
        seconds = time.monotonic() - start
        alive.remove(victim)
        trainer.unwrap()
        regroup(folder / f"{name}.after", alive.index(worker), len(alive), GROUP_TIMEOUT[kind])
        trainer.regroup(checkpoint.load(folder / f"{name}.pt"))
        for _ in range(2):
            trainer.step()
        trainer.audit()
        trainer.unwrap()
        done.touch()
        hung = [f"hung: {seconds:.0f} s until the others knew"] if seconds > PATIENCE else []
        found.append([*problems(trainer), *hung])
    return found


def _lose(trainer: Trainer, victim: int, end: Callable[[], None]) -> None:
    """A step in the middle of which a worker ends. What the others gave to it they owe still."""
    at = trainer.dice.choice(list(SHAPES))
    before = trainer.owed()
    given = trainer.gradients()
    if trainer.worker == victim:
        trainer.model.at = (at, lambda _: end())
    trainer.interrupted(given, RuntimeError)
    trainer.lost += _owed_differently(trainer, before, given)


def _lose_local(local: Local, victim: int, end: Callable[[], None]) -> None:
    """Local steps until a worker ends at a message. What an exchange that does not count has sent is owed still."""
    last = local.dice.randrange(12)
    try:
        with at_call(schedule, "wait", last if local.worker == victim else -1, end, after=True):
            for _ in range(100):
                local.step()
    except RuntimeError:
        if local.moved.any() and not float((local.seen()[2] - local.kept).abs().max()) <= LOST:
            local.lost.append("the errors have changed")
        local.audit_local()
    else:
        local.lost.append("exchanges without one of the workers look complete")


def _owed_differently(trainer: Trainer, before: Gradients, given: Gradients) -> list[str]:
    """This worker's own account of a step that was begun and not applied."""
    ledger = Ledger(SHAPES, 1, trainer.state.config)
    ledger.differences([before])
    ledger.enter_void(trainer.buckets, [{name: gradient.double() for name, gradient in given.items()}])
    return ledger.differences([trainer.owed()])


def lose(kind: str, times: int, folder: Path) -> list[Problems]:
    """Lose a worker of three and then one of two, again and again. What the survivors saw of each loss."""
    dice, seen = random.Random(kind), list[Problems]()
    for number in range(-(-times // 2)):
        victims = tuple(dice.sample(range(3), 2))
        (survivor,) = {0, 1, 2} - {*victims}
        case = {kind: functools.partial(losses, kind=kind, victims=victims, seed=dice.randrange(1 << 30))}
        try:
            found = run_cases(case, 3, folder, casualties=victims, timeout=4 * PATIENCE)[kind][survivor]
        except TimeoutError as error:
            found = [[f"hung: round {number}: {error}"]]
        except RuntimeError as error:
            found = error
        seen += found if isinstance(found, list) else [[f"lost: round {number}: {found}"]]
    return seen
