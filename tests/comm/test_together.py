"""What only one worker meets, all are told before they wait for it. Refused files, exceptions: see faults/alone.py."""

from __future__ import annotations

import datetime
import pickle
import re
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState
from tests.support.checks import everything, gradients, step
from tests.support.distributed import on_workers
from tests.support.training import RANK_2, backward, complaint, linear_stack

SHAPES = {"a": (16, 12), "b": (5,), "c": (8, 8), "d": (12, 16)}
VICTIM = 1
WORLD_SIZES = (2, pytest.param(3, marks=pytest.mark.slow))


def steps(compressor: Compressor, numbers: range) -> list[dict[str, Tensor]]:
    return [step(compressor, gradients(100 * number + dist.get_rank(), SHAPES)) for number in numbers]


@on_workers(*WORLD_SIZES)
def test_ranks_that_differ_on_one_worker(worker: int, world_size: int) -> None:
    """What a rank function returns is compared, where DDP without ``module=`` meets a parameter late, too."""

    def rank(name: str, shape: Any) -> int:
        return 3 if worker == VICTIM and (name == "c" or (name.isdecimal() and int(name) > 6)) else 2

    state = PowerSGDState(None, **{**RANK_2, "matrix_approximation_rank": rank})
    for said in (
        complaint(steps, Compressor(PowerSGDConfig(rank=rank, min_compression_rate=0), SHAPES), range(1)),
        complaint(backward(linear_stack(), state, find_unused_parameters=True)),
    ):
        assert re.search("worker 1 differs from worker 0 in rank of '.*': 3 instead of 2", said), said


@on_workers(*WORLD_SIZES)
def test_what_was_unpickled_is_compared(worker: int, world_size: int) -> None:
    """Unpickling is no collective, so that the next step compares what was unpickled."""
    model = linear_stack()
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
