"""What the compiler makes of every kernel, without a GPU: registers, spills, shared memory, access widths.

python benchmarks/kernel_report.py [--json] [--architecture sm_90] [--kernel compensate_project] [--rank 4]
python benchmarks/kernel_report.py --bucket [--json] [--architecture sm_90] [--gradients gpt2-124M] [--rank 4]
python benchmarks/kernel_report.py --bucket --quantize int8 [--json] [--architecture sm_90] [--gradients gpt2-124M]

The launches are recorded from the launchers themselves, so that what is compiled is what would run.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
# The interpreter's kernels cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import torch

from benchmarks.bucket_costs import bucket_rows, quantized_rows
from benchmarks.compiled import GPUS, compile_launch
from benchmarks.launches import Launch, recording
from benchmarks.markdown import markdown_table
from benchmarks.shapes import GRADIENT_SETS
from powersgd_triton.kernels import (
    backproject,
    commit,
    compensate_project,
    differences,
    explore,
    orthogonalize,
    pack,
    reconstruct,
    sparse,
)
from powersgd_triton.kernels.configurations import Configuration, select_configuration
from powersgd_triton.kernels.table import BucketTable, Matrix
from powersgd_triton.kernels.wire import TritonWire
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.sparse_format import SparseFormat
from powersgd_triton.layout.wire_format import FORMATS, QUANTIZED, WirePlan

RANKS = (4, 16, 32, 64)
BUCKET_RANKS = (4, 16, 32)
SWEEPS = {"sweeps": "the L2 cache or memory", "sweeps_dram": "memory"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = ("bfloat16", "float16", "int8", "int4")
SPARSE_COMPRESSIONS = (16, 50, 1000)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A launch, and a label that says of what."""

    launch: Launch
    label: str


def variants(arch: str, ranks: Sequence[int] = RANKS) -> Iterator[Variant]:
    """Every kernel as it is launched: ranks of one and several panels, all dtypes.

    Kernels decide on the device how they access a tile, so one compiled kernel serves aligned and other matrices.
    """
    for rank in ranks:
        for G, M in itertools.product(DTYPES, (torch.float32, torch.bfloat16)):
            # Dtypes matter to the kernels over whole gradients only.
            factors_too = G == M == torch.float32
            yield from _launches(select_configuration(arch, rank), rank, G, M, factors_too)
        for width in WIDTHS:
            yield from _wire_launches(select_configuration(arch, rank), rank, width)
    for name, dtype, aligned in itertools.product(QUANTIZED, DTYPES, (True, False)):
        yield from _difference_launches(name, dtype, aligned)
        if QUANTIZED[name].stochastic:
            yield from _difference_launches(name, dtype, aligned, seed=2**32 - 1)
    yield from _sparse_launches()


def _launches(
    launches: Configuration, rank: int, G_dtype: torch.dtype, M_dtype: torch.dtype, factors_too: bool
) -> Iterator[Variant]:
    """Launch a step on a small bucket and record what would run."""
    n, m = 256, 256
    cpu = torch.device("cpu")
    table = BucketTable(
        [Matrix(n, m, rank, 0, 0, 0)],
        [(8, n * rank, m * rank)],
        launches.reconstruct.tile,
        launches.backproject.tile,
        cpu,
    )
    gradient, error = torch.zeros(n * m, dtype=G_dtype), torch.zeros(n * m, dtype=M_dtype)
    G = table.pointers([gradient, torch.zeros(8, dtype=G_dtype)])
    M = table.pointers([error], bypass=False)
    factor = torch.zeros(2 * n * rank + 8)
    wide = torch.zeros(64 * 1024, dtype=torch.float64)
    flag, scalar = torch.ones((), dtype=torch.int32), torch.ones(())
    verdict, count = torch.ones(2, dtype=torch.int64).unbind()
    pending = factor, factor, verdict
    names = [str(t).removeprefix("torch.") for t in (G_dtype, M_dtype)]
    label = f"rank {rank}, {names[0]}/{names[1]}"
    with recording(run=False) as recorded:
        compensate_project.compensate_project_triton(
            table, G, M, pending, scalar, factor, launches.compensate_project, out=factor
        )
        backproject.compensate_backproject_triton(
            table, G, M, pending, scalar, factor, launches.compensate_backproject, launches.backproject, out=factor
        )
        if M_dtype == torch.float32:
            compensate_project.compensate_project_triton(
                table, G, None, pending, scalar, factor, launches.compensate_project, out=factor
            )
            reconstruct.reconstruct_triton(
                table, factor, factor, factor, table.pack_P, launches.reconstruct, out=G, verdict=verdict
            )
            pack.pack_triton(table.pack_P, factor, G, flag, own=None, message=factor)
            pack.pack_triton(table.pack_left, factor, G, flag, own=factor, message=factor)
        if G_dtype == torch.float32:
            backproject.backproject_triton(table, M, factor, launches.backproject, out=factor)
        commit.commit_triton(
            table, G, M, factor, 2, flag, basis=factor, message=factor, verdict=verdict
        )  # fmt: skip
        if factors_too:
            pack.pack_triton(table.pack_Q, factor, G, flag, own=factor, message=factor, workers=2)
            orthogonalize.orthogonalize_triton(
                table.P, factor, rank, count, 0.0, launches.gram, launches.orthogonalize,
                X=wide, grams=wide, finite=flag, out=factor,
            )  # fmt: skip
            explore.explore_triton(table, count, flag, rank, 16, parts=factor, out=factor)
    yield from _different(recorded, label)


