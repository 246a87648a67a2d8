"""What only one worker meets, all are told before they wait for it: refused states, exceptions, failed allocations."""

from __future__ import annotations

import datetime
import pickle
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig, checkpoint
from powersgd_triton.integrations.ddp import PowerSGDState
from powersgd_triton.schemes import factors
from tests.support.checks import everything, gradients, same_bits, step
from tests.support.distributed import on_workers
from tests.support.small import RANK_2, backward, complaint, stack
from tests.support.training import digest, gradients_of

SHAPES = {"a": (16, 12), "b": (5,), "c": (8, 8), "d": (12, 16)}
VICTIM = 1
WORLD_SIZES = (2, pytest.param(3, marks=pytest.mark.slow))


def steps(compressor: Compressor, numbers: range) -> list[dict[str, Tensor]]:
    return [step(compressor, gradients(100 * number + dist.get_rank(), SHAPES)) for number in numbers]


def check_same(found: dict[str, Tensor]) -> None:
    """That all workers have the same bits."""
    everyone = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, digest(found.values()))
    assert len({*everyone}) == 1


def told(said: str, own: str, others: str) -> None:
    """The victim has its own error and the others one that names it."""
    assert said.startswith(own if dist.get_rank() == VICTIM else others), said


@on_workers(*WORLD_SIZES)
def test_a_file_that_one_worker_cannot_read_changes_nothing(worker: int, world_size: int, tmp_path: Path) -> None:
    """A file that is cut off on one worker. All are told at once, and go on."""
    model = stack()
    state = PowerSGDState(None, module=model, **RANK_2)
    again = backward(model, state)
    again()
    path = tmp_path / f"state-{worker}.pt"
    checkpoint.save(state.state_dict(), path)
    if worker == VICTIM:
        path.write_bytes(path.read_bytes()[:-100])
    said = complaint(state.load_state_dict, path)
    told(said, "ValueError: ", "ValueError: load_state_dict failed on worker 1: Value")
    again(1)
    check_same(gradients_of(model))
    assert state.iter == 2


@on_workers(*WORLD_SIZES)
def test_a_rank_function_that_fails_on_one_worker(worker: int, world_size: int) -> None:
    """It raises, or returns nonsense, on one worker. Then it works."""
    ranks = {"negative": -1, "another": 3}

    def first_and_later(what: str) -> str:
        now = [True]

        def rank(name: str, shape: Any) -> int:
            return ranks[what] if now[0] and worker == VICTIM and name == "c" else 2

        compressor = Compressor(PowerSGDConfig(rank=rank, min_compression_rate=0), SHAPES)
        said = complaint(steps, compressor, range(1))
        now[0] = False
        check_same(steps(compressor, range(2))[-1])
        return said

    own = "KeyError: 'raises'"
    told(first_and_later("raises"), own, f"DisagreementError: a step failed on worker 1: {own}")
    own = "ValueError: the rank of 'c', (8, 8), must be at least 0"
    told(first_and_later("negative"), own, f"ValueError: a step failed on worker 1: {own}")
    assert "worker 1 differs from worker 0 in rank of 'c': 3 instead of 2" in first_and_later("another")

    # DDP without ``module=`` meets a parameter only in its bucket, which need not be the first one.
    def later(name: str, shape: Any) -> int:
        return ranks["raises"] if worker == VICTIM and int(name) > 6 else 2

    state = PowerSGDState(None, **{**RANK_2, "matrix_approximation_rank": later})
    own = "KeyError: 'raises'"
    said = complaint(backward(stack(), state, find_unused_parameters=True))
    told(said, own, f"DisagreementError: a step failed on worker 1: {own}")

    def differs(name: str, shape: Any) -> int:
        return ranks["another"] if worker == VICTIM and int(name) > 6 else 2

    state = PowerSGDState(None, **{**RANK_2, "matrix_approximation_rank": differs})
    said = complaint(backward(stack(), state, find_unused_parameters=True))
    assert re.search("worker 1 differs from worker 0 in rank of '.*': 3 instead of 2", said), said


@on_workers(*WORLD_SIZES)
def test_an_allocation_that_fails_on_one_worker(worker: int, world_size: int) -> None:
    """No gradient, no error and no loaded part is lost."""
    run = Compressor(everything(), SHAPES)
    steps(run, range(2))
    saved = run.state_dict()
    resumed, untouched = Compressor(everything(), SHAPES), Compressor(everything(), SHAPES)
    assert complaint(resumed.load_state_dict, saved, strict=worker != VICTIM).endswith("strict: False instead of True")
    for compressor in (resumed, untouched):
        compressor.load_state_dict(saved)
    fill, calls = factors._fill, []

    def failing(*args: Any) -> bool:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory is left")
        return fill(*args)

    with mock.patch.object(factors, "_fill", failing if worker == VICTIM else fill):
        said = complaint(steps, resumed, range(2, 3))
    own = "OutOfMemoryError: no memory is left"
    told(said, own, f"DisagreementError: the allocation for a bucket failed on worker 1: {own}")
    assert resumed.iteration == 2
    for got, expected in zip(steps(resumed, range(2, 5)), steps(untouched, range(2, 5)), strict=True):
        assert same_bits(got, expected)


@on_workers(*WORLD_SIZES)
def test_what_was_unpickled_is_compared(worker: int, world_size: int) -> None:
    """Unpickling is no collective, so that the next step compares what was unpickled."""
    model = stack()
    state = PowerSGDState(None, module=model, **RANK_2)
    backward(model, state)()
    content = pickle.dumps(state)
    assert complaint(backward(model, pickle.loads(content))) == "nothing"
    # The same step, configuration and tensors, but other bases.
    forged = pickle.loads(content)
    if worker == VICTIM:
        for parts in forged._engine.residuals.loaded.matrices.values():
            parts["basis"].neg_()
    assert "worker 1 differs from worker 0 in saved parts of " in complaint(backward(model, forged))


@on_workers(*WORLD_SIZES)
def test_whoever_loads_alone_is_told(worker: int, world_size: int) -> None:
    """One worker loads while the others step, save, or begin their first step. Nobody waits for a timeout."""
    calls = {"first step": "a step", "step": "a step that waits for the others", "save": "state_dict"}
    for what, call in calls.items():
        group = dist.new_group(timeout=datetime.timedelta(seconds=60))
        compressor = Compressor(everything(), SHAPES, group)
        steps(compressor, range(0 if what == "first step" else 2))
        saved = compressor.state_dict()
        dist.barrier()
        start = time.monotonic()
        if worker == VICTIM:
            said = complaint(compressor.load_state_dict, saved)
        else:
            said = complaint(compressor.state_dict) if what == "save" else complaint(steps, compressor, range(2, 4))
        assert f"worker 1 is in load_state_dict and worker 0 in {call}: all workers must call it" in said
        assert time.monotonic() - start < 30
        # The next sum of the group would take the interrupted one's place on the other workers.
        said = complaint(steps, compressor, range(4, 5))
        assert ("interrupted an earlier step of this process group" in said) == (what == "step")
        dist.barrier()
