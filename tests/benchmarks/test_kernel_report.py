"""What the compiler makes of the default configurations on every architecture, and what steps launch, without a GPU."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import triton

from benchmarks.compiled import GPUS
from powersgd_triton.kernels.availability import OLDEST_TRITON_ON_ROCM
from powersgd_triton.kernels.launcher import KNOWN
from tests.support.distributed import HUNG
from tests.support.programs import output_of

# Compiling is as fast as the machine has time for; only a compiler that hangs takes so long.
pytestmark = pytest.mark.timeout(2 * HUNG)

ARCHITECTURES = tuple(GPUS)
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
ALL = [
    pytest.mark.slow,
    pytest.mark.skipif(
        TRITON < OLDEST_TRITON_ON_ROCM,
        reason="launch parameters were chosen with Triton 3.9; an older one cannot compile for ROCm",
    ),
]
WHOLE_GRADIENT = ("compensate_project", "backproject", "reconstruct")
WIRE = ("encode", "reduce", "decode")
DIFFERENCES = ("encode_difference", "apply_difference")
MOST_LAUNCHES, LAUNCHES_OF_NARROW_MESSAGES, MOST_KERNELS = 14, 6, 12
# Of functions. It was 1451 when each launch inspected its arguments.
MOST_CALLS = 900

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=ALL)])
def report(request: pytest.FixtureRequest) -> Rows:
    """One process for every two architectures; aligned and not.

    Ranks of both panel widths, and two widths on the wire. Compiling all of it takes two processors minutes. "some" are
    the kernels that the test of launches below does not compile.
    """
    architectures, ranks = (("sm_90",), ()) if request.param == "some" else (ARCHITECTURES, (4, 32))
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


def test_every_kernel_compiles_as_in_a_launch_and_fits_every_gpu(report: Rows):
    kernels = {row["kernel"] for row in report}
    assert {*WIRE, *DIFFERENCES} <= kernels
    # On one architecture, the test of launches compiles the others.
    if len({row["architecture"] for row in report}) > 1:
        assert {*WHOLE_GRADIENT, "pack", "gram", "orthogonalize", "commit"} <= kernels
    for arch in {row["architecture"] for row in report}:
        assert {row["kernel"] for row in report if row["architecture"] == arch} == kernels
    # Two registers of some kernels: on sm_120 with any number of warps, on sm_80 where nothing is aligned. Triton 3.5,
    # with which no launch parameters were chosen, needs them for `reduce` on sm_90.
    spilled = {"sm_80": 8, "sm_120": 8, "sm_90": 8 if TRITON < (3, 7) else 0}
    for row in report:
        arch, kernel = row["architecture"], row["kernel"]
        name = (arch, kernel, row["variant"])
        assert row["enable_fp_fusion"] is False, name
        assert row["aligned_arguments"] > 0, name
        # Of small tensors, Triton assumes on AMD that offsets fit 32 bits.
        assert bool(row["small_arguments"]) == arch.startswith("gfx"), name
        # What was the fastest of many launches that were timed on sm_90 spills up to 56.
        measured = (arch, kernel, row["compensate"]) == ("sm_90", "compensate_project", True)
        assert row["spill_bytes"] <= (224 if measured else spilled.get(arch, 0)), name
        assert row["blocks"] >= 1, name
        assert row["instructions"] > row["accesses"] > 0, name
        # Products run on tensor cores; those of graphics cards have no fp64.
        fp64 = ("gram", "orthogonalize") if arch not in ("sm_89", "sm_120") else ()
        assert row["tensor_core_instructions"] or kernel not in (*WHOLE_GRADIENT, *fp64), name


def test_aligned_memory_is_accessed_in_128_bits(report: Rows):
    architectures = len({row["architecture"] for row in report})
    wide: dict[str, int] = dict.fromkeys((*WIRE, *DIFFERENCES), 0)
    for row in report:
        kernel, variant = row["kernel"], row["variant"]
        name = (row["architecture"], kernel, variant)
        loads, stores = row["loads_128_bit"], row["stores_128_bit"]
        if kernel in WHOLE_GRADIENT and (kernel, row["compensate"]) != ("backproject", True):
            # (On AMD, tiles of the kernel that compensates and backprojects are too small for that.)
            assert loads or kernel == "reconstruct", name
            # Multiplying alone does not write whole matrices.
            assert stores or (kernel != "reconstruct" and not row["compensate"]), name
        # The fp32 side, at rank 32.
        elif kernel in WIRE and variant == "rank 32, wire int4 and own":
            wide[kernel] += 1
            assert loads or kernel == "decode", name
            assert stores, name
        # The copies and the fp32 tensors that they follow; codes are narrower.
        elif kernel in DIFFERENCES and "unaligned" not in variant:
            wide[kernel] += 1
            assert 2 * row["accesses_128_bit"] >= row["accesses"], name
            assert loads, name
            assert stores or kernel == "encode_difference", name
    assert all(wide[kernel] == architectures for kernel in WIRE)
    assert all(wide[kernel] >= architectures for kernel in DIFFERENCES)


@pytest.mark.slow
def test_a_bucket_of_quantized_gradients_takes_few_launches_and_passes():
    """Each byte counts once: of the codes, and of fp32 gradients and averages."""
    options = ["--bucket", "--quantize", "int8", "--json", "--gradients", "gpt2-like-35M"]
    rows: Rows = json.loads(output_of("benchmarks/kernel_report.py", *options, TRITON_INTERPRET=None))
    *kernels, others, copy = rows
    assert [row["kernel"] for row in kernels] == ["encode_difference", "note_infinite", "apply_difference"]
    assert sum(row["bytes"] for row in kernels) < 1.4 * copy["bytes"]
    assert others["launches"] == 0
    assert sum(row["us"] for row in kernels) < 2 * copy["us"]
    assert all(row["spill_bytes"] == 0 < row["us"] for row in kernels)


def test_steps_launch_few_kernels_that_all_buckets_and_ranks_share():
    """Of a step with five buckets; those of larger models are alike. Nothing runs on a GPU."""
    options = ["--json", "--gradients", "gpt2-like-35M", "--rank", "4", "--steps", "0"]
    found: Rows = json.loads(output_of("benchmarks/host_time.py", *options, TRITON_INTERPRET=None))
    rows = {row["ranks"]: row for row in found}
    assert rows["4"]["launches a bucket"] <= MOST_LAUNCHES + LAUNCHES_OF_NARROW_MESSAGES
    assert rows["4"]["kernels compiled"] <= MOST_KERNELS
    if KNOWN:
        # Triton's launcher in this version. All but messages, with the arguments that they would have anew.
        assert [row["launches a bucket"] - row["repeated"] for row in found] == [6, 0, 6, 6]
        assert rows["4"]["calls a hook step"] <= MOST_CALLS
    # Gradients lie in flat buffers, in every step at another place.
    assert all(row["compiled later"] == row["uploads"] == 0 for row in found)
    # The plan for a smaller budget comes second, with ranks that fit one block of columns.
    assert [row["kernels compiled"] > 0 for name, row in rows.items() if "planned" in name] == [True, False]