def _wire_launches(launches: Configuration, rank: int, width: str) -> Iterator[Variant]:
    """Launch what a narrow message takes."""
    plan = WirePlan.build(FORMATS[width], [(2, 256, rank)], 8, 4, workers=2)
    kernels = TritonWire(plan, launches.wire, rank, torch.device("cpu"))
    message, content = torch.zeros(512 * rank + 129 + 8), torch.zeros(2, plan.size, dtype=torch.uint8)
    for own in (message, None):
        with recording(run=False) as recorded:
            kernels.encode(message, own, out=content)
            kernels.reduce(content, own, 0, out=content[0])
            if own is not None:
                kernels.decode(content, out=message)
        label = f"rank {rank}, wire {width}{'' if own is None else ' and own'}"
        yield from _different(recorded, label)


def _difference_launches(name: str, dtype: torch.dtype, aligned: bool, seed: int | None = None) -> Iterator[Variant]:
    """Launch the coding of differences between fp32 and copies, and of whole copies, which keep what is not sent.

    Rows with an odd number of elements are unaligned. With a seed, what is sent is rounded stochastically.
    """
    width, numel = QUANTIZED[name], 4096 if aligned else 4097
    target, copies = torch.zeros(numel), torch.zeros(2, numel, dtype=dtype)
    content = torch.zeros(2, width.difference_bytes(numel)[1], dtype=torch.uint8)
    with recording(run=False) as recorded:
        # The second of two unaligned rows starts at an odd element.
        copy = copies[0 if aligned else 1]
        differences.encode_triton(Encoding(target, copy, width, content[0], seed=seed))
        differences.encode_triton(Encoding(copy, None, width, content[0], subtract=True, seed=seed))
        if seed is None:
            differences.apply_triton(Decoding(content, width, copies))
            differences.apply_triton(Decoding(content, width, copies[:1].expand(2, -1), fresh=True))
        else:
            differences.encode_triton(Encoding(copy, None, width, content[0], seed=seed))
    kind = f"differences {name}" if seed is None else f"stochastic differences {name}"
    label = f"{kind}, {str(dtype).removeprefix('torch.')}{'' if aligned else ', unaligned'}"
    yield from _different(recorded, label)


def _sparse_launches() -> Iterator[Variant]:
    """Launch the coding of sparse messages, as local steps do."""
    for compression in SPARSE_COMPRESSIONS:
        width, whole = SparseFormat.of(compression), torch.zeros(1, 8192)
        content = torch.zeros(2, width.difference_bytes(8192)[1], dtype=torch.uint8)
        with recording(run=False) as recorded:
            sparse.encode_sparse_triton(Encoding(whole[0], None, width, content[0], subtract=True))
            sparse.apply_sparse_triton(Decoding(content, width, whole.expand(2, -1), fresh=True))
        yield from _different(recorded, f"sparse {compression}x")


def _different(recorded: Sequence[Launch], label: str) -> Iterator[Variant]:
    """Launches that are compiled apart, with a label."""
    seen = set()
    for launch in recorded:
        kinds = [v.dtype if isinstance(v, torch.Tensor) else v for v in launch.parameters().values()]
        key = (launch.name, *map(str, kinds))
        if key not in seen:
            seen.add(key)
            yield Variant(launch, label)


