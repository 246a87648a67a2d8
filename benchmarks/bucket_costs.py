"""What a step of one bucket costs a GPU, kernel by kernel: counted from its launches and predicted, without a GPU."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest import mock

import torch

from benchmarks.buckets import ddp_buckets
from benchmarks.compiled import GPUS, Gpu, compile_launch
from benchmarks.launches import Launch, Problem, bytes_of, record_step
from benchmarks.shapes import GRADIENT_SETS
from powersgd_triton.kernels import table
from powersgd_triton.kernels.splits import busy_share
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops import backends, triton_backend

LAUNCH_SECONDS = 4.5e-6
"""From one kernel's start to the next one's if both have nothing to do: chosen such that the model gives what was
computed by hand for the first version on an H100, 140 µs at rank 4 and 375 µs at rank 32."""

LOAD_CYCLES = 700
"""What the last program of a matrix waits for parts of a Gram matrix that it loads at once: 8, or 2 of 32 columns."""

SCHEDULERS = 4
"""Of a multiprocessor. Each issues one instruction of a warp in a cycle."""

L2_SPEED = 2
"""Bandwidth of the L2 cache over that of the memory."""

WALKS = {"compensate_project": "rows", "reconstruct": "rows", "backproject": "columns"}
"""Kernels over whole matrices, and along what their programs walk."""

COUNTS = ("registers", "barriers", "shuffles", "fp64", "instructions", "shared_bytes", "spill_bytes")
STEPWISE = ("gram",)
"""Kernels that eliminate one column after another: the time of a program is a loop's, once for each column."""


def bucket_rows(arch: str, gradients: str, rank: int) -> list[dict[str, Any]]:
    """Return a row a kernel of a step of one bucket of a model."""
    gpu = GPUS[arch]
    rows: dict[str, dict[str, Any]] = {}
    layout, phases = record_bucket(arch, gradients, rank)
    for phase, launches in phases.items():
        for launch in launches:
            compiled = compile_launch(launch.kernel, launch.parameters(), launch.options(), arch)
            cost = _cost(launch, compiled, bytes_of(phase, layout, 4) / len(launches), rank, gpu)
            further = launch.parameters().get("COMPENSATE") is False
            name = f"{launch.name}, further panels" if further else launch.name
            row = rows.setdefault(name, {"architecture": arch, "rank": rank, "kernel": name, "launches": 0})
            row["launches"] += 1
            for key in ("programs", "waves"):
                row[key] = [*row.get(key, ()), cost[key]]
            for key in COUNTS:
                row[key] = max(row.get(key, 0), compiled[key])
            row["issue"] = max(row.get("issue", 0.0), cost["issue"])
            row["blocks"] = min(row.get("blocks", gpu.blocks), compiled["blocks"])
            for key in ("sweeps", "sweeps_dram", "bytes", "bytes_l2", "us"):
                row[key] = row.get(key, 0) + cost[key]
    for row in rows.values():
        row |= {key: list(dict.fromkeys(row[key])) for key in ("programs", "waves")} | {"us": round(row["us"], 1)}
    return list(rows.values())


def record_bucket(arch: str, model: str, rank: int) -> tuple[Layout, dict[str, list[Launch]]]:
    """Launch a step on the CPU as on a GPU of an architecture, without running its kernels.

    The bucket is the second that DDP makes of the model's fp32 gradients. Most are like it; the first is smaller.
    """
    buckets = ddp_buckets(GRADIENT_SETS[model])
    shapes = buckets[min(1, len(buckets) - 1)]
    gradients = {str(number): torch.zeros(shape) for number, shape in enumerate(shapes)}
    with (
        mock.patch.object(backends, "why_not_triton", return_value=None),
        mock.patch.object(triton_backend, "architecture", return_value=arch),
        mock.patch.object(table, "multiprocessors", return_value=GPUS[arch].multiprocessors),
    ):
        problem = Problem(gradients, rank, "triton")
        # The first step draws the bases as well.
        for _ in range(2):
            _, phases = record_step(problem, gradients, run=False)
    return problem.layout, phases


