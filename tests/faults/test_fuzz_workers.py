"""Random training on gloo workers, through the DDP hook and in local steps: whatever happens, nothing is lost."""

import random
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks import live_bytes
from tests.support.distributed import HUNG, on_workers
from tests.support.faults import episodes, local_events, saved
from tests.support.faults.local import Local
from tests.support.faults.local_events import takes_steps
from tests.support.faults.trainer import BIASES, SHAPES, Gradients, Setting, Trainer
from tests.support.thinned import slow


def anything(trainer: Trainer, _folder: Path) -> None:
    """Micro-batches in each of which a worker uses some parameters, and perhaps a fault in the last one."""
    own = random.Random(trainer.dice.randrange(1 << 40) * 64 + trainer.worker)
    trained = [name for name in SHAPES if trainer.dice.random() < 0.8] or ["first"]
    name, kind = trainer.dice.choice(trained), trainer.dice.choice(("zero", "large", "inf", "nan", "overflow"))
    culprit, happens = trainer.dice.randrange(trainer.workers), trainer.dice.random() < 0.5
    # The last micro-batch uses something on all workers, so that there is a backward pass.
    micros: list[Gradients] = [
        {n: G for n, G in trainer.gradients().items() if n in trained and (n == name or own.random() < 0.8)}
        for _ in range(trainer.dice.randrange(1, 4))
    ]
    gradient = micros[-1][name]
    if happens and kind in ("zero", "large"):
        gradient *= {"zero": 0.0, "large": 1e3}[kind]
    elif happens and kind == "overflow" and name in BIASES and not trainer.setting.scaled:
        # Only the sum over the workers is not finite.
        gradient[0] = episodes.LARGEST
    elif happens and kind in ("inf", "nan") and trainer.worker == culprit:
        gradient.view(-1)[0] = float(kind)
    trainer.step(micros[-1], before=micros[:-1], spoiled=None)


EVENTS = [
    *[anything] * 8,
    *(episodes.infinite_in_a_matrix, episodes.several_in_a_row, episodes.dependent_columns, episodes.other_buckets),
    *(episodes.unused_on_all_workers, episodes.accumulation, episodes.exception_in_backward, saved.resumed),
]


def let_happen(
    trainer: Any,
    seed: int,
    events: Sequence[Any],
    folder: Path,
    share: float,
    then: Callable[[Any, Path], None] = lambda *_: None,
) -> None:
    """Events, each with something after it, and an audit after a share of them and at the end."""
    seen = list[str]()
    try:
        for event in events:
            seen.append(event.__name__)
            event(trainer, folder)
            then(trainer, folder)
            if trainer.dice.random() < share:
                trainer.audit()
            assert not trainer.lost + trainer.poisoned
        trainer.audit()
        assert not trainer.lost + trainer.poisoned
    except BaseException as error:
        raise AssertionError(
            f"seed {seed}, {trainer.state.config}, {trainer.setting}: {seen}: {trainer.lost}"
        ) from error


@pytest.mark.parametrize("seeds", [range(4), *slow([range(100, 125)])], ids=["few", "many"])
@on_workers(2, *slow([3]))
def test_nothing_is_lost(worker: int, workers: int, seeds: range, tmp_path: Path) -> None:
    several = skipped = False
    for seed in seeds:
        dice = random.Random(seed)
        trainer = Trainer(worker, workers, dice)
        trainer.begin(Setting.vary(dice))
        let_happen(trainer, seed, dice.choices(EVENTS, k=25), tmp_path, 0.3)
        several |= len(trainer.buckets) > 1
        skipped |= bool(trainer.skipped)
        trainer.unwrap()
    assert several
    assert skipped


def reloaded(trainer: Trainer, _folder: Path) -> None:
    """The state goes on from what it has saved itself."""
    trainer.audit()
    trainer.state.load_state_dict(trainer.state.state_dict())
    trainer.ledger.load(trainer.state.config, trainer.workers)
    trainer.step()


# What leaves DDP's wrapper and its state as they are: a new wrapper takes memory, and a new state would hide a leak.
LASTING = [
    *[anything] * 8,
    *(episodes.infinite_in_a_matrix, episodes.several_in_a_row, episodes.dependent_columns),
    *(episodes.unused_on_all_workers, episodes.accumulation, reloaded),
]
TENSORS_SLACK = 2 * 4096
"""Bytes of live tensors: scalars that say which steps counted are made 1024 at a time, and two such blocks may live."""

PROCESS_SLACK = 4 << 20
"""Bytes by which a process may grow: threads' stacks and allocators' arenas. One layer's gradient a step would be 2 KB
a step, 4 MB in this run; what is smaller shows in the tensors."""


@pytest.mark.slow
@on_workers(2, timeout=2 * HUNG)
def test_memory_stays_flat_in_a_long_run_with_faults(worker: int, workers: int, tmp_path: Path) -> None:
    """Measure four times, the first time after a quarter of the run."""
    dice, memory, peaks = random.Random(0), list[int](), list[int]()
    trainer = Trainer(worker, workers, dice)
    trainer.begin(Setting.draw(dice, scaled=False))
    for number, event in enumerate(dice.choices(LASTING, k=2000), 1):
        event(trainer, tmp_path)
        if number % 500 == 0:
            trainer.audit()
            trainer.optimizer.zero_grad()
            memory.append(live_bytes())
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    assert not trainer.lost + trainer.poisoned
    assert trainer.skipped
    assert max(memory) - min(memory) <= TENSORS_SLACK, memory
    assert peaks[-1] - peaks[0] <= PROCESS_SLACK, peaks


@pytest.mark.parametrize("seeds", [range(2), *slow([range(100, 200)])])
@on_workers(1, *slow([2]), 3, timeout=2 * HUNG)
def test_nothing_is_lost_in_local_steps(worker: int, workers: int, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        dice = random.Random(seed)
        local = Local(worker, workers, dice)
        local.begin()
        let_happen(local, seed, dice.choices(local_events.EVENTS, k=12), tmp_path, 0.5, takes_steps)
