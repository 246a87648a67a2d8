"""A peer dies, or says no more, in the middle of a step: the survivor is told in time, and loses nothing."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import batched_powerSGD_hook
from tests.support.dead_peers import (
    ALONE,
    DEATH,
    PEER,
    SLACK,
    SURVIVOR,
    TOGETHER,
    Plain,
    Replicated,
    Training,
    Way,
    interrupt,
    start_group,
    two_workers,
)  # fmt: skip
from tests.support.distributed import HUNG, on_workers
from tests.support.small import MANY, WIDTH, stack
from tests.support.training import LIMIT, batch, digest, relative, squared_error

exact: Way = functools.partial(Replicated, start_powerSGD_iter=100)
several: Way = functools.partial(Replicated, cap=MANY)
left: Way = functools.partial(Replicated, algorithm="alternating")
right: Way = functools.partial(Replicated, algorithm="alternating", start_powerSGD_iter=1)
batched: Way = functools.partial(Replicated, hook=batched_powerSGD_hook, start_powerSGD_iter=2)
# {what is interrupted: (way of training, number of the step's all-reduce, further arguments)}
CASES: dict[str, tuple[Way, int, dict[str, Any]]] = {
    "exact averaging": (exact, 0, {}),
    "first message": (Replicated, 0, {}),
    "second message": (Replicated, 1, {}),
    "one of several buckets": (several, 3, {}),
    "the last message of several buckets": (several, 5, {}),
    "left product": (left, 0, {}),
    "right product": (right, 0, {}),
    "first message of batched_powerSGD_hook": (batched, 0, {}),
    "second message of batched_powerSGD_hook": (batched, 1, {}),
    "first message of Compressor": (Plain, 0, {}),
    "second message of Compressor": (Plain, 1, {}),
    "state_dict": (Replicated, 0, {"saving": True}),
    "state_dict of Compressor": (Plain, 2, {"saving": True}),
    "silence in exact averaging": (exact, 0, {"silent": True}),
    "silence in the second message": (Replicated, 1, {"silent": True}),
    "silence in state_dict": (Replicated, 3, {"saving": True, "silent": True}),
    "silence in Compressor": (Plain, 1, {"silent": True}),
}
# The others wait for the process group's timeout once more.
SLOW = ("silence in exact averaging", "silence in Compressor")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
@on_workers(2, casualties=[PEER])
def test_survivor_is_told_in_time_and_loses_nothing(worker: int, world_size: int, name: str, tmp_path: Path) -> None:
    way, message, options = CASES[name]
    with two_workers(tmp_path, worker, options.get("silent", False)):
        survive(worker, tmp_path, way, message, compressed="exact" not in name, **options)


def survive(
    worker: int, folder: Path, way: Way, message: int, *, compressed: bool = True, silent: bool = False,
    saving: bool = False,
) -> None:  # fmt: skip
    """Train with a peer until it is gone (in a step, or in ``save()``), then alone.

    Alone in three manners: the interrupted state goes on; it loads a checkpoint from before; another object loads it.
    """
    training = way()
    for step in range(TOGETHER):
        training.step(worker, step)
    saved = training.save()
    before = training.owed()
    attempt = training.save if saving else functools.partial(training.step, worker, TOGETHER)
    interrupt(attempt, worker, message, folder, silent)
    # The step's average never reached the optimizer, so no product may be subtracted. Each element is as it was, or
    # has the gradient too.
    after = training.owed()
    G = torch.zeros_like(before) if saving else training.given()
    kept, carried = ((after - E).abs() <= 1e-6 * (before.abs().max() + G.abs().max()) for E in (before, before + G))
    assert kept.all() if saving else (kept | carried).all()
    start = time.monotonic()
    # In this order: where the last owner of a broken gloo group is a DistributedDataParallel, with or without a hook,
    # its end often waits for ever for a thread of gloo's that waits for Python's lock (torch 2.13).
    training.leave()
    start_group(folder, "alone", 0, 1, DEATH)
    assert time.monotonic() - start <= SLACK
    training.join()
    go_on(training, compressed)
    training.load(saved)
    training.leave()
    training.join()
    loaded = go_on(training, compressed)
    new = way()
    new.load(saved)
    assert go_on(new, compressed) == loaded, "something of the interrupted step is left behind"


def go_on(training: Training, compressed: bool) -> str:
    """Steps alone, in which Σ Ĝ + E = Σ G + E before. A digest of their bits."""
    E = training.owed()
    pairs = [training.step(SURVIVOR, step) for step in range(TOGETHER, TOGETHER + ALONE)]
    expected = E + torch.stack([given for given, _ in pairs]).sum(0)
    got = training.owed() + torch.stack([got for _, got in pairs]).sum(0)
    assert got.isfinite().all()
    assert relative(got, expected) <= LIMIT
    assert bool(training.owed().norm() > 0) == compressed
    return digest([*(got for _, got in pairs), training.owed()])


# Ordinary processes -------------------------------------------------------------------------------------------------


def bare(worker: int, folder: Path) -> None:
    """The same with DDP alone, which shows no all-reduce to Python: the peer dies in the backward pass."""
    model = stack()
    replicas = [DistributedDataParallel(model, bucket_cap_mb=MANY)]

    def die(gradient: Tensor) -> None:
        if worker == PEER:
            os.kill(os.getpid(), signal.SIGKILL)

    def step(number: int) -> None:
        inputs, targets = batch(worker, number, width=WIDTH)
        squared_error(replicas[0](inputs), targets).backward()

    for number in range(TOGETHER):
        step(number)
    model[2].weight.register_hook(die)  # type: ignore[operator]
    interrupt(lambda: step(TOGETHER), worker, 0, folder, silent=False)
    replicas.clear()
    gc.collect()


def ordinary(worker: int, folder: Path, case: Callable[[int, Path], None]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/first.store", rank=worker, world_size=2)
    with two_workers(folder, worker):
        case(worker, folder)
    dist.destroy_process_group()


# New processes, which import everything.
@pytest.mark.slow
@pytest.mark.parametrize("case", [bare, functools.partial(survive, way=several, message=3)], ids=["DDP", "hook"])
def test_survivor_s_process_ends_normally(case: Callable[[int, Path], None], tmp_path: Path) -> None:
    """With Python's own shutdown, and exit code 0; with DDP alone and with the hook."""
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=ordinary, args=(worker, tmp_path, case), daemon=True) for worker in range(2)]
    try:
        for process in workers:
            process.start()
        workers[SURVIVOR].join(HUNG)
        assert workers[SURVIVOR].exitcode == 0
    finally:
        for process in workers:
            process.kill()
            process.join()
