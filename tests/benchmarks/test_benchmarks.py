"""The GPU benchmarks run in a dry run, count what they should, and judge their results; so do losses per byte."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import digits, loss_per_byte, trainings, tune
from benchmarks.shapes import GPU_GRADIENT_SETS, count_parameters
from benchmarks.targets import targets
from benchmarks.tracing import WINDOW, read_trace
from powersgd_triton.demo.train import Arm
from tests.support.programs import ROOT, output_of

PARAMETERS = {
    "resnet-50": 25_557_032,
    "gpt2-124M": 124_439_808,
    "vit-l-16": 304_326_632,
    "llama-7b-layer-x4": 4 * 202_383_360,
}


@pytest.mark.parametrize("name", GPU_GRADIENT_SETS)
def test_gradient_sets_have_the_published_size(name: str) -> None:
    assert count_parameters(GPU_GRADIENT_SETS[name]) == PARAMETERS[name]


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    options = ["-m", "gpu", "--dry", "--record", "dry", "--tests", "passed", "--benchmark-quiet"]
    output_of("-m", "pytest", "benchmarks", "-q", "-p", "no:cacheprovider", *options, OUT=str(tmp_path))
    recorded = json.loads((tmp_path / "dry.json").read_text())
    assert recorded["machine"]["dry"]
    assert recorded["machine"]["tests"] == "passed"
    seen = {(row["kind"], row["provider"]) for row in recorded["rows"]}
    for kind, providers in {
        "step": {"ours", "reference", "torch", "torch batched", "copy"},
        "overlap": {"one by one", "overlapped"},
        "kernel": {"triton", "reference", "compiled", "copy"},
        "orthogonalize": {"triton", "reference", "torch.linalg.qr", "geqrf + orgqr"},
    }.items():
        assert {provider for found, provider in seen if found == kind} == providers
    phases = {(row["phase"], row["provider"]) for row in recorded["rows"] if row["kind"] == "kernel"}
    timed = ("encode int8", "reduce int8", "decode int8", "encode_difference int2", "apply_difference int2")
    assert {(phase, who) for phase in timed for who in ("triton", "reference")} <= phases
    assert {("launches", "ours"), ("replay", "ours")} <= seen
    table = (tmp_path / "dry.md").read_text()
    assert "A dry run" in table
    for title in ("Targets", "Hook step", "Launches of one hook step", "Kernels", "Orthogonalization"):
        assert f"\n## {title}\n" in table
    for line in (line for line in table.splitlines() if line.startswith("|")):
        assert line.endswith(" |")
    assert not (ROOT / "benchmarks" / "results" / "dry.json").exists()


def test_trace_counts_launches_and_waits_of_the_step_only() -> None:
    def event(name: str, category: str, start: float, duration: float) -> dict[str, Any]:
        return {"name": name, "cat": category, "ts": start, "dur": duration}

    found = read_trace(
        [
            event("cudaDeviceSynchronize", "cuda_runtime", 0, 1),
            event(WINDOW, "user_annotation", 10, 20),
            event("cudaLaunchKernel", "cuda_runtime", 11, 1),
            event("cudaStreamSynchronize", "cuda_runtime", 20, 5),
            event(WINDOW, "gpu_user_annotation", 12, 30),
            event("Memcpy DtoD", "gpu_memcpy", 30, 10),
            event("kernel", "kernel", 15, 5),
            event("kernel", "kernel", 18, 4),
            event("cudaDeviceSynchronize", "cuda_runtime", 31, 9),
        ]
    )
    assert len(found.events) == 3
    assert found.waits == 1
    assert found.span == 25
    assert found.busy == 17
    assert found.by_name() == [("Memcpy DtoD", 1, 10.0), ("kernel", 2, 9.0)]


def test_targets_are_met_missed_or_not_measured() -> None:
    assert {target.verdict for target in targets([])} == {"not measured"}
    labels = {"gradients": "gpt2-124M", "rank": 4, "dtype": "fp32"}
    times = {"ours": 1.0, "torch": 9.0, "torch batched": 6.0}
    rows: list[dict[str, Any]] = [
        {"kind": "step", **labels, "provider": provider, "device_ms": ms} for provider, ms in times.items()
    ]
    rows += [{"kind": "launches", **labels, "provider": "ours", "launches": 15}]
    # A better flag that was not measured would flatter.
    rows += [{"kind": "step", **labels, "gradients": "resnet-50", "provider": "ours", "device_ms": 1.0}]
    rows += [{"kind": "step", **labels, "gradients": "resnet-50", "provider": "torch", "device_ms": 9.0}]
    kernel = {"kind": "kernel", **labels, "phase": "compensate_project", "provider": "triton"}
    rows += [{**kernel, "gradient_bytes": 498e6, "share_of_copy": 0.81}]
    rows += [{**kernel, "gradients": "small", "gradient_bytes": 1e6, "share_of_copy": 0.1}]
    found = {(target.what, target.shown): target.verdict for target in targets(rows)}
    assert found == {
        ("resnet-50, rank 4, fp32", "–"): "not measured",
        ("gpt2-124M, rank 4, fp32", "6.00×"): "met",
        ("gpt2-124M, rank 4, fp32", "81%"): "met",
        ("64 × (4096, 16)", "–"): "not measured",
        ("gpt2-124M, rank 4", "15"): "missed",
    }


def test_tuning_gives_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    tune.main(["--dry"])
    printed = capsys.readouterr().out
    assert "failed" not in printed
    for kernel in tune.KERNELS:
        assert f"    {kernel}=Launch(" in printed


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where losses per byte are recorded during a test; the picture lies beside it."""
    monkeypatch.setattr(loss_per_byte, "FILE", tmp_path / "losses.json")
    monkeypatch.setattr(loss_per_byte, "PICTURE", tmp_path / "losses.png")
    return tmp_path / "losses.json"


