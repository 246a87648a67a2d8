"""``PowerSGDCallback``: several trainings, their checkpoints, and wrong use."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import on_workers
from tests.support.frameworks.job import (
    DDP,
    FSDP2,
    RANK_4,
    Job,
    be_launched,
    difference,
    forget,
    largest,
    warnings_of,
    whole,
)
from tests.support.training import complaint

pytest.importorskip("transformers")

from transformers import TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_utils import HPSearchBackend

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.transformers import PowerSGDCallback
from tests.support.frameworks.transformers import trainer_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("wrapper", "anew"), [(DDP, False), (FSDP2, False), (DDP, True)])
@on_workers(2)
def test_a_second_train_continues_or_resumes(worker: int, workers: int, wrapper: str, anew: bool, tmp_path: Path):
    be_launched(worker, workers)
    trainer = trainer_for(Job(wrapper, tmp_path, RANK_4, save=True), auto_find_batch_size=anew)
    callback = trainer.callback_handler.callbacks[-1]
    trainer.train()
    state, before, after = callback.powersgd, largest(callback.powersgd.error().values()), whole(trainer.model_wrapped)
    assert state.iteration == Job.STEPS
    errors: list[float] = []
    step = trainer.training_step

    def noting(*args: Any, **kwargs: Any) -> Any:
        errors.append(largest(callback.powersgd.error().values()))
        return step(*args, **kwargs)

    trainer.training_step = noting
    trainer.args.save_strategy = "no"
    trainer.train()
    assert (callback.powersgd is state) != anew
    # A new state begins with the mean of the workers' errors.
    assert before / 2 < errors[0] < before if anew else errors[0] == before
    assert callback.powersgd.iteration == 2 * Job.STEPS
    # The model and errors are those of the second training, but for what the last checkpoint has.
    forget(tmp_path, f"checkpoint-{Job.STEPS}")
    trainer.train(resume_from_checkpoint=True)
    assert difference(whole(trainer.model_wrapped), after) <= 1e-6
    assert callback.powersgd.iteration == Job.STEPS


@on_workers(2)
def test_wrong_use_and_folders_and_checkpoints_that_others_choose(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    job = Job(DDP, tmp_path, RANK_4, save=True)
    trainer = trainer_for(job, save_only_model=True)
    trainer.train()
    # Nothing can be resumed from it.
    assert not [*tmp_path.rglob("powersgd*")]
    trainer.add_callback(PowerSGDCallback(trainer, rank=2))
    for arguments, options, said in (
        ([torch.nn.Linear(2, 2)], {"rank": 4}, "TypeError: expected a Trainer"),
        ([trainer, PowerSGDConfig()], {"rank": 4}, "got both"),
        ([trainer], {"rnak": 4}, "'rank'"),
    ):
        assert said in complaint(PowerSGDCallback, *arguments, **options)
    assert "compressed with" in complaint(trainer.train)
    dist.barrier()
    if worker == 0:
        shutil.rmtree(tmp_path)
    dist.barrier()
    trainer_for(job).train()
    trainer = trainer_for(dataclasses.replace(job, save=False, options=None))
    train = trainer.train
    # As a subclass may have it: without the arguments of the Trainer's own.
    trainer.train = lambda: train(resume_from_checkpoint=True)
    trainer.add_callback(PowerSGDCallback(trainer, **RANK_4))
    (warning,) = warnings_of(trainer.train)
    assert "was not given a checkpoint" in warning
    trainer = trainer_for(dataclasses.replace(job, folder=tmp_path / "search"))
    # As a hyperparameter search sets it. Trials that are dictionaries belong to other backends than Optuna.
    integration_utils.is_wandb_available = lambda: True
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = dict
    trial: Any = type("Trial", (dict,), {"number": 3, "params": {}})()
    trainer.train(trial=trial)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("search/**/powersgd*"))
    assert found == [f"search/run-3/checkpoint-{step}/powersgd.pt" for step in (Job.SAVED, Job.STEPS)]


class Copying(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Takes checkpoints when they are saved, as that of Ray Train does."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.found.append(Path(args.output_dir, f"checkpoint-{state.global_step}", "powersgd.pt").is_file())


@on_workers(2)
def test_a_new_model_and_other_callbacks(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    job = Job(DDP, tmp_path, RANK_4, save=True)
    trainer = trainer_for(dataclasses.replace(job, options=None))
    trainer.model_init = job.net
    copying = Copying()
    callback = PowerSGDCallback(trainer, **RANK_4)
    for each in (copying, callback):
        trainer.add_callback(each)
    for _ in range(2):
        trainer.train()
        # Errors of another model do not belong to this one.
        assert callback.powersgd.iteration == Job.STEPS  # type: ignore[union-attr]
    assert copying.found == [True] * 4
