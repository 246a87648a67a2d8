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
from powersgd_triton.demo import parallelism as parallelisms
from powersgd_triton.demo import train
from powersgd_triton.demo.model import CONTEXT, LAYERS, VOCABULARY, WIDTH

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


def sent_bytes(rank: int, shards: int) -> int:
    """By the formula in docs/guides/fsdp2.md."""
    matrices = [(VOCABULARY, WIDTH), (CONTEXT, WIDTH), (VOCABULARY, WIDTH)]
    matrices += LAYERS * [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    vectors = [WIDTH, WIDTH, *LAYERS * [WIDTH, WIDTH, WIDTH, WIDTH, 3 * WIDTH, WIDTH, 4 * WIDTH, WIDTH]]
    total = sum(vectors) // shards
    for n, m in matrices:
        k = n // shards
        total += min((k + m) * rank if 2 * (k + m) * rank < k * m else k * m, k * m)
    return 4 * total


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["fsdp1", "fsdp2", "hsdp", *(f"zero{stage}" for stage in range(4))])
def test_bytes_are_those_of_the_formula(parallelism: str, tmp_path: Path) -> None:
    if parallelism.startswith("zero"):
        pytest.importorskip("deepspeed")
    workers, shards = ("4", 2) if parallelism == "hsdp" else ("2", 1)
    arguments = ["--steps", "3", "--workers", workers, "--arms", "allreduce", "ours:4", "--device", "cpu"]
    assert main(["demo", "--parallelism", parallelism, *arguments, "--output", str(tmp_path)]) == 0
    exact, ours = json.loads((tmp_path / "results.json").read_text())["arms"]
    # Up to two numbers of ZeRO itself: whether a step overflowed, and the gradient's norm.
    assert 0 <= exact["bytes_per_step"] - exact["gradient_bytes"] <= 8 * parallelism.startswith("zero")
    # With HSDP, workers of other shards are told whether a step is finite.
    assert 0 <= ours["bytes_per_step"] - sent_bytes(4, shards) <= 8
    assert ours["losses"][-1] < ours["losses"][0]


def test_deepspeeds_configuration_is_that_of_the_other_demos() -> None:
    for stage in range(4):
        made = parallelisms.configuration(stage, {"rank": 4, "algorithm": "alternating"})
        assert made["zero_optimization"] == {"stage": stage}
        assert made["powersgd"] == {"enabled": True, "rank": 4, "algorithm": "alternating"}
        assert made["train_micro_batch_size_per_gpu"] == train.BATCH_PER_WORKER
        assert made["optimizer"]["params"]["lr"] == train.LEARNING_RATE
        assert made["optimizer"]["params"]["weight_decay"] == train.WEIGHT_DECAY
        assert not made["gradient_clipping"]
    assert not parallelisms.configuration(0, None)["powersgd"]["enabled"]


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
