"""``attach`` on gloo workers: wrong use, folders. The table attaches every wrapper."""

import contextlib
import copy
import dataclasses
import io
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import attach
from tests.support.distributed import folder, make_test, on_workers
from tests.support.sharded_training import RANK_2, Net, check_said, mesh_of, sharded, train, whole_errors
from tests.support.training import complaint, flat, relative


def in_shards(model: Net) -> Any:
    return sharded(model, mesh_of(shard=dist.get_world_size()))


def wrong_use(worker: int, _world_size: int) -> None:
    """What is wrong is explained, on all workers."""
    hooked, inner = (DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2))
    hooked.register_comm_hook(None, allreduce_hook)
    wrong: Any = {"rank": 4}
    check_said(
        (complaint(attach, nn.Linear(4, 4)), r"TypeError.*Linear.*Wrap it first: DistributedDataParallel\(model\)"),
        (complaint(attach, nn.ModuleDict({"inner": inner})), "TypeError.*ModuleDict has one as 'inner': attach that"),
        (complaint(attach, wrong), "TypeError.*got dict. Wrap it first"),
        (complaint(attach, inner, wrong), "TypeError.*PowerSGDConfig.*dict.*compression=20"),
        (complaint(attach, hooked), "ValueError.*has a communication hook already"),
    )
    model = DistributedDataParallel(nn.Linear(40, 40))
    # Before it says that compression is on.
    with mock.patch("powersgd_triton.ops.backends.why_not_triton", return_value="no GPU"):
        assert "backend 'triton' cannot be used: no GPU" in complaint(attach, model, backend="triton")

    def fails_alone(_name: str, _shape: tuple[int, ...]) -> None:
        if worker == 1:
            raise KeyError("qkv")

    def heard(said: str, error: str) -> bool:
        return said.startswith(error) if worker == 1 else f"Error: attach failed on worker 1: {error}" in said

    # Nothing was changed, and so a second attempt may succeed.
    assert heard(complaint(attach, model, rank=2, matrices=fails_alone), "KeyError")
    alone = DistributedDataParallel(nn.Linear(4, 4))
    if worker == 1:
        alone.register_comm_hook(None, allreduce_hook)
    assert heard(complaint(attach, alone, rank=2), "ValueError: the model has a communication hook already")
    scale = (lambda: 8.0) if worker == 1 else None
    assert "loss_scale is given: True instead of False" in complaint(attach, model, rank=2, loss_scale=scale)
    state = attach(model, rank=2)
    # A copy has no hook.
    assert attach(copy.deepcopy(model), rank=2) is not state


@on_workers(1)
def test_one_worker(worker: int, world_size: int) -> None:
    """It is told that nothing is sent."""
    for wrap in (DistributedDataParallel, in_shards):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            attach(wrap(Net()), rank=2)
        assert output.getvalue().startswith("powersgd: gradients are averaged over 1 worker only, so that nothing is ")
    # The same call again, also when measured steps have changed the configuration in force.
    model, options = DistributedDataParallel(Net()), dict[str, Any](compression=4, max_overhead=0.5)
    state = attach(model, **options)
    state._engine.plan.config = dataclasses.replace(state.config, max_rank=2)
    assert attach(model, **options) is state
    assert "is compressed with" in complaint(attach, model, rank=2)


def interrupted_save(worker: int, _world_size: int) -> None:
    """A save that ends between its two moves leaves the old state. All hear of it. Another wrapper's state is seen."""
    model = in_shards(Net())
    state, of_ddp = attach(model, RANK_2), attach(DistributedDataParallel(Net()), RANK_2)
    train(model, worker, steps=range(1))
    with folder(worker) as path:
        (Path(path) / "file").touch()
        said = complaint(of_ddp.save, f"{path}/file")
        assert "Error" in said if worker == 0 else said.startswith("DisagreementError: save failed on worker 0")
        dist.barrier()
        (Path(path) / "file").unlink(missing_ok=True)
        state.save(path)
        before = float(flat(state.error()).norm())
        train(model, worker, steps=range(2))
        original = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if self.suffix == ".new":
                raise OSError("the disk is gone")
            return original(self, target)

        with mock.patch.object(Path, "rename", rename):
            said = complaint(state.save, path)
        assert said.startswith("OSError" if worker == 0 else "DisagreementError: save failed on worker 0"), said
        assert state.load(path) is not None
        assert state.iteration == 1
        assert float(flat(state.error()).norm()) == pytest.approx(before, rel=0.5)
        state.save(path)
        assert [file.name for file in Path(path).iterdir()] == ["powersgd"]
        dist.barrier()
        if worker == 0:
            (Path(path) / "powersgd").rename(Path(path) / "moved")
            for suffix in ("", ".new", ".old"):
                (Path(path) / f"powersgd{suffix}").symlink_to("moved")
        dist.barrier()
        state.save(path)
        assert sorted(file.name for file in Path(path).iterdir() if not file.is_symlink()) == ["moved", "powersgd"]
        other_wrapper = complaint(of_ddp.load, path, missing_ok=True)
        assert "has powersgd and not powersgd.pt: the state of another wrapper" in other_wrapper
        dist.barrier()
        if worker == 0:
            shutil.rmtree(f"{path}/powersgd")
        dist.barrier()
        assert complaint(state.load, path).startswith("FileNotFoundError: there is no saved PowerSGD state")
        train(model, worker, steps=range(1))
        assert state.load(path, missing_ok=True) is None
        assert state.iteration == 2
        of_ddp.save(path)
        assert "has powersgd.pt and not powersgd: the" in complaint(state.load, path, missing_ok=True)


@on_workers(5)
def test_a_part_of_the_workers_saves_and_loads_alone(worker: int, world_size: int) -> None:
    """The first worker has no model. The others save and load without it."""
    halves = DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [3, 4])
    with folder(worker) as path:
        if worker:
            mesh = halves[worker > 2]
            models = sharded(Net(), mesh), sharded(Net(), mesh)
            state, resumed = (attach(model, RANK_2) for model in models)
            train(models[0], worker, steps=range(2))
            place = f"{path}/{mesh is halves[1]}"
            state.save(place)
            assert resumed.load(place) is not None
            ours, theirs = whole_errors(resumed), whole_errors(state)
            assert relative(flat(ours), flat(theirs)) <= 1e-6
            assert flat(theirs).any()


test_two_workers = make_test([wrong_use, interrupted_save], 2)
