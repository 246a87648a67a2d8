"""``attach`` on gloo workers, for every wrapper: the framework's averages at full rank, checkpoints, wrong use."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.core.handle import Handle
from powersgd_triton.core.telemetry import StepRecord
from tests.support.distributed import folder
from tests.support.fsdp1_training import wrapped
from tests.support.sharded_training import (
    FULL_RANK,
    RANK_2,
    Net,
    batch,
    full_mesh,
    hybrid_mesh,
    in_one_group,
    outcome,
    replica_mesh,
    replicated,
    sharded,
    whole,
)
from tests.support.small import complaint
from tests.support.training import flat, relative

WRAPPERS: dict[str, Callable[[Net], Any]] = {
    "DDP": DistributedDataParallel,
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "DDP of a compiled model": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "FSDP1": wrapped,
    "FSDP2": lambda model: sharded(model, full_mesh(dist.get_world_size())),
    "HSDP": lambda model: sharded(model, hybrid_mesh(2, dist.get_world_size() // 2)),
    "replicate": lambda model: replicated(model, replica_mesh(dist.get_world_size())),
}


def steps(model: Any, worker: int, numbers: range, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Train, and return this worker's parameters."""
    for step in numbers:
        tokens, targets = batch(worker, step)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sgd(model: Any) -> torch.optim.Optimizer:
    # Without momentum, so that the optimizer has no state to save.
    return torch.optim.SGD(model.parameters(), lr=0.05)


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return relative(flat({n: whole(p) for n, p in ours.items()}), flat({n: whole(p) for n, p in theirs.items()}))


def every_wrapper(worker: int, world_size: int, *, wrapper: str) -> dict[str, Any]:
    """Full rank against the wrapper alone; a run that is saved and resumed against one that is not."""
    wrap = WRAPPERS[wrapper]
    plain, ours = wrap(Net()), wrap(Net())
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        state = attach(ours, FULL_RANK)
    optimizer, other_optimizer = sgd(plain), sgd(ours)
    steps(plain, worker, range(3), optimizer)
    steps(ours, worker, range(3), other_optimizer)
    native = difference(steps(ours, worker, range(3, 6), other_optimizer), steps(plain, worker, range(3, 6), optimizer))

    first = wrap(Net())
    state_2 = attach(first, rank=2, min_compression_rate=1)
    records: list[StepRecord] = []
    if worker == 0:
        # The other worker does not hear of it.
        state_2.telemetry(records.append, every=1)
    optimizer = sgd(first)
    steps(first, worker, range(3), optimizer)
    resumed = wrap(Net())
    state_3 = attach(resumed, RANK_2)
    with torch.no_grad():
        for parameter, source in zip(resumed.parameters(), first.parameters(), strict=True):
            parameter.copy_(source)
    with folder(worker) as path:
        missing = complaint(state_3.load, path)
        none = state_3.load(path, missing_ok=True)
        state_2.save(f"{path}/checkpoint/2")
        report = state_3.load(f"{path}/checkpoint/2")
        error = errors(state_2), errors(state_3)
        # A second time, over what is there.
        state_3.save(f"{path}/checkpoint/2")
    ahead = steps(first, worker, range(3, 6), optimizer)
    # Where the framework does not say which bucket is the last one, looking at the error ends the step.
    norm = math.hypot(*(float(error.norm()) for error in own_errors(state_2).values()))
    return {
        "native": native, "resumed": difference(steps(resumed, worker, range(3, 6), sgd(resumed)), ahead),
        "far from native": difference(ahead, steps(plain, worker, range(0), optimizer)),
        "said": said.getvalue(), "same": attach(ours, FULL_RANK) is state and attach(ours) is state,
        "other": complaint(attach, ours, rank=3), "both": complaint(attach, ours, FULL_RANK, rank=3),
        "missing": missing, "none": none, "loaded": report is not None and len(report.loaded),
        "records": [dataclasses.asdict(record) for record in records], "bytes": state_2.report().bytes_per_step,
        "norm": norm,
        "iterations": (state.iteration, state_2.iteration, state_3.iteration), "error": error,
        "compression": state.report().compression, "size": state_2.compression_stats()[0],
    }  # fmt: skip


def own_errors(state: Handle) -> dict[str, torch.Tensor]:
    """This worker's, as the engine has them."""
    state._engine.finish()
    return state._engine.memory.error(state._engine.step)


def errors(state: Handle) -> float:
    return sum(float(error.abs().sum()) for error in state.error().values())


