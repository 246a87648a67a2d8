"""The GPU benchmarks run in a dry run, and a session of them fits its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tune
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


def test_tuning_gives_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    tune.main(["--dry"])
    printed = capsys.readouterr().out
    assert "failed" not in printed
    for kernel in tune.KERNELS:
        assert f"    {kernel}=Launch(" in printed
