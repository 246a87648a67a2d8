"""``PowerSGDCallback``: what the table in docs/frameworks.md does not show."""

from __future__ import annotations

import dataclasses
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

from tests.support.distributed import run
from tests.support.frameworks.checks import exported, largest, refused, warnings_of
from tests.support.frameworks.job import DDP, FSDP2, RANK_4, SAVED, STEPS, ZERO2, Job, be_launched, whole
from tests.support.frameworks.table import TIMEOUT, difference

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def test_the_trainer_has_what_the_callback_needs():
    # A release that renames one of these must fail here, and not train or resume without compression.
    from transformers import Trainer, TrainingArguments

    assert [*inspect.signature(Trainer.train).parameters][:3] == ["self", "resume_from_checkpoint", "trial"]
    assert [*inspect.signature(Trainer._get_output_dir).parameters] == ["self", "trial"]
    assert "save_only_model" in {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {"world_size", "process_index"} <= {name for name, _ in inspect.getmembers(TrainingArguments)}
    source = inspect.getsource(Trainer)
    assert source.index("self._save_checkpoint(model, trial)") < source.index("self.callback_handler.on_save(")


def _trainer(job: Job, **options: Any) -> tuple[Any, Any]:
    from powersgd_triton.integrations.transformers import PowerSGDCallback
    from tests.support.frameworks.transformers import trainer_for

    trainer = trainer_for(job, **options)
    callback = PowerSGDCallback(trainer, **RANK_4)
    trainer.add_callback(callback)
    return trainer, callback


def _wrong_use(worker: int, workers: int, folder: str) -> dict[str, str]:
    be_launched(worker, workers)
    from powersgd_triton import PowerSGDConfig
    from powersgd_triton.integrations.transformers import PowerSGDCallback

    job = Job(DDP, Path(folder))
    trainer, _ = _trainer(job)
    trainer.add_callback(PowerSGDCallback(trainer, rank=2))
    return {
        "model": refused(TypeError, PowerSGDCallback, job.net(), rank=4),
        "both": refused(TypeError, PowerSGDCallback, trainer, PowerSGDConfig(), rank=4),
        "unknown": refused(ValueError, PowerSGDCallback, trainer, rnak=4),
        "two": refused(ValueError, trainer.train),
    }


def test_wrong_use(tmp_path: Path):
    for found in run(_wrong_use, 2, str(tmp_path), timeout=TIMEOUT):
        assert "expected a Trainer" in found["model"]
        assert "got Net" in found["model"]
        assert "got both" in found["both"]
        assert "'rank'" in found["unknown"]
        assert "compressed with" in found["two"]


def _second_train(worker: int, workers: int, folder: str, wrapper: str) -> dict[str, Any]:
    be_launched(worker, workers)
    trainer, callback = _trainer(Job(wrapper, Path(folder), RANK_4, save=True), save_total_limit=1)
    trainer.train()
    first, before = callback.powersgd, largest(callback.powersgd.error().values())
    iterations = first.iteration
    rotated = sorted(path.name for path in Path(folder).iterdir() if path.name.startswith("checkpoint"))
    errors: list[float] = []
    step = trainer.training_step

    def noting(*args: Any, **kwargs: Any) -> Any:
        if not errors:
            errors.append(largest(callback.powersgd.error().values()))
        return step(*args, **kwargs)

    trainer.training_step = noting
    trainer.train()
    return {
        "same": callback.powersgd is first,
        "continues": errors == [before],
        "iterations": (iterations, first.iteration),
        "folders": rotated,
        "saved": [any(Path(folder, name).rglob("powersgd*")) for name in rotated],
    }


@pytest.mark.parametrize("wrapper", [DDP, FSDP2])
def test_a_second_train_continues_and_old_checkpoints_go(wrapper: str, tmp_path: Path):
    for found in run(_second_train, 2, str(tmp_path), wrapper, timeout=TIMEOUT):
        assert found["same"]
        assert found["continues"]
        assert found["iterations"] == (STEPS, 2 * STEPS)
        assert found["folders"] == [f"checkpoint-{STEPS}"]
        assert found["saved"] == [True]


def _resume(worker: int, workers: int, folder: str, wrapper: str) -> dict[str, Any]:
    be_launched(worker, workers)
    from powersgd_triton.integrations.transformers import PowerSGDCallback

    job = Job(wrapper, Path(folder), RANK_4, save=True)
    trainer, callback = _trainer(job)
    trainer.train()
    uninterrupted = whole(trainer.model_wrapped)
    dist.barrier()
    if worker == 0:
        shutil.rmtree(Path(folder, f"checkpoint-{STEPS}"))
    dist.barrier()
    found: dict[str, Any] = {}
    if wrapper == ZERO2:
        # The Trainer itself cannot do this, with or without compression. If it can, test it as below.
        trainer, _ = _trainer(dataclasses.replace(job, save=False))
        trainer.pop_callback(PowerSGDCallback)
        trainer.train()
        refused(AttributeError, trainer.train)
    else:
        # The model and errors of this trainer are those after the last step.
        trainer.train(resume_from_checkpoint=True)
        found["same"] = difference(whole(trainer.model_wrapped), uninterrupted)
        found["iterations"] = callback.powersgd.iteration
    trainer, callback = _trainer(dataclasses.replace(job, save=False, resume=True))
    trainer.train(resume_from_checkpoint=str(Path(folder, f"checkpoint-{SAVED}")))
    found["other"] = difference(whole(trainer.model_wrapped), uninterrupted)
    dist.barrier()
    if worker == 0:
        for path in [*Path(folder, f"checkpoint-{SAVED}").rglob("powersgd*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()
    trainer, callback = _trainer(dataclasses.replace(job, save=False, resume=True))
    checkpoint = str(Path(folder, f"checkpoint-{SAVED}"))
    found["warned"] = warnings_of(lambda: trainer.train(resume_from_checkpoint=checkpoint))
    found["without"] = difference(whole(trainer.model_wrapped), uninterrupted)
    found["still on"] = largest(callback.powersgd.error().values())
    return found


@pytest.mark.parametrize("wrapper", [DDP, FSDP2, ZERO2])
def test_resumes_from_a_checkpoint(wrapper: str, tmp_path: Path):
    if wrapper == ZERO2:
        pytest.importorskip("deepspeed")
    for found in run(_resume, 2, str(tmp_path), wrapper, timeout=TIMEOUT):
        assert found.get("same", 0) <= 1e-6
        assert found.get("iterations", STEPS) == STEPS
        assert found["other"] <= 1e-6
        # A checkpoint that was written without compression.
        (warning,) = found["warned"]
        assert "errors start at zero" in warning
        assert 1e-4 < found["without"] < 1
        assert found["still on"] > 0


def _chosen_by_train(worker: int, workers: int, folder: str) -> list[str]:
    be_launched(worker, workers)
    from powersgd_triton.integrations.transformers import PowerSGDCallback
    from tests.support.frameworks.transformers import trainer_for

    job = Job(DDP, Path(folder), RANK_4, save=True)
    trainer, _ = _trainer(job)
    trainer.train()
    trainer = trainer_for(dataclasses.replace(job, save=False))
    train = trainer.train
    # As a subclass may have it: without the arguments of the Trainer's own.
    trainer.train = lambda: train(resume_from_checkpoint=True)
    trainer.add_callback(PowerSGDCallback(trainer, **RANK_4))
    return warnings_of(trainer.train)


def test_a_checkpoint_that_a_subclass_chooses_is_noticed(tmp_path: Path):
    for warned in run(_chosen_by_train, 2, str(tmp_path), timeout=TIMEOUT):
        (warning,) = warned
        assert "was not given a checkpoint" in warning


class Trial(dict[str, Any]):
    """A trial of a hyperparameter search, as Optuna's."""

    number = 3
    params: Mapping[str, Any] = MappingProxyType({})


def _trial(worker: int, workers: int, folder: str) -> list[str]:
    be_launched(worker, workers)
    trainer, _ = _trainer(Job(DDP, Path(folder), RANK_4, save=True))
    from transformers.integrations import integration_utils
    from transformers.trainer_utils import HPSearchBackend

    # As a hyperparameter search sets it. Trials that are dictionaries belong to other backends than Optuna.
    integration_utils.is_wandb_available = lambda: True
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = dict
    trainer.train(trial=Trial())
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("powersgd*"))


def test_trials_have_folders_of_their_own(tmp_path: Path):
    for found in run(_trial, 2, str(tmp_path), timeout=TIMEOUT):
        assert found == [f"run-3/checkpoint-{step}/powersgd.pt" for step in (SAVED, STEPS)]


def _save_only_model(worker: int, workers: int, folder: str) -> list[Path]:
    be_launched(worker, workers)
    trainer, _ = _trainer(Job(DDP, Path(folder), RANK_4, save=True), save_only_model=True)
    trainer.train()
    return list(Path(folder).rglob("powersgd*"))


def test_nothing_is_saved_where_nothing_can_resume(tmp_path: Path):
    assert run(_save_only_model, 2, str(tmp_path), timeout=TIMEOUT) == [[], []]


def _one_process(worker: int, workers: int, folder: str) -> bool:
    be_launched(worker, workers)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    trainer, callback = _trainer(Job(DDP, Path(folder), RANK_4, save=True))
    trainer.train()
    trained = {name: torch.isfinite(p).all() for name, p in whole(trainer.model).items()}
    return callback.powersgd is None and all(trained.values()) and trainer.state.global_step == STEPS


def test_one_process_trains_without_compression(tmp_path: Path):
    assert run(_one_process, 1, str(tmp_path), timeout=TIMEOUT) == [True]


def _exports(worker: int, workers: int, folder: str) -> dict[str, bool]:
    be_launched(worker, workers)
    from safetensors.torch import load_file

    trainer, _ = _trainer(Job(ZERO2, Path(folder), RANK_4, parameters="int2"))
    trainer.train()

    def saved() -> dict[str, torch.Tensor]:
        trainer.save_model(f"{folder}/saved")
        dist.barrier()
        (file,) = Path(folder, "saved").glob("*.safetensors")
        return load_file(file)

    return exported(trainer.model_wrapped, saved)


def test_exports_of_deepspeeds_parameters(tmp_path: Path):
    pytest.importorskip("deepspeed")
    for found in run(_exports, 2, str(tmp_path), timeout=TIMEOUT):
        assert found == {"differs": True, "exact": True, "left": True}
