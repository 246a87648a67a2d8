"""The demo's ways of distributing its model."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from powersgd_triton.__main__ import main
from powersgd_triton.demo import train, zero

REFUSED = {
    "hsdp --workers 3": "hsdp arranges workers in 2 replicas; 3 is not a multiple of 2",
    "fsdp2 --arms torch": "torch's hook",
    "hsdp --arms allreduce+bf16": "with DistributedDataParallel only, not with hsdp",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_is_explained(arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    assert main(["demo", "--parallelism", *arguments.split(), "--device", "cpu", "--output", str(results)]) == 2
    assert REFUSED[arguments] in capsys.readouterr().err
    assert not results.exists()


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["fsdp1", "fsdp2", "hsdp", *(f"zero{stage}" for stage in range(4))])
def test_every_parallelism_trains_with_fewer_bytes(parallelism: str, tmp_path: Path) -> None:
    if parallelism.startswith("zero"):
        pytest.importorskip("deepspeed")
    arguments = [
        "--steps",
        "3",
        "--workers",
        "4" if parallelism == "hsdp" else "2",
        "--arms",
        "allreduce",
        "ours:4",
        "--device",
        "cpu",
    ]
    assert main(["demo", "--parallelism", parallelism, *arguments, "--output", str(tmp_path)]) == 0
    exact, ours = json.loads((tmp_path / "results.json").read_text())["arms"]
    # Up to two numbers of ZeRO itself: whether a step overflowed, and the gradient's norm.
    assert 0 <= exact["bytes_per_step"] - exact["gradient_bytes"] <= 8 * parallelism.startswith("zero")
    # The factors and the vectors. With HSDP, workers of other shards are told whether a step is finite.
    assert 8 < exact["bytes_per_step"] / ours["bytes_per_step"] < 30
    assert ours["losses"][-1] < ours["losses"][0]


def test_deepspeeds_configuration_is_that_of_the_other_demos() -> None:
    for stage in range(4):
        made = zero.configuration(stage, {"rank": 4, "algorithm": "alternating"})
        assert made["zero_optimization"] == {"stage": stage}
        assert made["powersgd"] == {"enabled": True, "rank": 4, "algorithm": "alternating"}
        assert made["train_micro_batch_size_per_gpu"] == train.BATCH_PER_WORKER
        assert made["optimizer"]["params"]["lr"] == train.LEARNING_RATE
        assert made["optimizer"]["params"]["weight_decay"] == train.WEIGHT_DECAY
        assert not made["gradient_clipping"]
    assert not zero.configuration(0, None)["powersgd"]["enabled"]


def test_without_deepspeed_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name))
    assert main(["demo", "--parallelism", "zero1"]) == 2
    assert "pip install 'powersgd_triton[deepspeed]'" in capsys.readouterr().err


def test_arms() -> None:
    for text in ("torch:4+bf16", "torch:20x", "allreduce:4", "allreduce+int8", "allreduce+bf16+bf16"):
        with pytest.raises(ValueError, match=rf"expected allreduce, allreduce\+bf16, .*; got '{re.escape(text)}'"):
            train.Arm.parse(text, 4)
    assert train.Arm.parse("allreduce+bf16", 4).options is None
    for text in ("ours", "ours:4", "ours:20x", "ours:4+alternating"):
        state, _ = train.communication(train.Arm.parse(text, 2), torch.nn.Linear(256, 256))
        assert state.config.planned == ("20x" in text)
