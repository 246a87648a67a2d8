"""``compress(accelerator, model)``: several models and wrong use."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import on_workers
from tests.support.frameworks.job import DDP, RANK_4, Job, be_launched, forget, largest, warnings_of
from tests.support.training import complaint

pytest.importorskip("accelerate")

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations import accelerate as adapter
from tests.support.frameworks.accelerate import accelerator_for

compress: Any = adapter.compress
pytestmark = pytest.mark.slow


@on_workers(2)
def test_several_models_and_wrong_use(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    job = Job(DDP, tmp_path)
    accelerator: Any = accelerator_for(job)
    net = job.net()
    model = accelerator.prepare(net)
    assert "TypeError: " in (said := complaint(compress, accelerator, net, rank=4))
    assert "accelerator.prepare" in said
    assert "got both" in complaint(compress, accelerator, model, PowerSGDConfig(), rank=4)
    assert "ValueError: " in (said := complaint(compress, accelerator, model, rnak=4))
    assert "'rank'" in said
    state = compress(accelerator, model, **RANK_4)
    assert compress(accelerator, model) is state
    assert "ValueError: the model is compressed with" in complaint(compress, accelerator, model, rank=2)
    assert len(accelerator._save_model_state_pre_hook) == len(accelerator._load_model_state_pre_hook) == 1

    def backward(*models: Any) -> None:
        torch.manual_seed(worker)
        for model in models:
            accelerator.backward(model(torch.randn(8, 32), torch.randn(8, 8))["loss"])

    def saved(name: str) -> list[str]:
        accelerator.save_state(str(tmp_path / name))
        return sorted(path.name for path in (tmp_path / name).glob("powersgd*"))

    backward(model)
    assert saved("one") == ["powersgd.pt"]
    other = accelerator.prepare(job.net())
    second = compress(accelerator, other, rank=2, min_compression_rate=1)
    backward(other)
    assert saved("two") == ["powersgd_0", "powersgd_1"]
    before = [s.state_dict()["matrices"] for s in (state, second)]
    backward(model, other)
    assert warnings_of(lambda: accelerator.load_state(f"{tmp_path}/two")) == []
    after = [s.state_dict()["matrices"] for s in (state, second)]
    for one, two in zip(before, after, strict=True):
        assert all((one[name]["error"] - two[name]["error"]).abs().max() < 1e-7 for name in one if "error" in one[name])
    # Without a state, errors are zero.
    forget(tmp_path / "two", "powersgd_0")
    (warning,) = warnings_of(lambda: accelerator.load_state(f"{tmp_path}/two"))
    assert "errors start at zero" in warning
    assert largest(state.error().values()) == 0
    assert largest(second.error().values()) > 0
    accelerator.free_memory()
    third = accelerator.prepare(job.net())
    compress(accelerator, third, **RANK_4)
    backward(third)
    assert saved("freed") == ["powersgd.pt"]


@on_workers(1)
def test_one_process_takes_what_several_take(worker: int, workers: int, tmp_path: Path):
    be_launched(worker, workers)
    job = Job(DDP, tmp_path)
    accelerator, net = accelerator_for(job), job.net()
    trained = len([*net.parameters()])
    # As of a quantized model that is fine-tuned.
    net.register_parameter("frozen", torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False))
    state = compress(accelerator, accelerator.prepare(net), rank=4, node_group="auto")
    assert len(state.report().tensors) == trained
