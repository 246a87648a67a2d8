"""What a step of one bucket costs a GPU, kernel by kernel: counted from its launches and predicted, without a GPU."""

import math
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.buckets import ddp_buckets
from benchmarks.compiled import GPUS, Gpu, compile_launch
from benchmarks.launches import Launch, Problem, bytes_of, record_step, recording
from benchmarks.shapes import GRADIENT_SETS
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.kernels import table
from powersgd_triton.kernels.splits import busy_share
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.wire_format import QUANTIZED
from powersgd_triton.ops import backends, triton_backend
from powersgd_triton.planning.trial import StandIn
from powersgd_triton.schemes import new_engine

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
DIFFERENCES = ("encode_difference", "apply_difference")
"""Kernels over whole tensors that are quantized. The second one loops over messages."""
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


def quantized_rows(arch: str, model: str, name: str) -> list[dict[str, Any]]:
    """Return a row a kernel of a step of the same bucket whose gradients are quantized, of one of two workers.

    The gradients lie in one buffer, as DDP's do. A row counts what torch does beside the kernels, and one a copy.
    """
    gpu, buckets = GPUS[arch], ddp_buckets(GRADIENT_SETS[model])
    shapes = {str(number): shape for number, shape in enumerate(buckets[min(1, len(buckets) - 1)])}
    numels = [math.prod(shape) for shape in shapes.values()]
    bucket, device = torch.zeros(sum(numels)), torch.device("cpu")
    gradients = {key: piece.view(shapes[key]) for key, piece in zip(shapes, bucket.split(numels), strict=True)}
    with mock.patch.object(backends, "why_not_triton", return_value=None), recording(run=False) as launches:
        config = PowerSGDConfig(quantize=name, backend="triton")
        engine = new_engine(config, StandIn(collectives=_Nothing), lambda: shapes)
        # The first step also compares the workers.
        for _ in range(2):
            launches.clear()
            with _Operations() as operations:
                engine.average(engine.begin("all", lambda: shapes, device, last=True), gradients)
    rows = []
    for launch in launches:
        compiled = compile_launch(launch.kernel, launch.parameters(), launch.options(), arch)
        messages = launch.parameters().get("messages", 1)
        content = messages * QUANTIZED[name].difference_bytes(bucket.numel())[1]
        # Gradients are read, and written again if they keep errors. The average is written.
        passes = 1 + bool(launch.parameters().get("SUBTRACT"))
        moved = bucket.nbytes * passes + content
        if launch.name == "note_infinite":
            # The scales of two messages.
            moved = 2 * 2 * launch.parameters()["numel"]
        cost = _cost(launch, compiled, moved, 0, gpu)
        rows.append(
            {"kernel": launch.name, "launches": 1, **{key: compiled[key] for key in (*COUNTS, "blocks")}} | cost
        )
    for kernel, number, moved in (
        ("operations of torch", operations.number, operations.moved),
        ("a copy, for comparison", 1, 2 * bucket.nbytes),
    ):
        seconds = number * LAUNCH_SECONDS + moved / gpu.bandwidth
        empty = dict.fromkeys((*COUNTS, "blocks", "programs", "waves", "issue"), 0)
        rows.append(
            {"kernel": kernel, "launches": number, "bytes": moved, "bytes_l2": moved, **empty, "us": seconds * 1e6}
        )
    return [{"architecture": arch, "quantize": name, **row, "us": round(row["us"], 1)} for row in rows]


class _Nothing:
    """Collectives that take no time, since a prediction adds theirs."""

    @staticmethod
    def all_gather_single(*_tensors: Any, **_options: Any) -> None: ...


class _Operations(TorchDispatchMode):
    """Counts the operations of torch that a GPU would launch, and the bytes of what they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = func._schema.name.removeprefix("aten::")
        if not func.is_view and made not in ("empty", "empty_like", "new_empty", "detach", "_local_scalar_dense"):
            self.number += 1
            # A result in place is read too.
            self.moved += sum(x.nbytes for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor))
        return result


def _cost(launch: Launch, compiled: dict[str, Any], moved: float, rank: int, gpu: Gpu) -> dict[str, Any]:
    """What one launch costs.

    A launch takes ``LAUNCH_SECONDS``, then the longest of its bytes over the bandwidth of the memory, of the cache, and
    its instructions over those that all schedulers issue, over the share of the time in which its programs keep the
    multiprocessors busy. Instructions are counted for kernels over whole matrices: those of the compiled loops, times
    the passes that the table of tiles gives; and over whole tensors: all, and the loop's for each further message.
    Where columns are eliminated one after another, the time of that comes on top, and of adding the parts before. One
    pass is taken to be enough.

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
    elif launch.name in DIFFERENCES:
        again = (parameters.get("messages", 1) - 1) * compiled["short_loop"]
        issued = launch.options()["num_warps"] * programs * (compiled["instructions"] + again)
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
