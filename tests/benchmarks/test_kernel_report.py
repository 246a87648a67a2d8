"""What the compiler makes of the default configurations on every architecture, without a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import triton

from benchmarks.bucket_costs import record_bucket
from benchmarks.compiled import GPUS, Instruction, count, loops
from powersgd_triton.kernels.availability import OLDEST_TRITON_ON_ROCM
from tests.support.distributed import HUNG
from tests.support.programs import output_of

# Compiling is as fast as the machine has time for; only a compiler that hangs takes so long.
pytestmark = pytest.mark.timeout(2 * HUNG)

ARCHITECTURES = tuple(GPUS)
ALL = [
    pytest.mark.slow,
    pytest.mark.skipif(
        tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON_ON_ROCM,
        reason="launch parameters were chosen with Triton 3.9; an older one cannot compile for ROCm",
    ),
]
WHOLE_GRADIENT = ("compensate_project", "backproject", "reconstruct")
MOST_LAUNCHES = 14
WIRE = ("encode", "reduce", "decode")
DIFFERENCES = ("encode_difference", "apply_difference")

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=ALL)])
def report(request: pytest.FixtureRequest) -> Rows:
    """One process for every two architectures; aligned and not.

    Ranks of both panel widths, and two widths on the wire. Compiling all of it takes two processors minutes.
    """
    architectures, ranks = (("sm_90",), (4,)) if request.param == "some" else (ARCHITECTURES, (4, 32))
    options = ["--json", "--only", "rank 32, wire int4 and own"]
    options += [word for rank in (4, 32) for word in ("--rank", str(rank))]
    options += [word for rank in ranks for word in ("--only", f"rank {rank}, float32/float32")]
    options += ["--only", "rank 4, wire float16 and own"] * (request.param == "all")
    options += ["--only", "differences int2, bfloat16" if request.param == "some" else "differences"]

    def rows_of(names: Sequence[str]) -> Rows:
        chosen = [word for name in names for word in ("--architecture", name)]
        rows: Rows = json.loads(output_of("benchmarks/kernel_report.py", *options, *chosen, TRITON_INTERPRET=None))
        return rows

    halves = [names for names in (architectures[::2], architectures[1::2]) if names]
    with ThreadPoolExecutor() as pool:
        rows = [row for half in pool.map(rows_of, halves) for row in half]
    assert {row["architecture"] for row in rows} == {*architectures}
    return rows


def architectures_of(report: Rows) -> set[str]:
    return {row["architecture"] for row in report}


def test_every_kernel_compiles_on_every_architecture(report: Rows):
    kernels = {row["kernel"] for row in report}
    assert set(WHOLE_GRADIENT) | {"pack", "gram", "orthogonalize", "commit", *WIRE, *DIFFERENCES} <= kernels
    for arch in architectures_of(report):
        assert {row["kernel"] for row in report if row["architecture"] == arch} == kernels


def test_kernels_are_compiled_as_in_a_launch(report: Rows):
    """Of small tensors, Triton assumes on AMD that offsets fit 32 bits."""
    for row in report:
        assert row["enable_fp_fusion"] is False
        assert row["aligned_arguments"] > 0
        assert bool(row["small_arguments"]) == row["architecture"].startswith("gfx"), row["kernel"]


def test_nothing_is_spilled(report: Rows):
    # Two registers of some kernels: on sm_120 with any number of warps, on sm_80 where nothing is aligned.
    allowed = {"sm_80": 8, "sm_120": 8}
    spilled = [
        (row["architecture"], row["kernel"], row["variant"])
        for row in report
        if row["spill_bytes"] > allowed.get(row["architecture"], 0)
    ]
    assert not spilled


def test_aligned_fp32_segments_are_accessed_in_128_bits(report: Rows):
    for row in report:
        if row["kernel"] in WHOLE_GRADIENT:
            name = (row["architecture"], row["kernel"], row["variant"])
            assert row["loads_128_bit"] or row["kernel"] == "reconstruct", name
            # Projecting alone does not write whole matrices.
            projects = row["kernel"] == "compensate_project" and not row["compensate"]
            assert row["stores_128_bit"] or row["kernel"] == "backproject" or projects, name


def test_aligned_factors_on_the_wire_are_accessed_in_128_bits(report: Rows):
    """The fp32 side, at rank 32."""
    rows = [row for row in report if row["kernel"] in WIRE and row["variant"] == "rank 32, wire int4 and own"]
    assert len(rows) == len(WIRE) * len(architectures_of(report))
    for row in rows:
        name = (row["architecture"], row["kernel"])
        assert row["loads_128_bit"] or row["kernel"] == "decode", name
        assert row["stores_128_bit"], name


def test_aligned_copies_are_accessed_in_128_bits(report: Rows):
    """The copies and the fp32 tensors that they follow; codes are narrower."""
    rows = [row for row in report if row["kernel"] in DIFFERENCES and "unaligned" not in row["variant"]]
    # Encoding differences, and whole tensors, from which the codes are subtracted.
    assert len(rows) >= (len(DIFFERENCES) + 1) * len(architectures_of(report))
    for row in rows:
        name = (row["architecture"], row["kernel"], row["variant"])
        assert 2 * row["accesses_128_bit"] >= row["accesses"], name
        assert row["loads_128_bit"], name
        assert row["stores_128_bit"] or row["kernel"] == "encode_difference", name


def test_products_run_on_tensor_cores(report: Rows):
    for row in report:
        # Those of graphics cards have no fp64.
        fp64 = ("gram", "orthogonalize") if row["architecture"] not in ("sm_89", "sm_120") else ()
        if row["kernel"] in (*WHOLE_GRADIENT, *fp64):
            assert row["tensor_core_instructions"], (row["architecture"], row["kernel"], row["variant"])


def test_every_kernel_fits_every_gpu(report: Rows):
    for row in report:
        name = (row["architecture"], row["kernel"], row["variant"])
        assert row["blocks"] >= 1, name
        assert row["instructions"] > row["accesses"] > 0, name


def test_blocks_of_a_multiprocessor():
    """As NVIDIA's occupancy calculator gives them."""
    h100, rtx4090 = GPUS["sm_90"], GPUS["sm_89"]
    assert [h100.resident_blocks(registers, 0, 8) for registers in (32, 128, 129, 255)] == [8, 2, 1, 1]
    assert [h100.resident_blocks(registers, 0, 4) for registers in (128, 168, 255)] == [4, 3, 2]
    assert [h100.resident_blocks(32, shared * 1024, 4) for shared in (75, 113, 227, 228)] == [3, 2, 1, 0]
    assert [rtx4090.resident_blocks(32, shared * 1024, 8) for shared in (0, 49, 99, 100)] == [6, 2, 1, 0]
    assert GPUS["gfx942"].resident_blocks(128, 0, 4) == 4


def test_instructions_of_a_loop_are_counted():
    names = ["MOV", "BAR.SYNC", "SHFL.BFLY", "DFMA", "WARPSYNC", "BRA", "EXIT", "BRA"]
    code = [Instruction(16 * i, name, {5: 16, 7: 112}.get(i)) for i, name in enumerate(names)]
    (loop,) = loops(code)
    assert count(loop, GPUS["sm_90"]) == {"instructions": 5, "barriers": 1, "shuffles": 1, "fp64": 1}


@pytest.mark.parametrize("rank", [4, 32])
def test_programs_of_a_bucket(rank: int):
    """Launches of a bucket of GPT-2, and as many programs as keep an H100 busy over whole gradients."""
    layout, phases = record_bucket("sm_90", "gpt2-124M", rank)
    launches = [launch for launches in phases.values() for launch in launches]
    assert len(launches) <= MOST_LAUNCHES
    assert layout.compressed
    for launch in launches:
        if launch.name in WHOLE_GRADIENT:
            assert math.prod(launch.grid) >= GPUS["sm_90"].multiprocessors, launch.name
