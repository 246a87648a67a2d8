"""The GPU benchmarks run in a dry run, count what they should, and judge their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import tune
from benchmarks.targets import targets
from benchmarks.timing import Clock
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


def session(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, **environment}
    command = ["bash", "benchmarks/gpu_session.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def test_a_gpu_session_fits_ten_minutes_and_begins_with_what_tells_most(tmp_path: Path) -> None:
    """Its plan, which runs nothing."""
    out = tmp_path / "results"
    found = session("--dry", OUT=str(out))
    *lines, total = found.stdout.splitlines()
    limits = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert list(limits)[:5] == ["doctor", "first", "tests", "bench", "trace"]
    # The first results come within three minutes.
    assert limits["doctor"] + limits["first"] <= 180
    assert total.split() == ["together", str(sum(limits.values())), "s"]
    assert (found.returncode, sum(limits.values()) <= 600) == (0, True)
    assert session("--dry", LIMIT="100").returncode == 1
    assert session("--dry", "no such part").returncode == 2
    # A part alone has all the time.
    assert session("--dry", "tests").stdout.split()[:2] == ["tests", "570"]
    assert not out.exists()


def test_the_first_part_of_a_session_checks_a_step_and_times_it_beside_torchs(tmp_path: Path) -> None:
    said = session("--dry", "first").stdout
    chosen = said.split(" -k ")[1].split(" --record")[0]
    options = ["benchmarks/test_gpu_hook_step.py", "-m", "gpu", "-k", chosen, "--collect-only", "-q"]
    listed = output_of("-m", "pytest", *options, "-p", "no:cacheprovider", OUT=str(tmp_path))
    steps = [line.split("[")[1].rstrip("]") for line in listed.splitlines() if "[" in line]
    assert steps == [f"gpt2-124M-r4-fp32-{provider}" for provider in ("ours", "torch", "torchbatched")]


def test_the_hosts_time_is_that_until_work_returns() -> None:
    events: list[str] = []
    with mock.patch.object(Clock, "synchronize", side_effect=lambda: events.append("wait")):
        Clock(torch.device("cpu")).host(lambda: events.append("work"), lambda: events.append("before"))
    assert events == ["before", "wait", "work"]


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
