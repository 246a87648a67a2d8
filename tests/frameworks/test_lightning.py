"""``PowerSGD`` for Lightning's Trainer: several fits, kinds of checkpoints and models, and wrong use."""

from __future__ import annotations

import contextlib
import functools
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import on_workers
from tests.support.frameworks.job import DDP, FSDP1, FSDP2, LIMIT, RANK_4, ZERO2, Job, be_launched, difference
from tests.support.small import complaint

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.lightning import PowerSGD
from tests.support.frameworks.lightning import CHECKPOINT, Loader, Module, train, trainer_for

pytestmark = pytest.mark.slow


@on_workers(2)
def test_wrong_use(worker: int, workers: int):
    be_launched(worker, workers)
    job = Job(DDP, options=RANK_4)
    assert "got both" in complaint(PowerSGD, PowerSGDConfig(), rank=4)
    assert "got int" in complaint(PowerSGD, 4)
    assert "'rank'" in complaint(PowerSGD, rnak=4)
    two = trainer_for(job, callbacks=[PowerSGD(rank=4), PowerSGD(rank=2)])
    assert "compressed with" in complaint(two.fit, Module(job), Loader())


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
    assert not callback.powersgd
    trainer.fit(module, Loader())
    # Lightning with FSDP, and ZeRO 2 by itself, average the gradients of each micro-batch.
    expected = Job.STEPS * (1 if wrapper == DDP else Job.MICRO_BATCHES)
    assert errors[0] == (0, 0.0)
    assert callback.powersgd.iteration == expected
    last = mean()
    assert last > 0
    errors.clear()
    trainer.fit_loop.epoch_loop.max_steps = 2 * Job.STEPS
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, Loader())
    assert errors[0][0] == expected
    assert errors[0][1] == pytest.approx(last, rel=1e-5)
    assert callback.powersgd.iteration == 2 * expected
    # Worker 0 removes old checkpoints.
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == [f"step={2 * Job.STEPS}.ckpt"]


@on_workers(2)
def test_checkpoints_of_one_file_have_sharded_states_too(worker: int, workers: int, tmp_path: Path):
    # Not with FSDP1, whose whole state torch itself cannot gather on CPUs: state_dict() ends in a segmentation fault.
    be_launched(worker, workers)
    options = {"save_distributed_checkpoint": False, "process_group_backend": "gloo"}
    job = Job(FSDP2, tmp_path, RANK_4, save=True)
    uninterrupted = train(job, ModelParallelStrategy(2, 1, **options))
    assert (tmp_path / CHECKPOINT).is_file()
    assert difference(train(job.resumed(), ModelParallelStrategy(2, 1, **options)), uninterrupted) <= LIMIT


@on_workers(2)
def test_one_worker_that_averages_has_nothing_to_compress(worker: int, workers: int):
    """The sizes that Lightning chooses on one node: one worker that averages, with tensor parallelism in it."""
    be_launched(worker, workers)

    class Replicated(Module):
        def configure_model(self) -> None:
            assert self.device_mesh["data_parallel"].size() == 1

    job = Job(DDP, options=RANK_4)
    trainer, module = trainer_for(job, ModelParallelStrategy(process_group_backend="gloo")), Replicated(job)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(module, Loader())
    assert trainer.callbacks[0].powersgd is None
    assert ("powersgd: off, since gradients are averaged over one worker only" in printed.getvalue()) == (worker == 0)


@on_workers(2)
def test_the_package_pytorch_lightning(worker: int, workers: int):
    """Its trainer takes our callback too, which it does not know as its own."""
    package: Any = pytest.importorskip("pytorch_lightning")
    be_launched(worker, workers)

    class Plain(package.LightningModule):  # type: ignore[misc,unused-ignore]
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

    callback, module = PowerSGD(**RANK_4), Plain()
    module.net = Job(DDP).net()
    strategy = package.strategies.DDPStrategy(process_group_backend="gloo")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = package.Trainer("cpu", strategy, 2, callbacks=[callback], max_steps=Job.STEPS, **quiet)
    trainer.fit(module, Loader())
    assert callback.powersgd is not None
    assert callback.powersgd.iteration == Job.STEPS


@on_workers(2)
def test_fsdp1_wrapped_by_the_module_itself(worker: int, workers: int):
    be_launched(worker, workers)
    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)

    class Inside(Module):
        def configure_model(self) -> None:
            self.net = wrap(self.net)

    class Apart(Module):
        def configure_model(self) -> None:
            for index, block in enumerate(self.net.blocks):
                self.net.blocks[index] = wrap(block)

    job = Job(FSDP1, options=RANK_4)
    trainer = trainer_for(job)
    trainer.fit(Inside(job), Loader())
    assert trainer.callbacks[0].powersgd.iteration == Job.STEPS * Job.MICRO_BATCHES
    assert "The strategy is FSDPOnCPUs" in complaint(trainer_for(job).fit, Apart(job), Loader())
