"""``PowerSGDCallback``: what the table in docs/frameworks.md does not show."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import on_workers
from tests.support.frameworks.checks import exported, largest, refused, remove_states, warnings_of
from tests.support.frameworks.job import DDP, FSDP2, RANK_4, SAVED, STEPS, ZERO2, Job, be_launched, whole
from tests.support.frameworks.table import difference

pytest.importorskip("transformers")

from transformers import Trainer, TrainingArguments
from transformers.integrations import integration_utils
from transformers.trainer_utils import HPSearchBackend

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.transformers import PowerSGDCallback
from tests.support.frameworks.transformers import trainer_for

pytestmark = pytest.mark.slow
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def test_the_trainer_has_what_the_callback_needs():
    # A release that renames one of these must fail here, and not train or resume without compression.

    assert [*inspect.signature(Trainer.train).parameters][:3] == ["self", "resume_from_checkpoint", "trial"]
    assert [*inspect.signature(Trainer._get_output_dir).parameters] == ["self", "trial"]
    assert "save_only_model" in {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {"world_size", "process_index"} <= {name for name, _ in inspect.getmembers(TrainingArguments)}
    source = inspect.getsource(Trainer)
    assert source.index("self._save_checkpoint(model, trial)") < source.index("self.callback_handler.on_save(")


def prepared(job: Job, **options: Any) -> tuple[Any, Any]:
    """A trainer with its callback."""
    trainer = trainer_for(job, **options)
    callback = PowerSGDCallback(trainer, **RANK_4)
    trainer.add_callback(callback)
    return trainer, callback


@on_workers(2)
def test_wrong_use(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    job = Job(DDP, tmp_path)
    trainer, _ = prepared(job)
    trainer.add_callback(PowerSGDCallback(trainer, rank=2))
    said = refused(TypeError, PowerSGDCallback, job.net(), rank=4)
    assert "expected a Trainer" in said
    assert "got Net" in said
    assert "got both" in refused(TypeError, PowerSGDCallback, trainer, PowerSGDConfig(), rank=4)
    assert "'rank'" in refused(ValueError, PowerSGDCallback, trainer, rnak=4)
    assert "compressed with" in refused(ValueError, trainer.train)


@pytest.mark.parametrize("wrapper", [DDP, FSDP2])
@on_workers(2)
def test_a_second_train_continues_and_old_checkpoints_go(worker: int, workers: int, wrapper: str, tmp_path: Path):
    be_launched(worker, workers)
    trainer, callback = prepared(Job(wrapper, tmp_path, RANK_4, save=True), save_total_limit=1)
    trainer.train()
    first, before = callback.powersgd, largest(callback.powersgd.error().values())
    assert first.iteration == STEPS
    # Worker 0 removes old checkpoints.
    dist.barrier()
    assert [path.name for path in tmp_path.glob("checkpoint*")] == [f"checkpoint-{STEPS}"]
    assert [*Path(tmp_path, f"checkpoint-{STEPS}").rglob("powersgd*")]
    dist.barrier()
    errors: list[float] = []
    step = trainer.training_step

    def noting(*args: Any, **kwargs: Any) -> Any:
        if not errors:
            errors.append(largest(callback.powersgd.error().values()))
        return step(*args, **kwargs)

    trainer.training_step = noting
    trainer.train()
    assert callback.powersgd is first
    assert errors == [before]
    assert first.iteration == 2 * STEPS


@pytest.mark.parametrize("wrapper", [DDP, FSDP2, pytest.param(ZERO2, marks=needs_deepspeed)])
@on_workers(2)
def test_resumes_from_a_checkpoint(worker: int, workers: int, wrapper: str, tmp_path: Path):
    be_launched(worker, workers)
    job = Job(wrapper, tmp_path, RANK_4, save=True)
    trainer, callback = prepared(job)
    trainer.train()
    uninterrupted = whole(trainer.model_wrapped)
    dist.barrier()
    if worker == 0:
        shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    dist.barrier()
    if wrapper == ZERO2:
        # The Trainer itself cannot do this, with or without compression. If it can, test it as below.
        trainer, _ = prepared(dataclasses.replace(job, save=False))
        trainer.pop_callback(PowerSGDCallback)
        trainer.train()
        refused(AttributeError, trainer.train)
    else:
        # The model and errors of this trainer are those after the last step.
        trainer.train(resume_from_checkpoint=True)
        assert difference(whole(trainer.model_wrapped), uninterrupted) <= 1e-6
        assert callback.powersgd.iteration == STEPS
    resuming, checkpoint = dataclasses.replace(job, save=False, resume=True), tmp_path / f"checkpoint-{SAVED}"
    trainer, callback = prepared(resuming)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert difference(whole(trainer.model_wrapped), uninterrupted) <= 1e-6
    # A checkpoint that was written without compression.
    remove_states(checkpoint)
    trainer, callback = prepared(resuming)
    (warning,) = warnings_of(lambda: trainer.train(resume_from_checkpoint=str(checkpoint)))
    assert "errors start at zero" in warning
    assert 1e-4 < difference(whole(trainer.model_wrapped), uninterrupted) < 1
    assert largest(callback.powersgd.error().values()) > 0


@on_workers(2)
def test_a_checkpoint_that_a_subclass_chooses_is_noticed(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    job = Job(DDP, tmp_path, RANK_4, save=True)
    trainer, _ = prepared(job)
    trainer.train()
    trainer = trainer_for(dataclasses.replace(job, save=False))
    train = trainer.train
    # As a subclass may have it: without the arguments of the Trainer's own.
    trainer.train = lambda: train(resume_from_checkpoint=True)
    trainer.add_callback(PowerSGDCallback(trainer, **RANK_4))
    (warning,) = warnings_of(trainer.train)
    assert "was not given a checkpoint" in warning


class Trial(dict[str, Any]):
    """A trial of a hyperparameter search, as Optuna's."""

    number = 3
    params: Mapping[str, Any] = MappingProxyType({})


@on_workers(2)
def test_trials_have_folders_of_their_own(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    trainer, _ = prepared(Job(DDP, tmp_path, RANK_4, save=True))
    # As a hyperparameter search sets it. Trials that are dictionaries belong to other backends than Optuna.
    integration_utils.is_wandb_available = lambda: True
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = dict
    trainer.train(trial=Trial())
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("powersgd*"))
    assert found == [f"run-3/checkpoint-{step}/powersgd.pt" for step in (SAVED, STEPS)]


@on_workers(2)
def test_nothing_is_saved_where_nothing_can_resume(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    trainer, _ = prepared(Job(DDP, tmp_path, RANK_4, save=True), save_only_model=True)
    trainer.train()
    assert not [*tmp_path.rglob("powersgd*")]


@on_workers(1)
def test_one_process_trains_without_compression(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    trainer, callback = prepared(Job(DDP, tmp_path, RANK_4, save=True))
    trainer.train()
    assert callback.powersgd is None
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert trainer.state.global_step == STEPS


@needs_deepspeed
@on_workers(2)
def test_exports_of_deepspeeds_parameters(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    from safetensors.torch import load_file

    trainer, _ = prepared(Job(ZERO2, tmp_path, RANK_4, parameters="int2"))
    trainer.train()

    def saved() -> dict[str, torch.Tensor]:
        trainer.save_model(f"{tmp_path}/saved")
        dist.barrier()
        (file,) = Path(tmp_path, "saved").glob("*.safetensors")
        return load_file(file)

    exported(trainer.model_wrapped, saved)