def loss_record(model: str, arm: str, seed: int, loss: float, sent: float, **others: float) -> dict[str, Any]:
    steps = loss_per_byte.MODELS[model].steps
    common = {"model": model, "arm": arm, "seed": seed, "steps": steps, "workers": 2}
    return {**common, "loss": loss, "bytes_per_step": sent, **others}


@pytest.mark.slow
def test_digits_that_are_missing_are_trained_and_their_bytes_counted(losses: Path) -> None:
    steps = 3
    before = {**loss_record("digits", "torch:4", 0, 0.5, 1e4), "steps": steps}
    losses.write_text(json.dumps([before]))
    arms = ["allreduce", "torch:4", "ours:1"]
    trainings.run(losses, "digits", trainings.train_digits, arms, [0], steps, 2)
    kept, whole, compressed = json.loads(losses.read_text())
    assert kept == before
    assert [whole["arm"], compressed["arm"]] == ["allreduce", "ours:1"]
    layers = list(itertools.pairwise(digits.WIDTHS))
    assert whole["bytes_per_step"] == 4 * sum(n * m + m for n, m in layers)
    expected = sum(4 * (n + m) + 4 * m for n, m in layers)
    # Workers compare each bucket's tensors and its allocation, in 40 bytes each, before and after DDP rebuilds buckets.
    assert expected < compressed["bytes_per_step"] <= expected + 4 * 40 / steps
    for record in (whole, compressed):
        assert 0 < record["loss"] < 2 * math.log(10)
        assert 0 <= record["accuracy"] <= 100


def test_report_has_a_table_and_a_panel_for_each_model(
    losses: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        loss_record("text", "allreduce", 0, 1.6, 3e6),
        loss_record("text", "ours:4+alternating", 0, 1.8, 2e5),
        loss_record("digits", "allreduce", 0, 0.10, 8e5, accuracy=97.0),
        loss_record("digits", "allreduce", 1, 0.20, 8e5, accuracy=95.0),
        loss_record("digits", "ours:4", 1, 0.22, 4e4, accuracy=94.0),
        loss_record("digits", "ours:4", 0, 0.12, 4e4, accuracy=95.0),
        loss_record("digits", "ours:20x+int4", 0, 0.16, 4e4, accuracy=96.0),
        {**loss_record("digits", "ours:1", 0, 0.5, 1e4), "steps": 7},
    ]
    losses.write_text(json.dumps(rows))
    monkeypatch.setattr(sys, "argv", ["loss_per_byte.py", "report"])
    loss_per_byte.main()
    text, _, found = capsys.readouterr().out.partition("\ndigits\n")
    assert "| ours:4+alternating | 200,000 | 15.0× | **1.800** | +12.5% | 1 |" in text
    assert "accuracy" not in text
    # Seed by seed 20% and 10%.
    assert "| ours:4 | 40,000 | 20.0× | 0.1700 ± 0.0707 | +15.0 ± 5.0% | 94.50% | 2 |" in found
    assert "| ours:20x+int4 | 40,000 | 20.0× | **0.1600** | +60.0% | 96.00% | 1 |" in found
    assert "| allreduce | 800,000 | 1.0× | **0.1500** ± 0.0707 |  | 96.00% | 2 |" in found
    assert "ours:1 " not in found
    assert losses.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", loss_per_byte.MODELS)
def test_default_arms_can_be_parsed(name: str) -> None:
    for arm in loss_per_byte.MODELS[name].arms:
        Arm.parse(arm, loss_per_byte.DEFAULT_RANK)
