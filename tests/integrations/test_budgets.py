"""A byte budget beyond what the table tests in every wrapper: DDP's arguments and pickles, DeepSpeed's section."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from powersgd_triton.integrations import ddp
from tests.support.distributed import run
from tests.support.small import complaint
from tests.support.training import linear_stack, train

BUDGET: dict[str, Any] = {"compression": 3, "min_compression_rate": 1, "replan_every": 2}


def pickled(worker: int, _world_size: int) -> None:
    """Before the first step and after some, with a budget, and without one that is spelled out."""
    model = linear_stack(4, 48)
    state = ddp.PowerSGDState(None, start_powerSGD_iter=0, module=model, **BUDGET, wire_dtype="int8")
    assert "can be pickled after its first step" in complaint(pickle.dumps, state)
    train(model, worker, state, steps=range(5), width=48)
    other = pickle.loads(pickle.dumps(state))
    before = {tensor.name: tensor.rank for tensor in state.report().tensors}
    # Parameters are numbered without module=, in the order in which they were seen first.
    train(model, worker, other, steps=range(5, 6), width=48)
    assert {tensor.name: tensor.rank for tensor in other.report().tensors} == before
    assert len({*before.values()} - {0}) > 1
    assert ddp.PowerSGDState(None, module=model, compression=None).matrix_approximation_rank == 1


def refused_by_ddp(worker: int, _world_size: int) -> None:
    model = linear_stack(2, 48)
    several = "expected one of rank, compression and bytes_per_step; got "
    for arguments, options, pattern in (
        ((), {"compression": 3, "module": None}, "give PowerSGDState the model as module="),
        ((4,), {"compression": 3}, f"{several}rank=4, compression=3"),
        # torch's default, but given.
        ((1,), {"compression": 3}, f"{several}rank=1, compression=3"),
        ((), {"compression": 3, "bytes_per_step": 100}, "got compression=3, bytes_per_step=100"),
        ((), {"bytes_per_step": 10}, "at rank 1 this model sends"),
    ):
        said = complaint(ddp.PowerSGDState, None, *arguments, **{"module": model, **options})
        assert pattern in said, said
    state = ddp.PowerSGDState(None, lambda *_: 2, start_powerSGD_iter=2, module=model)
    said = complaint(train, model, worker, state, hook=ddp.batched_powerSGD_hook, steps=range(1), width=48)
    assert "batched_powerSGD_hook has one matrix a bucket" in said


def refused_by_deepspeed(worker: int, world_size: int) -> None:
    from powersgd_triton.integrations import deepspeed
    from tests.support.deepspeed_training import Case, engine_for, prepare

    prepare(worker, world_size)
    with engine_for(Case("rank", 1)) as engine:
        engine._config._param_dict["powersgd"] = {"bytes_per_step": 10}
        said = complaint(deepspeed.enable, engine)
        assert "1 problem" in said
        assert "at rank 1 this model sends" in said
        assert not hasattr(engine, "powersgd")


def test_ddp_pickles() -> None:
    run(pickled, 2)


def test_ddp_refuses() -> None:
    run(refused_by_ddp, 1)


def test_deepspeed_refuses() -> None:
    pytest.importorskip("deepspeed")
    run(refused_by_deepspeed, 2)
