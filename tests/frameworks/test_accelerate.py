"""``compress(accelerator, model)``: what the table in docs/frameworks.md does not show."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import on_workers
from tests.support.frameworks.checks import exported, largest, refused, remove_states, warnings_of
from tests.support.frameworks.job import ADAM, BATCH, DDP, FSDP2, MICRO_BATCHES, RANK_4, ZERO2, Data, Job, be_launched
from tests.support.frameworks.table import difference

pytest.importorskip("accelerate")

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations import accelerate as adapter
from tests.support.frameworks import accelerate

compress: Any = adapter.compress
pytestmark = pytest.mark.slow


def accelerator_for(worker: int, workers: int, job: Job) -> Any:
    be_launched(worker, workers)
    return accelerate.accelerator_for(job)


def backward(accelerator: Any, *models: Any) -> None:
    """One backward pass of each model, on other inputs in each worker."""
    torch.manual_seed(dist.get_rank())
    for model in models:
        accelerator.backward(model(torch.randn(8, 32), torch.randn(8, 8))["loss"])


@on_workers(2)
def test_several_models_and_wrong_use(worker: int, workers: int, tmp_path: Path):
    def saved(name: str) -> list[str]:
        accelerator.save_state(str(tmp_path / name))
        return sorted(path.name for path in (tmp_path / name).glob("powersgd*"))

    job = Job(DDP, tmp_path)
    accelerator = accelerator_for(worker, workers, job)
    net = job.net()
    assert "accelerator.prepare" in refused(TypeError, compress, accelerator, net)
    model = accelerator.prepare(net)
    assert "accelerator.prepare" in refused(TypeError, compress, accelerator, net)
    assert "got both" in refused(TypeError, compress, accelerator, model, PowerSGDConfig(), rank=4)
    assert "'rank'" in refused(ValueError, compress, accelerator, model, rnak=4)
    state = compress(accelerator, model, **RANK_4)
    assert compress(accelerator, model) is state
    assert "compressed with" in refused(ValueError, compress, accelerator, model, rank=2)
    assert len(accelerator._save_model_state_pre_hook) == len(accelerator._load_model_state_pre_hook) == 1
    backward(accelerator, model)
    assert saved("one") == ["powersgd.pt"]
    other = accelerator.prepare(job.net())
    second = compress(accelerator, other, rank=2, min_compression_rate=1)
    backward(accelerator, other)
    assert saved("two") == ["powersgd_0", "powersgd_1"]
    before = [s.state_dict()["matrices"] for s in (state, second)]
    backward(accelerator, model, other)
    assert warnings_of(lambda: accelerator.load_state(f"{tmp_path}/two")) == []
    after = [s.state_dict()["matrices"] for s in (state, second)]
    for one, two in zip(before, after, strict=True):
        assert all((one[name]["error"] - two[name]["error"]).abs().max() < 1e-7 for name in one if "error" in one[name])
    # Without a state: errors are zero, and a warning says so.
    remove_states(tmp_path / "two", "powersgd_0")
    (warning,) = warnings_of(lambda: accelerator.load_state(f"{tmp_path}/two"))
    assert "errors start at zero" in warning
    assert largest(state.error().values()) == 0
    assert largest(second.error().values()) > 0
    accelerator.free_memory()
    third = accelerator.prepare(job.net())
    compress(accelerator, third, **RANK_4)
    backward(accelerator, third)
    assert saved("freed") == ["powersgd.pt"]


@pytest.mark.parametrize("wrapper", [DDP, FSDP2])
@on_workers(2)
def test_resuming_without_the_state_is_another_training(worker: int, workers: int, wrapper: str, tmp_path: Path):
    # Otherwise the column "resumed" of the table would show nothing.
    be_launched(worker, workers)
    job = Job(wrapper, tmp_path, RANK_4, save=True)
    uninterrupted = accelerate.train(job)
    remove_states(tmp_path)
    assert 1e-4 < difference(accelerate.train(dataclasses.replace(job, save=False, resume=True)), uninterrupted) < 1


@on_workers(2)
def test_the_error_follows_the_loss_scale(worker: int, workers: int):
    def trained(scaled: bool) -> dict[str, torch.Tensor]:
        job = Job(DDP, Path())
        accelerator = accelerator_for(worker, workers, job)
        if scaled:
            # Accelerate has a scaler on GPUs only. The scale doubles in every step.
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        net = job.net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.01))
        state = compress(accelerator, model, **RANK_4)
        for _ in range(4):
            backward(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
        return {**state.error(), **{f"parameter {name}": p.detach() for name, p in net.named_parameters()}}

    # The scale is a power of two, so that the errors are equal but for the order of rounding.
    assert difference(trained(scaled=True), trained(scaled=False)) < 1e-6


@on_workers(1)
def test_one_process_has_nothing_to_compress(worker: int, workers: int):
    job = Job(DDP, Path())
    accelerator = accelerator_for(worker, workers, job)
    assert compress(accelerator, accelerator.prepare(job.net()), rank=4) is None


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@on_workers(2)
def test_exports_of_deepspeeds_parameters(worker: int, workers: int, tmp_path: Path):
    from safetensors.torch import load_file

    job = Job(ZERO2, tmp_path, parameters="int2")
    accelerator = accelerator_for(worker, workers, job)
    net = job.net()
    data = torch.utils.data.DataLoader(Data(), batch_size=BATCH)
    model, optimizer, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), **ADAM), data)
    compress(accelerator, model, **RANK_4)
    for _ in range(2 * MICRO_BATCHES):
        with accelerator.accumulate(model):
            backward(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()

    def saved() -> dict[str, torch.Tensor]:
        accelerator.save_model(model, f"{tmp_path}/saved")
        accelerator.wait_for_everyone()
        return load_file(f"{tmp_path}/saved/model.safetensors")

    exported(model, lambda: accelerator.get_state_dict(model))
    exported(model, saved)
