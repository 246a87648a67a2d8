"""``PowerSGD`` for Lightning's Trainer: what the table in docs/frameworks.md does not show."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import on_workers
from tests.support.frameworks import table
from tests.support.frameworks.checks import largest, refused, remove_states, warnings_of
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
from tests.support.frameworks.table import BF16_LIMIT, LIMIT, difference

pytest.importorskip("lightning")

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.lightning import PowerSGD
from tests.support.frameworks.lightning import (
    CHECKPOINT,
    Loader,
    Module,
    parameters,
    strategy_for,
    train,
    trainer_for,
)

pytestmark = pytest.mark.slow


def test_lightning_has_what_the_callback_needs():
    # A release that renames one of these must fail here, and not train or resume without compression.

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


@on_workers(2)
def test_wrong_use_and_what_lightning_leaves_to_gpus(worker: int, workers: int):
    be_launched(worker, workers)
    job, zero = Job(DDP, Path(), RANK_4), Job(ZERO2, Path())
    assert "got both" in refused(TypeError, PowerSGD, PowerSGDConfig(), rank=4)
    assert "got int" in refused(TypeError, PowerSGD, 4)
    assert "'rank'" in refused(ValueError, PowerSGD, rnak=4)
    two = trainer_for(job, callbacks=[PowerSGD(rank=4), PowerSGD(rank=2)])
    assert "compressed with" in refused(ValueError, two.fit, Module(job), Loader())
    # Lightning's own: the strategies that are tested with pretended GPUs.
    assert "requires a GPU" in refused(ValueError, trainer_for, Job(DDP, Path()), "fsdp")
    on_cpus = trainer_for(zero, strategy_for(zero), accelerator="cpu")
    assert "only supported on CUDA GPUs" in refused(RuntimeError, on_cpus.fit, Module(zero), Loader())


@pytest.mark.parametrize("wrapper", [DDP, FSDP2, ZERO2])
@on_workers(2)
def test_a_second_fit_continues_and_old_checkpoints_go(worker: int, workers: int, wrapper: str, tmp_path: Path):
    be_launched(worker, workers)
    job = Job(wrapper, tmp_path, RANK_4)
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
    rotated = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=1)
    trainer = trainer_for(job, callbacks=[callback, rotated], enable_checkpointing=True)
    module = Noting(job)
    trainer.validate(module, Loader(), verbose=False)
    validated_without = callback.powersgd is None
    assert validated_without
    trainer.fit(module, Loader())
    # Lightning with FSDP, and ZeRO 2 by itself, average the gradients of each micro-batch.
    expected = STEPS * (1 if wrapper == DDP else MICRO_BATCHES)
    assert errors[0] == (0, 0.0)
    assert callback.powersgd.iteration == expected
    last = mean()
    assert last > 0
    errors.clear()
    trainer.fit_loop.epoch_loop.max_steps = 2 * STEPS
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, Loader())
    assert errors[0][0] == expected
    assert errors[0][1] == pytest.approx(last, rel=1e-5)
    assert callback.powersgd.iteration == 2 * expected
    # Worker 0 removes old checkpoints.
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == [f"step={2 * STEPS}.ckpt"]


@on_workers(2)
def test_checkpoints_of_one_file_have_sharded_states_too(worker: int, workers: int, tmp_path: Path):
    # Not with FSDP1, whose whole state torch itself cannot gather on CPUs: state_dict() ends in a segmentation fault.
    be_launched(worker, workers)

    def trained(job: Job, **options: Any) -> dict[str, torch.Tensor]:
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False, process_group_backend="gloo")
        trainer = trainer_for(job, strategy)
        trainer.fit(Module(job), Loader(), **options)
        return parameters(trainer)

    job = Job(FSDP2, tmp_path, RANK_4, save=True)
    uninterrupted = trained(job)
    assert (tmp_path / CHECKPOINT).is_file()
    resumed = trained(dataclasses.replace(job, save=False, resume=True), ckpt_path=tmp_path / CHECKPOINT)
    assert difference(resumed, uninterrupted) <= LIMIT


@pytest.mark.parametrize("wrapper", [DDP, FSDP2])
@on_workers(2)
def test_resuming_without_the_state_warns_and_is_another_training(
    worker: int, workers: int, wrapper: str, tmp_path: Path
):
    # Otherwise the column "resumed" of the table would show nothing.
    be_launched(worker, workers)
    job = Job(wrapper, tmp_path, RANK_4, save=True)
    uninterrupted = train(job)
    resume = dataclasses.replace(job, save=False, resume=True)
    assert warnings_of(lambda: train(resume)) == []
    path = tmp_path / CHECKPOINT
    if path.is_dir():
        remove_states(path, "powersgd")
    else:
        dist.barrier()
        content = torch.load(path)
        del content["callbacks"]["PowerSGD"]
        dist.barrier()
        if worker == 0:
            torch.save(content, path)
        dist.barrier()
    found: list[float] = []
    (warning,) = warnings_of(lambda: found.append(difference(train(resume), uninterrupted)))
    assert "errors start at zero" in warning
    assert 1e-4 < found[0] < 1


@on_workers(1, 2)
def test_one_worker_says_that_there_is_nothing_to_compress(worker: int, workers: int):
    be_launched(worker, workers)

    class Replicated(Module):
        def configure_model(self) -> None:
            assert self.device_mesh["data_parallel"].size() == 1

    # The sizes that Lightning chooses on one node: one worker that averages, with tensor parallelism in it.
    strategies = ["auto", "ddp"] if workers == 1 else [ModelParallelStrategy(process_group_backend="gloo")]
    for strategy in strategies:
        job = Job(DDP, Path(), RANK_4)
        trainer, module = trainer_for(job, strategy), (Module if workers == 1 else Replicated)(job)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            trainer.fit(module, Loader())
        assert trainer.callbacks[0].powersgd is None
        assert difference(whole(module), before) > 1e-3
        if worker == 0:
            assert "powersgd: off, since gradients are averaged over one worker only" in printed.getvalue()


@on_workers(4)
def test_tensor_parallelism(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)

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
    job = Job(FSDP2, tmp_path)
    shard: Any = fully_shard
    # The adapter for FSDP2 needs replicas for tensor parallelism.
    said = refused(ValueError, train, dataclasses.replace(job, options=RANK_4))
    assert "For tensor parallelism use replicas" in said
    shard = replicate
    compressed = dataclasses.replace(job, options=RANK_4, save=True)
    native, uninterrupted = train(job), train(compressed)
    assert difference(train(dataclasses.replace(job, options=FULL_RANK)), native) <= LIMIT
    assert difference(uninterrupted, native) > 1e-4
    resumed = train(dataclasses.replace(compressed, save=False, resume=True))
    assert difference(resumed, uninterrupted) <= LIMIT


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="it is not installed")
@on_workers(2)
def test_the_package_pytorch_lightning(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    import pytorch_lightning
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.strategies import DDPStrategy

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self, job: Job) -> None:
            super().__init__()
            self.net = job.net()

        def training_step(self, batch: Any) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    def train(job: Job) -> dict[str, torch.Tensor]:
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
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

    job = Job(DDP, tmp_path)
    uninterrupted = train(job)
    dist.barrier()
    assert difference(train(dataclasses.replace(job, resume=True)), uninterrupted) <= LIMIT


@on_workers(2)
def test_the_error_follows_the_loss_scale(worker: int, workers: int):
    be_launched(worker, workers)

    class Scaled(MixedPrecision):  # type: ignore[misc,unused-ignore]
        """fp32 with a loss scale that doubles in every step."""

        def __init__(self) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
            super().__init__("16-mixed", "cpu", scaler)

        def autocast_context_manager(self) -> Any:
            return contextlib.nullcontext()

    def trained(**options: Any) -> dict[str, torch.Tensor]:
        job = Job(DDP, Path(), RANK_4)
        trainer, module = trainer_for(job, **options), Module(job)
        trainer.fit(module, Loader())
        error = trainer.callbacks[0].powersgd.error()
        assert largest(error.values()) > 0
        return {**error, **whole(module)}

    # The scale is a power of two, so that the errors are equal but for the order of rounding.
    scaled = trained(plugins=[LightningEnvironment(), Scaled()], precision=None)
    assert difference(scaled, trained(plugins=[LightningEnvironment()])) < 1e-6


@on_workers(2)
def test_fsdp1_wrapped_by_the_module_itself(worker: int, workers: int):
    be_launched(worker, workers)

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
    said = refused(TypeError, trainer_for(job).fit, Apart(job), Loader())
    assert "The strategy is FSDPOnCPUs" in said
