"""``PowerSGD`` for Lightning's Trainer: what the table in docs/frameworks.md does not show."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run
from tests.support.frameworks import table
from tests.support.frameworks.checks import largest, refused, warnings_of
from tests.support.frameworks.job import (
    DDP,
    FSDP1,
    FSDP2,
    FULL_RANK,
    MICRO_BATCHES,
    RANK_4,
    STEPS,
    ZERO2,
    Job,
    be_launched,
    whole,
)
from tests.support.frameworks.table import BF16_LIMIT, LIMIT, TIMEOUT, difference

pytest.importorskip("lightning")
pytestmark = pytest.mark.slow


def test_lightning_has_what_the_callback_needs():
    # A release that renames one of these must fail here, and not train or resume without compression.
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    assert isinstance(inspect.getattr_static(Trainer, "distributed_sampler_kwargs"), property)
    assert isinstance(inspect.getattr_static(Trainer, "ckpt_path"), property)
    assert "scaler" in inspect.signature(MixedPrecision).parameters
    assert [*inspect.signature(Callback.on_save_checkpoint).parameters] == [
        "self",
        "trainer",
        "pl_module",
        "checkpoint",
    ]
    assert "self.strategy.save_checkpoint(checkpoint, filepath" in inspect.getsource(Trainer.save_checkpoint)
    for strategy in (FSDPStrategy, ModelParallelStrategy):
        assert [*inspect.signature(strategy.save_checkpoint).parameters][:3] == ["self", "checkpoint", "filepath"]
        # What is left in the checkpoint says afterwards whether the state goes beside it.
        assert 'checkpoint.pop("callbacks' not in inspect.getsource(strategy.save_checkpoint)
    source = inspect.getsource(_CheckpointConnector.dump_checkpoint)
    assert source.index('"state_dict": self') < source.index("call._call_callbacks_on_save_checkpoint")


def test_fsdp1():
    assert table.measure("Lightning", FSDP1).problems() == []


def test_mixed_precision_with_deepspeed():
    cell = table.measure("Lightning", ZERO2, bf16=True)
    assert max(cell.full_rank, cell.resumed) <= BF16_LIMIT


def _refusals(worker: int, workers: int) -> dict[str, str]:
    be_launched(worker, workers)
    from powersgd_triton import PowerSGDConfig
    from powersgd_triton.integrations.lightning import PowerSGD
    from tests.support.frameworks.lightning import Loader, Module, strategy_for, trainer_for

    job = Job(DDP, Path(), RANK_4)
    two = trainer_for(job, callbacks=[PowerSGD(rank=4), PowerSGD(rank=2)])
    zero = Job(ZERO2, Path())
    return {
        "both": refused(TypeError, PowerSGD, PowerSGDConfig(), rank=4),
        "number": refused(TypeError, PowerSGD, 4),
        "unknown": refused(ValueError, PowerSGD, rnak=4),
        "two": refused(ValueError, two.fit, Module(job), Loader()),
        # Lightning's own: the strategies that are tested with pretended GPUs.
        "fsdp": refused(ValueError, trainer_for, Job(DDP, Path()), "fsdp"),
        "deepspeed": refused(
            RuntimeError, trainer_for(zero, strategy_for(zero), accelerator="cpu").fit, Module(zero), Loader()
        ),
    }


def test_wrong_use_and_what_lightning_leaves_to_gpus():
    for found in run(_refusals, 2, timeout=TIMEOUT):
        assert "got both" in found["both"]
        assert "got int" in found["number"]
        assert "'rank'" in found["unknown"]
        assert "compressed with" in found["two"]
        assert "requires a GPU" in found["fsdp"]
        assert "only supported on CUDA GPUs" in found["deepspeed"]


def _second_fit(worker: int, workers: int, folder: str, wrapper: str) -> dict[str, Any]:
    be_launched(worker, workers)
    from lightning.pytorch.callbacks import ModelCheckpoint

    from powersgd_triton.integrations.lightning import PowerSGD
    from tests.support.frameworks.lightning import Loader, Module, trainer_for

    job = Job(wrapper, Path(folder), RANK_4)
    errors: list[tuple[int, float]] = []

    class Noting(Module):
        def training_step(self, batch: Any) -> Any:
            errors.append((callback.powersgd.iteration, mean()))
            return super().training_step(batch)

    def mean() -> float:
        """Size of the mean error, which is what a state has."""
        state = callback.powersgd.state_dict()
        found = state.get("error") or {n: p["error"] for n, p in state["matrices"].items() if "error" in p}
        return sum(float(e.full_tensor().norm() if hasattr(e, "full_tensor") else e.norm()) for e in found.values())

    callback: Any = PowerSGD(**RANK_4)
    rotated = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=1)
    trainer = trainer_for(job, callbacks=[callback, rotated], enable_checkpointing=True)
    module = Noting(job)
    trainer.validate(module, Loader(), verbose=False)
    before = callback.powersgd
    trainer.fit(module, Loader())
    first = callback.powersgd
    last, iterations = mean(), first.iteration
    started = errors[0]
    errors.clear()
    trainer.fit_loop.epoch_loop.max_steps = 2 * STEPS
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, Loader())
    # Worker 0 removes old checkpoints.
    dist.barrier()
    return {
        "validated": before is None,
        "started": started,
        "continued": (errors[0], last),
        "iterations": (iterations, callback.powersgd.iteration),
        "checkpoints": sorted(path.name for path in Path(folder).iterdir()),
    }


@pytest.mark.parametrize("wrapper", [DDP, FSDP2, ZERO2])
def test_a_second_fit_continues_and_old_checkpoints_go(wrapper: str, tmp_path: Path):
    for found in run(_second_fit, 2, str(tmp_path), wrapper, timeout=TIMEOUT):
        assert found["validated"]
        assert found["started"] == (0, 0.0)
        (iteration, error), last = found["continued"]
        # Lightning with FSDP, and ZeRO 2 by itself, average the gradients of each micro-batch.
        expected = STEPS * (1 if wrapper == DDP else MICRO_BATCHES)
        assert iteration == expected
        assert error == pytest.approx(last, rel=1e-5)
        assert error > 0
        assert found["iterations"] == (expected, 2 * expected)
        assert found["checkpoints"] == [f"step={2 * STEPS}.ckpt"]


def _whole_checkpoint(worker: int, workers: int, folder: str) -> dict[str, Any]:
    be_launched(worker, workers)
    from lightning.pytorch.strategies import ModelParallelStrategy

    from tests.support.frameworks.lightning import CHECKPOINT, Loader, Module, parameters, trainer_for

    def strategy() -> Any:
        return ModelParallelStrategy(2, 1, save_distributed_checkpoint=False, process_group_backend="gloo")

    job = Job(FSDP2, Path(folder), RANK_4, save=True)
    trainer = trainer_for(job, strategy())
    trainer.fit(Module(job), Loader())
    uninterrupted = parameters(trainer)
    path = job.folder / CHECKPOINT
    resumed = dataclasses.replace(job, save=False, resume=True)
    trainer = trainer_for(resumed, strategy())
    trainer.fit(Module(resumed), Loader(), ckpt_path=path)
    return {"file": path.is_file(), "resumed": difference(parameters(trainer), uninterrupted)}


def test_checkpoints_of_one_file_have_sharded_states_too(tmp_path: Path):
    # Not with FSDP1, whose whole state torch itself cannot gather on CPUs: state_dict() ends in a segmentation fault.
    for found in run(_whole_checkpoint, 2, str(tmp_path), timeout=TIMEOUT):
        assert found["file"]
        assert found["resumed"] <= LIMIT


def _without_state(worker: int, workers: int, folder: str, wrapper: str) -> tuple[float, list[str], list[str]]:
    be_launched(worker, workers)
    from tests.support.frameworks.lightning import CHECKPOINT, train

    job = Job(wrapper, Path(folder), RANK_4, save=True)
    uninterrupted = train(job)
    resume = dataclasses.replace(job, save=False, resume=True)
    quiet = warnings_of(lambda: train(resume))
    dist.barrier()
    if worker == 0:
        path = Path(folder, CHECKPOINT)
        if path.is_dir():
            shutil.rmtree(path / "powersgd")
        else:
            content = torch.load(path)
            del content["callbacks"]["PowerSGD"]
            torch.save(content, path)
    dist.barrier()
    found: list[float] = []
    warned = warnings_of(lambda: found.append(difference(train(resume), uninterrupted)))
    return found[0], quiet, warned


@pytest.mark.parametrize("wrapper", [DDP, FSDP2])
def test_resuming_without_the_state_warns_and_is_another_training(wrapper: str, tmp_path: Path):
    # Otherwise the column "resumed" of the table would show nothing.
    for found, quiet, warned in run(_without_state, 2, str(tmp_path), wrapper, timeout=TIMEOUT):
        assert 1e-4 < found < 1
        assert quiet == []
        (warning,) = warned
        assert "errors start at zero" in warning


def _one_worker(worker: int, workers: int) -> list[str]:
    be_launched(worker, workers)
    from lightning.pytorch.strategies import ModelParallelStrategy

    from tests.support.frameworks.lightning import Loader, Module, trainer_for

    class Replicated(Module):
        def configure_model(self) -> None:
            assert self.device_mesh["data_parallel"].size() == 1

    job = Job(DDP, Path(), RANK_4)
    lines: list[str] = []
    trainers: list[tuple[Any, type[Module]]]
    if workers == 1:
        trainers = [(trainer_for(job, strategy), Module) for strategy in ("auto", "ddp")]
    else:
        # The sizes that Lightning chooses on one node: one worker that averages, with tensor parallelism in it.
        trainers = [(trainer_for(job, ModelParallelStrategy(process_group_backend="gloo")), Replicated)]
    for trainer, kind in trainers:
        printed = io.StringIO()
        module = kind(job)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        with contextlib.redirect_stdout(printed):
            trainer.fit(module, Loader())
        assert trainer.callbacks[0].powersgd is None
        assert difference(whole(module), before) > 1e-3
        lines.append(printed.getvalue())
    return lines


@pytest.mark.parametrize("workers", [1, 2])
def test_one_worker_says_that_there_is_nothing_to_compress(workers: int):
    for line in run(_one_worker, workers, timeout=TIMEOUT)[0]:
        assert "powersgd: off, since gradients are averaged over one worker only" in line


def _tensor_parallel(worker: int, workers: int, folder: str) -> dict[str, Any]:
    be_launched(worker, workers)
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from tests.support.frameworks.lightning import CHECKPOINT, Loader, Module, parameters, trainer_for

    class TensorParallel(Module):
        def configure_model(self) -> None:
            assert self.device_mesh is not None
            for block in self.net.blocks:
                parallelize_module(
                    block, self.device_mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )
                shard(block, mesh=self.device_mesh["data_parallel"])
            shard(self.net, mesh=self.device_mesh["data_parallel"])

    def train(job: Job) -> dict[str, torch.Tensor]:
        # torch cannot clip parameters of several meshes together.
        strategy = ModelParallelStrategy(2, 2, process_group_backend="gloo")
        trainer = trainer_for(job, strategy, gradient_clip_val=None)
        path = job.folder / CHECKPOINT if job.resume else None
        trainer.fit(TensorParallel(job), TensorLoader(), ckpt_path=path)
        return parameters(trainer)

    class TensorLoader(Loader):
        """The workers of a tensor-parallel group have the same samples."""

        def __init__(self) -> None:
            super().__init__()
            for batch in self.batches:
                for value in batch.values():
                    dist.broadcast(value, worker // 2 * 2, group=groups[worker // 2])

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = Job(FSDP2, Path(folder))
    shard: Any = fully_shard
    sharded = refused(ValueError, train, dataclasses.replace(job, options=RANK_4))
    shard = replicate
    compressed = dataclasses.replace(job, options=RANK_4, save=True)
    native, full, uninterrupted = train(job), train(dataclasses.replace(job, options=FULL_RANK)), train(compressed)
    resumed = train(dataclasses.replace(compressed, save=False, resume=True))
    return {
        "sharded": sharded,
        "full": difference(full, native),
        "compressed": difference(uninterrupted, native),
        "resumed": difference(resumed, uninterrupted),
    }


def test_tensor_parallelism(tmp_path: Path):
    for found in run(_tensor_parallel, 4, str(tmp_path), timeout=TIMEOUT):
        # The adapter for FSDP2 needs replicas for tensor parallelism.
        assert "For tensor parallelism use replicas" in found["sharded"]
        assert found["full"] <= LIMIT
        assert found["compressed"] > 1e-4
        assert found["resumed"] <= LIMIT


def _other_package(worker: int, workers: int, folder: str) -> float:
    be_launched(worker, workers)
    import pytorch_lightning
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.strategies import DDPStrategy

    from powersgd_triton.integrations.lightning import PowerSGD
    from tests.support.frameworks.lightning import CHECKPOINT, Loader

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self, job: Job) -> None:
            super().__init__()
            self.net = job.net()

        def training_step(self, batch: Any) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    def train(job: Job) -> dict[str, torch.Tensor]:
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=workers,
            strategy=DDPStrategy(process_group_backend="gloo"),
            callbacks=[PowerSGD(**RANK_4), saving],
            max_steps=STEPS,
            logger=False,
            enable_progress_bar=False,
        )
        module = Module(job)
        trainer.fit(module, Loader(), ckpt_path=job.folder / CHECKPOINT if job.resume else None)
        return whole(module)

    job = Job(DDP, Path(folder))
    uninterrupted = train(job)
    dist.barrier()
    return difference(train(dataclasses.replace(job, resume=True)), uninterrupted)


def test_the_package_pytorch_lightning(tmp_path: Path):
    pytest.importorskip("pytorch_lightning")
    for found in run(_other_package, 2, str(tmp_path), timeout=TIMEOUT):
        assert found <= LIMIT


def _loss_scale(worker: int, workers: int, scaled: bool) -> dict[str, torch.Tensor]:
    be_launched(worker, workers)
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.plugins.precision import MixedPrecision

    from tests.support.frameworks.lightning import Loader, Module, trainer_for

    class Scaled(MixedPrecision):  # type: ignore[misc,unused-ignore]
        """fp32 with a loss scale that doubles in every step."""

        def __init__(self) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
            super().__init__("16-mixed", "cpu", scaler)

        def autocast_context_manager(self) -> Any:
            return contextlib.nullcontext()

    job = Job(DDP, Path(), RANK_4)
    options: dict[str, Any] = {"precision": None} if scaled else {}
    plugins = [LightningEnvironment(), Scaled()] if scaled else [LightningEnvironment()]
    trainer = trainer_for(job, plugins=plugins, **options)
    module = Module(job)
    trainer.fit(module, Loader())
    callback: Any = trainer.callbacks[0]
    assert largest(callback.powersgd.error().values()) > 0
    return {**callback.powersgd.error(), **whole(module)}


def test_the_error_follows_the_loss_scale():
    # The scale is a power of two, so that the errors are equal but for the order of rounding.
    for scaled, plain in zip(
        run(_loss_scale, 2, True, timeout=TIMEOUT), run(_loss_scale, 2, False, timeout=TIMEOUT), strict=True
    ):
        assert difference(scaled, plain) < 1e-6


def _wrapped_inside(worker: int, workers: int) -> list[str]:
    be_launched(worker, workers)
    from torch.distributed.fsdp import FullyShardedDataParallel

    from tests.support.frameworks.lightning import Loader, Module, trainer_for

    class Inside(Module):
        def configure_model(self) -> None:
            self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"), use_orig_params=True)

    class Apart(Module):
        def configure_model(self) -> None:
            for index, block in enumerate(self.net.blocks):
                self.net.blocks[index] = FullyShardedDataParallel(
                    block, device_id=torch.device("cpu"), use_orig_params=True
                )

    job = Job(FSDP1, Path(), RANK_4)
    trainer = trainer_for(job)
    trainer.fit(Inside(job), Loader())
    callback: Any = trainer.callbacks[0]
    assert callback.powersgd.iteration == STEPS * MICRO_BATCHES
    return [refused(TypeError, trainer_for(job).fit, Apart(job), Loader())]


def test_fsdp1_wrapped_by_the_module_itself():
    for (found,) in run(_wrapped_inside, 2, timeout=TIMEOUT):
        assert "The strategy is FSDPOnCPUs" in found
