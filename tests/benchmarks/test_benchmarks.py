"""The GPU benchmarks run in a dry run, count what they should, and judge their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tune
from benchmarks.targets import targets
from benchmarks.tracing import WINDOW, read_trace
from tests.support.programs import ROOT, output_of


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    options = ["-m", "gpu", "--dry", "--record", "dry", "--tests", "passed", "--benchmark-quiet"]
    output_of("-m", "pytest", "benchmarks", "-q", "-p", "no:cacheprovider", *options, OUT=str(tmp_path))
    recorded = json.loads((tmp_path / "dry.json").read_text())
    assert recorded["machine"]["dry"]
    assert recorded["machine"]["tests"] == "passed"
    seen = {(row["kind"], row["provider"]) for row in recorded["rows"]}
    assert seen >= {
        *(("step", provider) for provider in ("ours", "reference", "torch", "torch batched", "copy")),
        *(("overlap", way) for way in ("one by one", "overlapped")),
        *(("kernel", provider) for provider in ("triton", "reference", "compiled", "copy")),
        *(("orthogonalize", provider) for provider in ("triton", "reference", "torch.linalg.qr", "geqrf + orgqr")),
        *(("launches", "ours"), ("replay", "ours")),
    }
    table = (tmp_path / "dry.md").read_text()
    assert "A dry run" in table
    for title in ("Targets", "Hook step", "Launches of one hook step", "Kernels", "Orthogonalization"):
        assert f"\n## {title}\n" in table
    assert not (ROOT / "benchmarks" / "results" / "dry.json").exists()


def test_trace_counts_launches_and_waits_of_the_step_only() -> None:
    events = [
        ("cudaDeviceSynchronize", "cuda_runtime", 0, 1),
        (WINDOW, "user_annotation", 10, 20),
        ("cudaLaunchKernel", "cuda_runtime", 11, 1),
        ("cudaStreamSynchronize", "cuda_runtime", 20, 5),
        (WINDOW, "gpu_user_annotation", 12, 30),
        ("Memcpy DtoD", "gpu_memcpy", 30, 10),
        ("kernel", "kernel", 15, 5),
        ("kernel", "kernel", 18, 4),
        ("cudaDeviceSynchronize", "cuda_runtime", 31, 9),
    ]
    found = read_trace([dict(zip(("name", "cat", "ts", "dur"), event, strict=True)) for event in events])
    assert (len(found.events), found.waits, found.span, found.busy) == (3, 1, 25, 17)
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