def _cost(launch: Launch, compiled: dict[str, Any], moved: float, rank: int, gpu: Gpu) -> dict[str, Any]:
    """What one launch costs.

    A launch takes ``LAUNCH_SECONDS``, then the longest of its bytes over the bandwidth of the memory, of the cache, and
    its instructions over those that all schedulers issue, over the share of the time in which its programs keep the
    multiprocessors busy. Instructions are counted for kernels over whole matrices: those of the compiled loops, times
    the passes that the table of tiles gives. Where columns are eliminated one after another, the time of that comes on
    top, and of adding the parts before. One pass is taken to be enough.

    Args:
        launch: The launch, of a bucket of fp32 gradients and error buffers.
        compiled: What ``compile_launch`` found.
        moved: Bytes of a launch of other kernels than those over whole matrices.
        rank: The largest.
        gpu: Where it is to run.
    """
    parameters = launch.parameters()
    programs, slots = math.prod(launch.grid), gpu.multiprocessors * compiled["blocks"]
    cost = {"programs": programs, "waves": math.ceil(programs / slots)}
    # A multiprocessor with one program is not idle.
    busy = min(1.0, programs / gpu.multiprocessors)
    sweeps, in_memory, cached, issued = 0, 0, moved, 0
    if launch.name in WALKS:
        records, tiles = parameters["records"].tolist(), parameters["tiles"].tolist()
        matrices = 4 * sum(n * m for n, m, *_ in records)
        panels = programs // len(tiles) if launch.name != "reconstruct" else 1
        compensates = parameters.get("COMPENSATE", False)
        # G and M are read and M is written; otherwise M is read by each panel, or Ĝ is written. Programs of one tile
        # run at the same time: only the first reads it from memory.
        sweeps = 3 if compensates else panels
        in_memory = 3 if compensates else 1
        rows, block = WALKS[launch.name] == "rows", parameters["BLOCK_ROWS"]
        step = parameters["BLOCK_COLS"]
        if not rows:
            block, step = step, block
        lengths = Counter(math.ceil((end - start) / step) for _, _, start, end, _ in tiles)
        width = rank if launch.name == "reconstruct" else min(rank, panels * parameters["C"])
        factors = 4 * width * sum((end - start) * (1 + compensates) + block for _, _, start, end, _ in tiles)
        parts = 0 if launch.name == "reconstruct" else 4 * width * block * len(tiles)
        moved, cached = in_memory * matrices + parts, sweeps * matrices + parts + factors
        further = math.ceil(rank / parameters["C"]) - 1
        passes = panels * sum(length * number for length, number in lengths.items())
        a_pass = compiled["tile_instructions"] + further * compiled["panel_instructions"]
        issued = launch.options()["num_warps"] * (passes * a_pass + programs * compiled["other_instructions"])
        # Programs share their multiprocessor's speed.
        busy = busy_share({length: number * panels for length, number in lengths.items()}, gpu.multiprocessors)
    issue = issued / (SCHEDULERS * gpu.multiprocessors * gpu.clock)
    seconds = LAUNCH_SECONDS + max(moved / gpu.bandwidth, cached / (L2_SPEED * gpu.bandwidth), issue) / busy
    if parameters.get("attempt", 0):
        # The first pass is enough for all but nearly dependent columns.
        seconds = LAUNCH_SECONDS
    elif launch.name in STEPWISE:
        parts = max(Counter(parameters["chunks"][:, 0].tolist()).values())
        loads = math.ceil(parts / (2 if parameters["C"] > 16 else 8))
        seconds += (min(rank, parameters["C"]) * compiled["loop_cycles"] + loads * LOAD_CYCLES) / gpu.clock
    return cost | {
        "sweeps": sweeps,
        "sweeps_dram": in_memory,
        "bytes": round(moved),
        "bytes_l2": round(cached),
        "issue": round(issue * gpu.bandwidth / moved, 3) if issued else 0,
        "us": seconds * 1e6,
    }
