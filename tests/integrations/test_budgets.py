"""A byte budget in every adapter: what a step sends, that ranks move, that workers stay equal, what is refused."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from torch import Tensor

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations import ddp
from powersgd_triton.integrations.fsdp1 import PowerSGDState
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.ranks.report import RankReport
from tests.support.distributed import run
from tests.support.fsdp1_training import compressed, train_fsdp1, wrapped
from tests.support.sharded_training import (
    STEPS,
    Net,
    full_mesh,
    full_shard,
    hybrid,
    hybrid_mesh,
    in_one_group,
    outcome,
    sharded,
)
from tests.support.sharded_training import train as train_sharded
from tests.support.small import complaint
from tests.support.training import digest, linear_stack, train

BUDGET: dict[str, Any] = {"compression": 3, "min_compression_rate": 1, "replan_every": 2}
CONFIG = PowerSGDConfig(**BUDGET, wire_dtype="int8")
TOO_SMALL = PowerSGDConfig(bytes_per_step=10, min_compression_rate=1)


def seen(
    state: Any, start: RankReport, numel: int, parameters: Iterable[Tensor], other: Any = None
) -> dict[str, Any]:  # fmt: skip
    """What is checked of a training of ``STEPS`` steps of a model with so many elements.

    ``other``: a state of the same model, into which this one is loaded.
    """
    end: RankReport = state.report()
    if other is not None:
        other.load_state_dict(state.state_dict())
    return {
        "loaded": (end if other is None else other.report()).tensors,
        "saved": end.tensors,
        "sent": 4 * state.compression_stats()[2] / STEPS,
        "budget": 4 * numel / BUDGET["compression"],
        "reported": end.bytes_per_step,
        "start": {tensor.name: tensor.rank for tensor in start.tensors},
        "end": {tensor.name: tensor.rank for tensor in end.tensors},
        "energies": [tensor.energy_sent for tensor in end.tensors if tensor.rank],
        "digest": digest(parameters),
    }


def check(results: list[Mapping[str, Any]], same: bool = True) -> None:
    for result in results:
        # Elements are counted in whole ones, bucket by bucket.
        assert result["sent"] <= result["budget"] + 4 * 8
        assert result["reported"] <= result["budget"] < 2 * result["reported"]
        assert result["start"].keys() == result["end"].keys()
        assert result["start"] != result["end"]
        assert result["loaded"] == result["saved"]
        assert result["energies"]
        assert all(share is not None and 0 < share <= 1 + 1e-5 for share in result["energies"])
    if same:
        assert all(result == results[0] for result in results)


# DistributedDataParallel --------------------------------------------------------------------------------------------


def with_ddp(worker: int, world_size: int) -> dict[str, Any]:
    model = linear_stack(4, 48)
    numel = sum(parameter.numel() for parameter in model.parameters())
    state = ddp.PowerSGDState(None, start_powerSGD_iter=0, module=model, **{**BUDGET, "wire_dtype": "int8"})
    start = state.report()
    # Several buckets, and smaller ones later: a plan belongs to parameters.
    train(model, worker, state, steps=range(STEPS), bucket_cap_mb=0.01, width=48)
    other = ddp.PowerSGDState(None, start_powerSGD_iter=0, module=model, **{**BUDGET, "wire_dtype": "int8"})
    return seen(state, start, numel, model.parameters(), other)


def pickled(worker: int, world_size: int) -> dict[str, Any]:
    """Before the first step and after some, with a budget, and without one that is spelled out."""
    model = linear_stack(4, 48)
    state = ddp.PowerSGDState(None, start_powerSGD_iter=0, module=model, **{**BUDGET, "wire_dtype": "int8"})
    refused = complaint(pickle.dumps, state)
    train(model, worker, state, steps=range(5), width=48)
    report = state.report()
    other = pickle.loads(pickle.dumps(state))
    # Parameters are numbered without module=, in the order in which they were seen first.
    train(model, worker, other, steps=range(5, 6), width=48)
    ranks = [{tensor.name: tensor.rank for tensor in one.tensors} for one in (report, other.report())]
    rank_1 = ddp.PowerSGDState(None, module=model, compression=None)
    return {"refused": refused, "ranks": ranks, "rank": rank_1.matrix_approximation_rank}


def refused_by_ddp(worker: int, world_size: int) -> dict[str, str]:
    model = linear_stack(2, 48)
    function = ddp.PowerSGDState(None, lambda *_: 2, start_powerSGD_iter=2, module=model)
    return {
        "no module": complaint(ddp.PowerSGDState, None, compression=3),
        "rank too": complaint(ddp.PowerSGDState, None, 4, compression=3, module=model),
        "rank 1 too": complaint(ddp.PowerSGDState, None, 1, compression=3, module=model),
        "both": complaint(ddp.PowerSGDState, None, compression=3, bytes_per_step=100, module=model),
        "too small": complaint(ddp.PowerSGDState, None, bytes_per_step=10, module=model),
        "batched": complaint(
            train, model, worker, function, hook=ddp.batched_powerSGD_hook, steps=range(1), width=48
        ),
    }  # fmt: skip


def test_ddp():
    check(run(with_ddp, 2))


def test_ddp_pickles():
    for seen_by_one in run(pickled, 2):
        assert "can be pickled after its first step" in seen_by_one["refused"]
        before, after = seen_by_one["ranks"]
        assert before == after
        assert len(set(after.values()) - {0}) > 1
        assert seen_by_one["rank"] == 1


def test_ddp_refuses():
    (said,) = run(refused_by_ddp, 1)
    assert "give PowerSGDState the model as module=" in said["no module"]
    assert "expected one of rank, compression and bytes_per_step; got rank=4, compression=3" in said["rank too"]
    # torch's default, but given.
    assert "expected one of rank, compression and bytes_per_step; got rank=1, compression=3" in said["rank 1 too"]
    assert "got compression=3, bytes_per_step=100" in said["both"]
    assert "at rank 1 this model sends" in said["too small"]
    assert "batched_powerSGD_hook has one matrix a bucket" in said["batched"]


# FSDP ---------------------------------------------------------------------------------------------------------------


def with_hsdp(worker: int, world_size: int) -> dict[str, Any]:
    mesh = hybrid_mesh(2, 2)
    model = Net()
    rows = [(-(-parameter.shape[0] // 2), parameter.numel() // parameter.shape[0]) for parameter in model.parameters()]
    module, state = hybrid(model, mesh, CONFIG)
    start = state.report()
    train_sharded(module, worker)
    state.check_replicas()
    return seen(state, start, sum(n * m for n, m in rows), [], hybrid(Net(), mesh, CONFIG)[1])


def with_fsdp2(worker: int, world_size: int) -> dict[str, Any]:
    model = Net()
    numel = sum(parameter.numel() for parameter in model.parameters())
    module, state = full_shard(model, full_mesh(world_size), CONFIG)
    start = state.report()
    parameters = train_sharded(module, worker).parameters.values()
    return seen(state, start, numel, parameters, full_shard(Net(), full_mesh(world_size), CONFIG)[1])


def with_fsdp1(worker: int, world_size: int) -> dict[str, Any]:
    model = Net()
    numel = sum(parameter.numel() for parameter in model.parameters())
    module, state = compressed(model, CONFIG)
    start = state.report()
    parameters = train_fsdp1(module, worker).parameters.values()
    return seen(state, start, numel, parameters, compressed(Net(), CONFIG)[1])


def refused_by_fsdp(worker: int, world_size: int) -> dict[str, str]:
    mesh = full_mesh(world_size)
    module = sharded(Net(), mesh)
    found = {
        "2": complaint(apply_powersgd, module, TOO_SMALL),
        "1": complaint(PowerSGDState, wrapped(Net()), TOO_SMALL),
    }
    # Nothing was changed: another budget is taken.
    apply_powersgd(module, CONFIG)
    return found


def test_hsdp():
    """Each shard has its own budget, and its own plan, which all its replicas have."""
    check(run(with_hsdp, 4), same=False)


def test_fsdp():
    cases = {"fsdp2": with_fsdp2, "fsdp1": with_fsdp1, "refused": refused_by_fsdp}
    results = in_one_group(cases, 2)
    check(outcome(results, "fsdp2"))
    check(outcome(results, "fsdp1"))
    for said in outcome(results, "refused"):
        assert all("at rank 1 this model sends" in text for text in said.values())


# DeepSpeed ----------------------------------------------------------------------------------------------------------


def with_deepspeed(worker: int, world_size: int) -> list[dict[str, Any]]:
    from tests.support.deepspeed_training import Case, engine_for, losses, prepare

    prepare(worker, world_size)
    found = []
    for stage in (0, 2, 3):
        with engine_for(Case("budget", stage), {**BUDGET, "wire_dtype": "int8"}) as engine:
            start = engine.powersgd.report()
            numel = sum(math.prod(shape) for shape in engine.powersgd.shapes.values())
            losses(engine, range(STEPS))
            found.append(seen(engine.powersgd, start, numel, [], engine.powersgd))
    return found


def refused_by_deepspeed(worker: int, world_size: int) -> tuple[str, bool]:
    from powersgd_triton.integrations import deepspeed
    from tests.support.deepspeed_training import Case, engine_for, prepare

    prepare(worker, world_size)
    with engine_for(Case("rank", 1)) as engine:
        engine._config._param_dict["powersgd"] = {"bytes_per_step": 10}
        return complaint(deepspeed.enable, engine), hasattr(engine, "powersgd")


def test_deepspeed():
    pytest.importorskip("deepspeed")
    for results in zip(*run(with_deepspeed, 2), strict=True):
        check(list(results))


def test_deepspeed_refuses():
    pytest.importorskip("deepspeed")
    for said, on in run(refused_by_deepspeed, 2):
        assert "1 problem" in said
        assert "at rank 1 this model sends" in said
        assert not on