class Holder(nn.Module):
    """A model that holds the wrapped one, which it must not be confused with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DistributedDataParallel(nn.Linear(4, 4))


def wrong_use(worker: int, world_size: int) -> dict[str, Any]:
    hooked = DistributedDataParallel(nn.Linear(4, 4))
    hooked.register_comm_hook(None, allreduce_hook)
    model = DistributedDataParallel(nn.Linear(40, 40))
    state = attach(model, rank=2)
    copied = copy.deepcopy(model)
    wrong: Any = {"rank": 4}
    budget = PowerSGDConfig(bytes_per_step=1) if worker == 1 else PowerSGDConfig()
    with folder(worker) as path:
        (Path(path) / "file").touch()
        unwritable = complaint(state.save, f"{path}/file")
    return {
        "not wrapped": complaint(attach, nn.Linear(4, 4)),
        "holder": complaint(attach, Holder()),
        "no model": complaint(attach, wrong),
        "no config": complaint(attach, DistributedDataParallel(nn.Linear(4, 4)), wrong),
        "hooked": complaint(attach, hooked),
        "a budget that one worker cannot keep": complaint(attach, DistributedDataParallel(nn.Linear(40, 40)), budget),
        "unknown": complaint(attach, DistributedDataParallel(nn.Linear(4, 4)), rnk=4),
        "a copy has no hook": attach(copied, rank=2) is not state,
        "unwritable": unwritable,
    }


def loss_scale(worker: int, world_size: int) -> dict[str, float]:
    """A loss scale of 8 gives the gradients of the loss without it, eight times as large."""
    gradients = []
    for scale in (1.0, 8.0):
        model = DistributedDataParallel(Net())
        attach(model, RANK_2, loss_scale=lambda scale=scale: scale)
        for step in range(3):
            tokens, targets = batch(worker, step)
            model.zero_grad()
            (scale * F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())).backward()
        gradients.append({n: p.grad / scale for n, p in model.named_parameters() if p.grad is not None})
    return {"difference": difference(*gradients)}


def interrupted_save(worker: int, world_size: int) -> dict[str, Any]:
    """A save that ends between its two moves leaves the old state, which is found."""
    model = WRAPPERS["FSDP2"](Net())
    state, optimizer = attach(model, RANK_2), sgd(model)
    steps(model, worker, range(1), optimizer)
    with folder(worker) as path:
        state.save(path)
        before = errors(state)
        steps(model, worker, range(1, 3), optimizer)
        original = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if self.suffix == ".new":
                raise OSError("the disk is gone")
            return original(self, target)

        with mock.patch.object(Path, "rename", rename):
            said = complaint(state.save, path)
        report = state.load(path)
        found = {"said": said, "loaded": report is not None, "iteration": state.iteration, "difference": errors(state)}
        state.save(path)
        left = sorted(file.name for file in Path(path).iterdir())
        dist.barrier()
        if worker == 0:
            shutil.rmtree(f"{path}/powersgd")
        dist.barrier()
        gone = complaint(state.load, path)
    return {**found, "before": before, "left": left, "gone": gone}


def shards_of_worker_0(worker: int, world_size: int) -> dict[str, Any]:
    """All shards have the same shape, so that only the values tell whose they are."""
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(64, 64, bias=False), mesh=full_mesh(world_size))
    state = attach(model, rank=2)
    model(torch.randn(8, 64, generator=torch.Generator().manual_seed(worker))).square().sum().backward()
    own = state.state_dict()
    file = io.BytesIO()
    torch.save(own, file)
    files = [file.getvalue()]
    dist.broadcast_object_list(files, 0)
    said = complaint(state.load_state_dict, torch.load(io.BytesIO(files[0]), weights_only=False))
    return {"said": said, "own": complaint(state.load_state_dict, own)}


def other_wrapper(worker: int, world_size: int) -> dict[str, str]:
    """The state of another wrapper is not taken for none."""
    states = {name: attach(WRAPPERS[name](Net()), RANK_2) for name in ("DDP", "FSDP2")}
    said = {}
    for name, other in (("DDP", "FSDP2"), ("FSDP2", "DDP")):
        with folder(worker) as path:
            states[name].save(path)
            said[name] = complaint(states[other].load, path, missing_ok=True)
    return said


def part_of_the_workers(worker: int, world_size: int) -> dict[str, Any]:
    """The first worker has no model. The others save and load without it."""
    halves = DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [3, 4])
    meshes = {
        "FSDP2": DeviceMesh("cpu", [1, 2, 3, 4]),
        "HSDP": DeviceMesh("cpu", torch.arange(1, 5).view(2, 2), mesh_dim_names=("replicate", "shard")),
        "two models": halves[worker > 2],
    }
    found: dict[str, Any] = {}
    with folder(worker) as path:
        for name, mesh in meshes.items():
            if worker == 0:
                continue
            models = sharded(Net(), mesh), sharded(Net(), mesh)
            state, resumed = (attach(model, RANK_2) for model in models)
            steps(models[0], worker, range(3), sgd(models[0]))
            place = f"{path}/{name} {worker > 2 and name == 'two models'}"
            state.save(place)
            report = resumed.load(place)
            means = (saved["error"] for saved in (state.state_dict(), resumed.state_dict()))
            found[name] = difference(*means), report is not None and len(report.loaded)
    return found


def of_another_replica(worker: int, world_size: int) -> str:
    """Replicas have the same shards, but process groups of their own."""
    model: Any = fully_shard(nn.Linear(64, 64, bias=False), mesh=hybrid_mesh(world_size, 1))
    state = attach(model, rank=2)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    files: list[Any] = [None] * world_size
    dist.all_gather_object(files, file.getvalue())
    return complaint(state.load_state_dict, torch.load(io.BytesIO(files[1 - worker]), weights_only=False))


def fewer_rows_than_workers(worker: int, world_size: int) -> dict[str, Any]:
    """A state goes from shards, some of them without a row, to whole replicas, and back."""
    found = {}
    meshes = {"sharded": full_mesh(world_size), "replicated": hybrid_mesh(world_size, 1)}
    with folder(worker) as path:
        for source, target in (("sharded", "replicated"), ("replicated", "sharded")):
            models: list[Any] = [fully_shard(nn.Linear(25, 1, bias=False), mesh=meshes[m]) for m in (source, target)]
            state, other = (attach(model, rank=1, min_compression_rate=0.1, wire_dtype="int4") for model in models)
            for step in range(2):
                data = torch.randn(8, 25, generator=torch.Generator().manual_seed(10 * step + worker))
                models[0](data).square().sum().backward()
            state.save(f"{path}/{source}")
            said = complaint(other.load, f"{path}/{source}")
            # One row has an error because of its format on the wire.
            errors = [whole(saved.state_dict()["error"]["weight"]) for saved in (state, other)]
            found[source] = said, relative(*errors), float(errors[0].norm())
    return found


def one_worker(worker: int, world_size: int) -> dict[str, str]:
    said = {}
    for name in ("DDP", "FSDP2"):
        model = WRAPPERS[name](Net())
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            attach(model, rank=2)
        steps(model, worker, range(2), sgd(model))
        said[name] = output.getvalue()
    return said


CASES = {name: functools.partial(every_wrapper, wrapper=name) for name in WRAPPERS} | {
    "wrong use": wrong_use, "loss scale": loss_scale, "interrupted": interrupted_save,
    "shards": shards_of_worker_0, "other wrapper": other_wrapper,
    "fewer rows": fewer_rows_than_workers, "another replica": of_another_replica,
}  # fmt: skip


@functools.cache
def two() -> dict[str, list[Any]]:
    return in_one_group(CASES, 2)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_full_rank_equals_the_wrapper_alone(wrapper: str) -> None:
    for found in outcome(two(), wrapper):
        assert found["native"] <= 1e-6
        assert found["far from native"] > 1e-4


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_resumed_run_goes_on(wrapper: str) -> None:
    for found in outcome(two(), wrapper):
        assert found["resumed"] <= 1e-6
        assert found["iterations"] == (6, 6, 6)
        assert found["loaded"] > 3
        assert found["error"][0] > 0
        assert found["missing"].startswith("FileNotFoundError: there is no saved PowerSGD state")
        assert found["none"] is None


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_worker_watches_its_steps(wrapper: str) -> None:
    first, second = outcome(two(), wrapper)
    records = first["records"]
    assert [record["step"] for record in records] == [2, 3, 4, 5, 6]
    norm = math.hypot(*(layer["error_norm"] for layer in records[-1]["layers"].values()))
    assert norm == pytest.approx(first["norm"], rel=1e-4)
    for record in records:
        assert record["applied"]
        assert record["bytes"] == first["bytes"]
        times = record["milliseconds"]
        assert 0 < times["project"] + times["backproject"] < sum(times.values()) - times["step"] < times["step"]
    assert second["records"] == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_one_line_says_that_it_is_on(wrapper: str) -> None:
    first, second = outcome(two(), wrapper)
    assert first["said"].startswith("powersgd: on, rank 999; in a step each worker sends ")
    # A reduce-scatter sends half of what an all-reduce does.
    compression = first["compression"] / (2 if wrapper in ("FSDP1", "FSDP2") else 1)
    change = f"{compression:.1f}x fewer" if compression >= 1 else f"{1 / compression:.1f}x more"
    assert first["said"].endswith(f"in fp32 ({change})\n")
    assert first["said"].count("\n") == 1
    assert second["said"] == ""
    assert first["same"]
    assert "ValueError: the model is compressed with" in first["other"]
    assert "TypeError: give either a configuration or its fields; got both, with rank" in first["both"]


@pytest.mark.parametrize(
    ("attempt", "parts"),
    [
        ("not wrapped", ["TypeError", "Linear", "Wrap it first: DistributedDataParallel(model)"]),
        ("holder", ["TypeError", "Holder has one as 'inner': attach that"]),
        ("no model", ["TypeError", "got dict. Wrap it first"]),
        ("no config", ["TypeError", "PowerSGDConfig", "dict"]),
        ("hooked", ["ValueError", "has a communication hook already"]),
        ("a budget that one worker cannot keep", ["ValueError", "bytes_per_step"]),
        ("unknown", ["ValueError", "unknown key 'rnk'"]),
    ],
)
def test_wrong_use_is_explained(attempt: str, parts: list[str]) -> None:
    for found in outcome(two(), "wrong use"):
        assert all(part in found[attempt] for part in parts), found[attempt]


def test_a_copy_of_a_model_is_attached_anew() -> None:
    assert all(found["a copy has no hook"] for found in outcome(two(), "wrong use"))


def test_all_workers_hear_that_a_state_could_not_be_saved() -> None:
    first, second = outcome(two(), "wrong use")
    assert "Error" in first["unwritable"]
    assert second["unwritable"].startswith("DisagreementError: save failed on worker 0")


def test_a_loss_scale_is_attached() -> None:
    assert all(found["difference"] <= 1e-6 for found in outcome(two(), "loss scale"))


def test_an_interrupted_save_leaves_the_old_state() -> None:
    for worker, found in enumerate(outcome(two(), "interrupted")):
        assert found["said"].startswith("OSError" if worker == 0 else "DisagreementError: save failed on worker 0")
        assert found["loaded"]
        assert found["iteration"] == 1
        assert found["difference"] == pytest.approx(found["before"], rel=0.5)
        assert found["left"] == ["powersgd"]
        assert found["gone"].startswith("FileNotFoundError")


def test_shards_of_another_worker_are_told_by_their_values() -> None:
    for found in outcome(two(), "shards"):
        assert found["said"].startswith(
            "ValueError: the saved errors of 'weight' are neither whole nor this worker's own"
        )
        assert found["own"] == "nothing"


def test_the_state_of_another_wrapper_is_not_taken_for_none() -> None:
    for found in outcome(two(), "other wrapper"):
        assert "has powersgd.pt and not powersgd: the state of another wrapper" in found["DDP"]
        assert "has powersgd and not powersgd.pt: the state of another wrapper" in found["FSDP2"]


def test_the_shard_of_another_replica_is_loaded() -> None:
    assert outcome(two(), "another replica") == ["nothing", "nothing"]


def test_shards_without_a_row_are_saved_and_loaded() -> None:
    for found in outcome(two(), "fewer rows"):
        for said, difference, size in found.values():
            assert said == "nothing"
            assert size > 0
            assert difference <= 1e-6


def test_a_part_of_the_workers_saves_and_loads_alone() -> None:
    first, *others = outcome(in_one_group({"part": part_of_the_workers}, 5), "part")
    assert first == {}
    for found in others:
        assert found.keys() == {"FSDP2", "HSDP", "two models"}
        assert all(far <= 1e-6 and loaded > 3 for far, loaded in found.values())


def test_one_worker_is_told_that_nothing_is_sent() -> None:
    (found,) = outcome(in_one_group({"one": one_worker}, 1), "one")
    for said in found.values():
        assert (
            said == "powersgd: gradients are averaged over 1 worker only, so that nothing is sent and nothing saved\n"
        )
