"""``PowerSGD`` for Lightning's Trainer: several fits, kinds of checkpoints and models, and wrong use."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import on_workers
from tests.support.frameworks.job import DDP, FSDP1, FSDP2, LIMIT, RANK_4, ZERO2, Job, be_launched, difference
from tests.support.sharded_training import whole
from tests.support.training import complaint

pytest.importorskip("lightning")

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.lightning import PowerSGD
from tests.support.frameworks.lightning import CHECKPOINT, Loader, Module, train, trainer_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("wrapper", [DDP, FSDP2, ZERO2])
@on_workers(2)
def test_a_second_fit_continues(worker: int, workers: int, wrapper: str):
    be_launched(worker, workers)
    errors: list[tuple[int, float]] = []

    class Noting(Module):
        def training_step(self, batch: Any) -> Any:
            errors.append((callback.powersgd.iteration, mean()))
            return super().training_step(batch)

    def mean() -> float:
        """Size of the mean error, which is what a state has."""
        state = callback.powersgd.state_dict()
        found = state.get("error") or {n: p["error"] for n, p in state["matrices"].items() if "error" in p}
        return sum(float(whole(error).norm()) for error in found.values())

    job = Job(wrapper)
    callback: Any = PowerSGD(**RANK_4)
    trainer, module = trainer_for(job, callbacks=[callback]), Noting(job)
    trainer.validate(module, Loader(), verbose=False)
    assert not callback.powersgd
    trainer.fit(module, Loader())
    # Lightning with FSDP, and ZeRO 2 by itself, average the gradients of each micro-batch.
    averages, last, begin = Job.STEPS * (1 if wrapper == DDP else Job.MICRO_BATCHES), mean(), len(errors)
    trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.max_epochs = 2 * Job.STEPS, 5
    trainer.fit(module, Loader())
    assert last > 0
    assert errors[0] == (0, 0.0)
    assert errors[begin][0] == averages
    assert errors[begin][1] == pytest.approx(last, rel=1e-5)
    assert callback.powersgd.iteration == 2 * averages


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
def test_wrong_use_and_fsdp1_wrapped_by_the_module_itself(worker: int, workers: int):
    be_launched(worker, workers)
    assert "got both" in complaint(PowerSGD, PowerSGDConfig(), rank=4)
    assert "'rank'" in complaint(PowerSGD, rnak=4)
    job = Job(FSDP1, options=RANK_4)
    two = trainer_for(Job(DDP), callbacks=[PowerSGD(rank=4), PowerSGD(rank=2)])
    assert "compressed with" in complaint(two.fit, Module(Job(DDP)), Loader())
    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)

    class Inside(Module):
        def configure_model(self) -> None:
            self.net = wrap(self.net)

    class Apart(Module):
        def configure_model(self) -> None:
            for index, block in enumerate(self.net.blocks):
                self.net.blocks[index] = wrap(block)

    trainer = trainer_for(job)
    trainer.fit(Inside(job), Loader())
    assert trainer.callbacks[0].powersgd.iteration == Job.STEPS * Job.MICRO_BATCHES
    assert "The strategy is FSDPOnCPUs" in complaint(trainer_for(job).fit, Apart(job), Loader())
