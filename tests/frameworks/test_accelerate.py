"""``compress(accelerator, model)``: what the table in docs/frameworks.md does not show."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run
from tests.support.frameworks.checks import exported, largest, refused, warnings_of
from tests.support.frameworks.job import ADAM, BATCH, DDP, FSDP2, MICRO_BATCHES, RANK_4, ZERO2, Data, Job, be_launched
from tests.support.frameworks.table import TIMEOUT, difference

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


def backward(accelerator: Any, *models: Any) -> None:
    """One backward pass of each model, on other inputs in each worker."""
    torch.manual_seed(dist.get_rank())
    for model in models:
        accelerator.backward(model(torch.randn(8, 32), torch.randn(8, 8))["loss"])


def _several_models(worker: int, workers: int, folder: str) -> dict[str, Any]:
    be_launched(worker, workers)
    from powersgd_triton import PowerSGDConfig
    from powersgd_triton.integrations.accelerate import compress
    from tests.support.frameworks.accelerate import accelerator_for

    found: dict[str, Any] = {}
    job = Job(DDP, Path(folder))
    accelerator = accelerator_for(job)
    found["unprepared"] = refused(TypeError, compress, accelerator, job.net())
    net = job.net()
    model = accelerator.prepare(net)
    found["inner"] = refused(TypeError, compress, accelerator, net)
    found["both"] = refused(TypeError, compress, accelerator, model, PowerSGDConfig(), rank=4)
    found["unknown"] = refused(ValueError, compress, accelerator, model, rnak=4)
    state = compress(accelerator, model, **RANK_4)
    found["same"] = compress(accelerator, model) is state
    found["other"] = refused(ValueError, compress, accelerator, model, rank=2)
    found["hooks"] = len(accelerator._save_model_state_pre_hook), len(accelerator._load_model_state_pre_hook)
    backward(accelerator, model)
    accelerator.save_state(f"{folder}/one")
    found["one"] = sorted(path.name for path in Path(folder, "one").glob("powersgd*"))
    other = accelerator.prepare(job.net())
    second = compress(accelerator, other, rank=2, min_compression_rate=1)
    backward(accelerator, other)
    accelerator.save_state(f"{folder}/two")
    found["two"] = sorted(path.name for path in Path(folder, "two").glob("powersgd*"))
    assert state is not None
    assert second is not None
    means = [s.state_dict()["matrices"] for s in (state, second)]
    backward(accelerator, model, other)
    found["quiet"] = warnings_of(lambda: accelerator.load_state(f"{folder}/two"))
    again = [s.state_dict()["matrices"] for s in (state, second)]
    found["loaded"] = max(
        (one[name]["error"] - two[name]["error"]).abs().max().item()
        for one, two in zip(means, again, strict=True)
        for name in one
        if "error" in one[name]
    )
    # Without the state: errors are zero, and a warning says so.
    dist.barrier()
    if worker == 0:
        shutil.rmtree(f"{folder}/two/powersgd_0")
    dist.barrier()
    found["warned"] = warnings_of(lambda: accelerator.load_state(f"{folder}/two"))
    found["zero"] = largest(state.error().values())
    found["kept"] = largest(second.error().values())
    accelerator.free_memory()
    third = accelerator.prepare(job.net())
    compress(accelerator, third, **RANK_4)
    backward(accelerator, third)
    accelerator.save_state(f"{folder}/freed")
    found["freed"] = sorted(path.name for path in Path(folder, "freed").glob("powersgd*"))
    return found


def test_several_models_and_wrong_use(tmp_path: Path):
    for found in run(_several_models, 2, str(tmp_path), timeout=TIMEOUT):
        assert "accelerator.prepare" in found["unprepared"]
        assert "accelerator.prepare" in found["inner"]
        assert "got both" in found["both"]
        assert "'rank'" in found["unknown"]
        assert found["same"]
        assert "compressed with" in found["other"]
        assert found["hooks"] == (1, 1)
        assert found["one"] == ["powersgd.pt"]
        assert found["two"] == ["powersgd_0", "powersgd_1"]
        assert found["quiet"] == []
        assert found["loaded"] < 1e-7
        (warning,) = found["warned"]
        assert "errors start at zero" in warning
        assert found["zero"] == 0
        assert found["kept"] > 0
        assert found["freed"] == ["powersgd.pt"]


def _without_state(worker: int, workers: int, folder: str, wrapper: str) -> float:
    be_launched(worker, workers)
    from tests.support.frameworks.accelerate import train

    job = Job(wrapper, Path(folder), RANK_4, save=True)
    uninterrupted = train(job)
    dist.barrier()
    if worker == 0:
        for path in Path(folder).glob("powersgd*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()
    return difference(train(dataclasses.replace(job, save=False, resume=True)), uninterrupted)


@pytest.mark.parametrize("wrapper", [DDP, FSDP2])
def test_resuming_without_the_state_is_another_training(wrapper: str, tmp_path: Path):
    # Otherwise the column "resumed" of the table would show nothing.
    for found in run(_without_state, 2, str(tmp_path), wrapper, timeout=TIMEOUT):
        assert 1e-4 < found < 1


def _loss_scale(worker: int, workers: int, scaled: bool) -> dict[str, torch.Tensor]:
    be_launched(worker, workers)
    from powersgd_triton.integrations.accelerate import compress
    from tests.support.frameworks.accelerate import accelerator_for

    job = Job(DDP, Path())
    accelerator = accelerator_for(job)
    if scaled:
        # Accelerate has a scaler on GPUs only. The scale doubles in every step.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    net = job.net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.01))
    state = compress(accelerator, model, **RANK_4)
    assert state is not None
    for _ in range(4):
        backward(accelerator, model)
        optimizer.step()
        optimizer.zero_grad()
    return {**state.error(), **{f"parameter {name}": p.detach() for name, p in net.named_parameters()}}


def test_the_error_follows_the_loss_scale():
    # The scale is a power of two, so that the errors are equal but for the order of rounding.
    for scaled, plain in zip(
        run(_loss_scale, 2, True, timeout=TIMEOUT), run(_loss_scale, 2, False, timeout=TIMEOUT), strict=True
    ):
        assert difference(scaled, plain) < 1e-6


def _one_process(worker: int, workers: int) -> bool:
    be_launched(worker, workers)
    from powersgd_triton.integrations.accelerate import compress
    from tests.support.frameworks.accelerate import accelerator_for

    job = Job(DDP, Path())
    accelerator = accelerator_for(job)
    return compress(accelerator, accelerator.prepare(job.net()), rank=4) is None


def test_one_process_has_nothing_to_compress():
    assert run(_one_process, 1, timeout=TIMEOUT) == [True]


def _exports(worker: int, workers: int, folder: str) -> dict[str, dict[str, bool]]:
    be_launched(worker, workers)
    from safetensors.torch import load_file

    from powersgd_triton.integrations.accelerate import compress
    from tests.support.frameworks.accelerate import accelerator_for

    job = Job(ZERO2, Path(folder), parameters="int2")
    accelerator = accelerator_for(job)
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
        accelerator.save_model(model, f"{folder}/saved")
        accelerator.wait_for_everyone()
        return load_file(f"{folder}/saved/model.safetensors")

    return {
        "state dict": exported(model, lambda: accelerator.get_state_dict(model)),
        "saved": exported(model, saved),
    }


def test_exports_of_deepspeeds_parameters(tmp_path: Path):
    pytest.importorskip("deepspeed")
    for found in run(_exports, 2, str(tmp_path), timeout=TIMEOUT):
        for export in found.values():
            assert export == {"differs": True, "exact": True, "left": True}
