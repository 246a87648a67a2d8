"""The demo's ways of distributing its model, and its counts of bytes."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from powersgd_triton.__main__ import main
from powersgd_triton.demo import arms
from powersgd_triton.demo.measure import Traffic

REFUSED = {
    "hsdp --workers 3": "hsdp arranges workers in 2 replicas; 3 is not a multiple of 2",
    "fsdp2 --arms torch": "torch's hook",
    "ddp --arms allreduce ours:int8+bf16error": "error_dtype has no use beside it",
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
def test_every_parallelism_trains_with_fewer_bytes(
    parallelism: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if parallelism.startswith("zero"):
        pytest.importorskip("deepspeed")
    arguments = f"--steps 3 --workers {4 if parallelism == 'hsdp' else 2} --arms allreduce ours:4 --device cpu".split()
    assert main(["demo", "--parallelism", parallelism, *arguments, "--output", str(tmp_path)]) == 0
    assert re.search(r"ours, rank 4 sent \d+\.\d times fewer bytes than the all-reduce", capsys.readouterr().out)
    exact, ours = json.loads((tmp_path / "results.json").read_text())["arms"]
    # Up to two numbers of ZeRO itself: whether a step overflowed, and the gradient's norm.
    assert 0 <= exact["bytes_per_step"] - exact["gradient_bytes"] <= 8 * parallelism.startswith("zero")
    # The factors and the vectors. With HSDP, workers of other shards are told whether a step is finite.
    assert 8 < exact["bytes_per_step"] / ours["bytes_per_step"] < 30
    assert ours["losses"][-1] < ours["losses"][0]


def test_without_deepspeed_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name))
    assert main(["demo", "--parallelism", "zero1"]) == 2
    assert "in a clone, run pip install '.[deepspeed]'" in capsys.readouterr().err


def test_arms() -> None:
    for text in ("torch:4+bf16", "torch:20x", "allreduce:4", "allreduce+int8", "allreduce+bf16+bf16"):
        with pytest.raises(ValueError, match=rf"expected allreduce, allreduce\+bf16, .*; got '{re.escape(text)}'"):
            arms.Arm.parse(text, 4)
    assert arms.Arm.parse("allreduce+bf16", 4).options is None
    for text in ("ours", "ours:4", "ours:20x", "ours:4+alternating"):
        state, _ = arms.communication(arms.Arm.parse(text, 2), torch.nn.Linear(256, 256))
        assert state.config.planned == ("20x" in text)


# The counts of bytes --------------------------------------------------------------------------------------------------

ELEMENTS = 100


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_bytes_are_those_of_a_ring(workers: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_world_size", lambda _: workers)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    # Nothing is carried.
    for name in ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, lambda *_: None)
    tensor, traffic = torch.zeros(ELEMENTS), Traffic()
    with traffic.counting():
        dist.all_reduce(tensor)
        assert traffic.as_all_reduces == (4 * ELEMENTS if workers > 1 else 0)
        assert traffic.sent == traffic.received == 2 * (workers - 1) * 4 * ELEMENTS // workers
        dist.all_gather_into_tensor(torch.zeros(workers * ELEMENTS), tensor)
    assert traffic.as_all_reduces == (4 * ELEMENTS * (1 + workers / 2) if workers > 1 else 0)
    traffic.clear()
    assert traffic.sent == traffic.received == traffic.as_all_reduces == 0
    # A reduce-scatter like a whole all-reduce, since what gathers the parameters is not named.
    named = Traffic({"reduce_scatter_tensor": 2})
    with named.counting():
        dist.all_gather_into_tensor(torch.zeros(workers * ELEMENTS), tensor)
        assert named.sent == 0
        dist.reduce_scatter_tensor(torch.zeros(ELEMENTS), torch.zeros(workers * ELEMENTS))
        # Narrow messages, which are bytes, are always counted.
        parts = torch.zeros(workers * 8, dtype=torch.uint8)
        dist.all_to_all_single(parts, parts)
        dist.all_gather_into_tensor(parts, parts[:8])
    assert named.as_all_reduces == (workers * (4 * ELEMENTS + 4 + 4) if workers > 1 else 0)