def compile_variant(variant: Variant, arch: str) -> dict[str, Any]:
    """Compile for an architecture and read the result."""
    launch, parameters = variant.launch, variant.launch.parameters()
    return {
        "kernel": launch.name,
        "architecture": arch,
        "variant": variant.label,
        "vector": parameters.get("VEC"),
        "compensate": bool(parameters.get("COMPENSATE", False)),
        **{name: parameters[name] for name in ("C", "BLOCK_ROWS", "BLOCK_COLS") if name in parameters},
        "num_warps": 4,
        **launch.options(),
        **compile_launch(launch.kernel, parameters, launch.options(), arch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--architecture", choices=GPUS, action="append", help="default: all")
    parser.add_argument("--kernel", help="only this kernel")
    parser.add_argument("--rank", type=int, action="append", help=f"default: {', '.join(map(str, RANKS))}")
    parser.add_argument("--only", action="append", help="only variants whose label contains this; may be repeated")
    parser.add_argument("--bucket", action="store_true", help="a step of one bucket instead, with a predicted time")
    parser.add_argument("--gradients", choices=GRADIENT_SETS, default="gpt2-124M", help="of which model, with --bucket")
    parser.add_argument(
        "--quantize",
        choices=QUANTIZED,
        action="append",
        help="with --bucket: of gradients in this format, without ranks",
    )
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.bucket:
        ranks = arguments.rank or ([] if arguments.quantize else BUCKET_RANKS)
        kinds = [(bucket_rows, rank) for rank in ranks] + [(quantized_rows, name) for name in arguments.quantize or []]
        for arch, (rows_of, kind) in itertools.product(arguments.architecture or ["sm_90"], kinds):
            found = rows_of(arch, arguments.gradients, kind)
            rows += found
            if not arguments.json:
                print(_bucket_table(found), flush=True)
        if arguments.json:
            # A row a line.
            print("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]")
        return
    for arch in arguments.architecture or GPUS:
        for variant in variants(arch, arguments.rank or RANKS):
            if arguments.kernel in (None, variant.launch.name) and any(
                part in variant.label for part in arguments.only or [""]
            ):
                rows.append(compile_variant(variant, arch))
                if not arguments.json:
                    print(_line(rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))


def _bucket_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a kernel of a step of one bucket, and their sums. "Issue" is instructions over time of memory accesses."""
    gpu, kind = GPUS[rows[0]["architecture"]], rows[0].get("quantize")
    columns = ("launches", "programs", "waves", "registers", "blocks", "barriers", "shuffles", "fp64")
    lines = [["kernel", *columns, "MB", "MB of L2", "issue", "predicted µs"]]
    lines.append(["---", *["--:"] * (len(columns) + 4)])
    for row in rows:
        counts = [", ".join(map(str, row[name])) if isinstance(row[name], list) else str(row[name]) for name in columns]
        megabytes = (f"{row[name] / 1e6:.1f}" for name in ("bytes", "bytes_l2"))
        lines.append([row["kernel"], *counts, *megabytes, f"{row['issue']:.2f}", f"{row['us']:.0f}"])
    if kind is not None:
        *rows, copy = rows
    launches, time = sum(row["launches"] for row in rows), sum(row["us"] for row in rows)
    lines.append(["**step**", f"**{launches}**", *[""] * (len(columns) + 2), f"**{time:.0f}**"])
    if kind is not None:
        return f"\n{gpu.name}, {kind}: {time / copy['us']:.2f} copies of the bucket\n\n{markdown_table(lines)}"
    read = " and ".join(f"{sum(row[name] for row in rows)} from {place}" for name, place in SWEEPS.items())
    return f"\n{gpu.name}, rank {rows[0]['rank']}: M is read or written {read}\n\n{markdown_table(lines)}"


def _line(row: dict[str, Any]) -> str:
    share = row["accesses_128_bit"] / row["accesses"] if row["accesses"] else 0.0
    name = row["kernel"] + (" (G)" if row["compensate"] else "")
    return (
        f"{row['architecture']:<7} {name:<26} {row['variant']:<38} "
        f"regs {row['registers']:>3}  spills {row['spill_bytes']:>4} B  "
        f"shared {row['shared_bytes']:>6} B  128-bit {share:>4.0%} of {row['accesses']:>3}  "
        f"tensor cores {row['tensor_core_instructions']:>4} {','.join(row['tensor_core_kinds'])}"
    )


if __name__ == "__main__":
    main()
