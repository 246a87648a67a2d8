"""What the compiler makes of the default configurations on every architecture, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
WHOLE_GRADIENT = ("compensate_project", "backproject", "reconstruct")
WIRE = ("encode", "reduce", "decode")


@pytest.fixture(scope="module")
def report() -> list[dict[str, Any]]:
    """Ranks of both panel widths, fp32 gradients and buffers, two widths on the wire; aligned and not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = ["--json", "--rank", "4", "--rank", "32", "--only", "float32/float32"]
    options += ["--only", "rank 32, wire int4 and own", "--only", "rank 4, wire float16 and own"]
    processes = [
        subprocess.Popen(
            [sys.executable, "benchmarks/kernel_report.py", *options, *chosen],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for chosen in (
            [word for name in names for word in ("--architecture", name)]
            for names in (ARCHITECTURES[:2], ARCHITECTURES[2:])
        )
    ]
    rows: list[dict[str, Any]] = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=280)
            assert process.returncode == 0
            rows += json.loads(output)
    finally:
        for process in processes:
            process.kill()
    return rows


def test_every_kernel_compiles_on_every_architecture(report: list[dict[str, Any]]):
    kernels = {row["kernel"] for row in report}
    assert set(WHOLE_GRADIENT) | {"pack", "gram", "orthogonalize", "commit", *WIRE} <= kernels
    for arch in ARCHITECTURES:
        assert {row["kernel"] for row in report if row["architecture"] == arch} == kernels


def test_nothing_is_spilled(report: list[dict[str, Any]]):
    spilled = [(row["architecture"], row["kernel"], row["variant"]) for row in report if row["spill_bytes"]]
    assert not spilled


def test_aligned_fp32_segments_are_accessed_in_128_bits(report: list[dict[str, Any]]):
    for row in report:
        if row["kernel"] in WHOLE_GRADIENT and "unaligned" not in row["variant"]:
            name = (row["architecture"], row["kernel"], row["variant"])
            assert row["loads_128_bit"] or row["kernel"] == "reconstruct", name
            assert row["stores_128_bit"] or row["kernel"] == "backproject" or not writes(row), name


def test_aligned_factors_on_the_wire_are_accessed_in_128_bits(report: list[dict[str, Any]]):
    """The fp32 side, at rank 32."""
    rows = [row for row in report if row["kernel"] in WIRE and row["variant"] == "rank 32, wire int4 and own"]
    assert len(rows) == len(WIRE) * len(ARCHITECTURES)
    for row in rows:
        name = (row["architecture"], row["kernel"])
        assert row["loads_128_bit"] or row["kernel"] == "decode", name
        assert row["stores_128_bit"], name


def writes(row: dict[str, Any]) -> bool:
    """Whether it writes whole matrices: projecting alone does not."""
    return bool(row["kernel"] != "compensate_project" or row["compensate"])


def test_products_run_on_tensor_cores(report: list[dict[str, Any]]):
    for row in report:
        if row["kernel"] in (*WHOLE_GRADIENT, "gram", "orthogonalize"):
            assert row["tensor_core_instructions"], (row["architecture"], row["kernel"], row["variant"])
