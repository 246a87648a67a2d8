"""What the compiler makes of every kernel, without a GPU: registers, spills, shared memory, access widths.

python benchmarks/kernel_report.py [--json] [--architecture sm_90] [--kernel compensate_project] [--rank 4]

The launches are recorded from the launchers themselves, so that what is compiled is what would run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# The interpreter's kernels cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget

from powersgd_triton.kernels import (
    backproject,
    commit,
    compensate_backproject,
    compensate_project,
    differences,
    explore,
    gram,
    orthogonalize,
    pack,
    panels,
    reconstruct,
    wire,
)
from powersgd_triton.kernels.configurations import Configuration, select_configuration
from powersgd_triton.kernels.table import BucketTable, Matrix
from powersgd_triton.kernels.wire_table import WireTable
from powersgd_triton.layout.wire_format import DIFFERENCES, FORMATS, WirePlan

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
RANKS = (4, 16, 32, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = ("bfloat16", "float16", "int8", "int4")
MODULES = (
    *(compensate_project, compensate_backproject, backproject, reconstruct),
    *(pack, commit, explore, gram, panels, orthogonalize, wire, differences),
)


@dataclasses.dataclass
class Variant:
    """One launch: the kernel, the values of its arguments, and a label."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    label: str


def variants(arch: str, ranks: Sequence[int] = RANKS) -> Iterator[Variant]:
    """Every kernel as it is launched: ranks of one and several panels, dtypes, aligned and unaligned segments."""
    for rank in ranks:
        for G, M, unaligned in itertools.product(DTYPES, (torch.float32, torch.bfloat16), (False, True)):
            # Dtypes and alignment matter to the kernels over whole gradients only.
            factors_too = (G, M, unaligned) == (torch.float32, torch.float32, False)
            yield from _launches(select_configuration(arch, rank), rank, G, M, unaligned, factors_too)
        for width, aligned in itertools.product(WIDTHS, (True, False)):
            yield from _wire_launches(select_configuration(arch, rank), rank, width, aligned)
    for name, dtype, aligned in itertools.product(DIFFERENCES, DTYPES, (True, False)):
        yield from _difference_launches(name, dtype, aligned)


def _launches(
    launches: Configuration, rank: int, G_dtype: torch.dtype, M_dtype: torch.dtype, unaligned: bool, factors_too: bool
) -> Iterator[Variant]:
    """Launch a step on a small bucket and record what would run."""
    n, m = 256, 256
    cpu = torch.device("cpu")
    # A second matrix of another rank makes the rank a run-time value.
    matrices = [Matrix(n, m, rank, 0, 0, 0)] + [Matrix(n, m, rank - 1, n * rank, m * rank, 1)] * unaligned
    table = BucketTable(
        matrices, [(8, 2 * n * rank, 2 * m * rank)], launches.compensate_project.tile, launches.backproject.tile, cpu
    )  # fmt: skip
    shift = int(unaligned)
    gradients = torch.zeros(2 * n * m + 16, dtype=G_dtype)
    errors = torch.zeros(2 * n * m + 16, dtype=M_dtype)
    G = table.pointers(
        [gradients[shift + i * n * m :][: n * m] for i in range(len(matrices))] + [torch.zeros(8, dtype=G_dtype)]
    )
    M = table.pointers([errors[shift + i * n * m :][: n * m] for i in range(len(matrices))], bypass=False)
    factor = torch.zeros(2 * n * rank + 8)
    wide = torch.zeros(64 * 1024, dtype=torch.float64)
    flag, scalar = torch.ones((), dtype=torch.int32), torch.ones(())
    verdict, count = torch.ones(2, dtype=torch.int64).unbind()
    names = [str(t).removeprefix("torch.") for t in (G_dtype, M_dtype)]
    label = f"rank {rank}, {names[0]}/{names[1]}{', unaligned' if unaligned else ''}"
    with _recording() as recorded:
        compensate_project.compensate_project_triton(
            table, G, M, factor, factor, verdict, scalar, factor, launches.compensate_project, out=factor
        )
        compensate_backproject.compensate_backproject_triton(
            table, G, M, factor, factor, verdict, scalar, factor,
            launches.compensate_backproject, launches.backproject, out=factor,
        )  # fmt: skip
        if M_dtype == torch.float32:
            compensate_project.compensate_project_triton(
                table, G, None, factor, factor, verdict, scalar, factor, launches.compensate_project, out=factor
            )
            reconstruct.reconstruct_triton(
                table, factor, factor, factor, table.pack_P, launches.reconstruct, out=G, verdict=verdict
            )
            pack.pack_triton(table.pack_P, factor, G, flag, own=None, message=factor)
            pack.pack_triton(table.pack_left, factor, G, flag, own=factor, message=factor)
        if G_dtype == torch.float32:
            backproject.backproject_triton(table, M, factor, launches.backproject, out=factor)
        if not unaligned:
            commit.commit_triton(
                table, G, M, factor, 2, flag, largest=2.0**110, basis=factor, message=factor, verdict=verdict
            )  # fmt: skip
        if factors_too:
            pack.pack_and_average_triton(table, factor, factor, 2, flag, own=factor, message=factor)
            orthogonalize.orthogonalize_triton(
                table.P, factor, rank, count, 0.0, launches.gram, launches.orthogonalize,
                X=wide, grams=wide, finite=flag, out=factor,
            )  # fmt: skip
            explore.explore_triton(
                table, count, flag, every=16, other=4, carry=0.05, smallest=2**-8, out=factor
            )  # fmt: skip
    yield from _different(recorded, label)


def _wire_launches(launches: Configuration, rank: int, width: str, aligned: bool) -> Iterator[Variant]:
    """Launch what a narrow message takes; unaligned where one of the factors has a single column."""
    factors = [(2, 256, rank)] + [(1, 129, 1)] * (not aligned)
    plan = WirePlan.build(FORMATS[width], factors, 8, 4, workers=2)
    table = WireTable(plan, launches.wire.panel, torch.device("cpu"))
    message, content = torch.zeros(512 * rank + 129 + 8), torch.zeros(2, plan.size, dtype=torch.uint8)
    for own in (message, None):
        with _recording() as recorded:
            wire.encode_triton(table, message, own, launches.wire, out=content)
            wire.reduce_triton(table, content, own, 0, launches.wire, out=content[0])
            if own is not None:
                wire.decode_triton(table, content, launches.wire, out=message)
        label = f"rank {rank}, wire {width}{'' if own is None else ' and own'}{'' if aligned else ', unaligned'}"
        yield from _different(recorded, label)


def _difference_launches(name: str, dtype: torch.dtype, aligned: bool) -> Iterator[Variant]:
    """Launch the coding of differences between fp32 and copies; unaligned where rows have an odd number of elements."""
    width, numel = DIFFERENCES[name], 4096 if aligned else 4097
    target, copies = torch.zeros(numel), torch.zeros(2, numel, dtype=dtype)
    content = torch.zeros(2, width.difference_bytes(numel)[1], dtype=torch.uint8)
    with _recording() as recorded:
        differences.encode_triton(target, copies[not aligned], width, content[0])
        differences.apply_triton(content, width, copies)
    label = f"differences {name}, {str(dtype).removeprefix('torch.')}{'' if aligned else ', unaligned'}"
    yield from _different(recorded, label)


def _different(recorded: Sequence[Variant], label: str) -> Iterator[Variant]:
    """Launches that are compiled apart, with a label."""
    seen = set()
    for variant in recorded:
        kinds = [v.dtype if isinstance(v, torch.Tensor) else v for v in variant.arguments.values()]
        key = (variant.kernel.__name__, *map(str, kinds))
        if key not in seen:
            seen.add(key)
            yield dataclasses.replace(variant, label=label)


@contextlib.contextmanager
def _recording() -> Iterator[list[Variant]]:
    """Kernels record their launches instead of running."""
    recorded: list[Variant] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **named: Any) -> None:
                options = {name: named.pop(name) for name in named.keys() - set(self.kernel.arg_names)}
                values: dict[str, Any] = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
                recorded.append(Variant(self.kernel, values, options, ""))

            return launch

    with contextlib.ExitStack() as stack:
        for module in MODULES:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(mock.patch.object(module, name, Recorder(getattr(module, name))))
        yield recorded


class Driver:
    """What Triton asks of a driver in order to compile a launch without running it."""

    def __init__(self, arch: str) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self._arch]

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels by device.
        return self._arch

    def get_current_stream(self, device: str) -> int:  # noqa: ARG002
        return 0


def compile_variant(variant: Variant, arch: str) -> dict[str, Any]:
    """Compile for an architecture and read the result."""
    triton.runtime.driver.set_active(Driver(arch))
    # What Triton assumes of each argument is its own decision here, as in a launch: it depends on the argument's
    # address, value and size, and differs between NVIDIA and AMD.
    compiled = variant.kernel.warmup(grid=(1,), **variant.arguments, **variant.options)
    found = _read_amd(compiled) if arch.startswith("gfx") else _read_nvidia(compiled)
    constants = variant.arguments
    return {
        "kernel": variant.kernel.__name__.strip("_").removesuffix("_kernel"),
        "architecture": arch,
        "variant": variant.label,
        "vector": constants.get("VEC"),
        "compensate": bool(constants.get("COMPENSATE", False)),
        **{name: constants[name] for name in ("C", "BLOCK_ROWS", "BLOCK_COLS") if name in constants},
        "num_warps": 4,
        **variant.options,
        **found,
        "aligned_arguments": len(re.findall(r"%\w+: [^%]*tt.divisibility = 16", compiled.asm["ttir"])),
        "small_arguments": len(re.findall(r"%\w+: [^%]*tt.pointer_range = 32", compiled.asm["ttir"])),
    }


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_nvidia(compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        code = subprocess.run(
            [_tool("cuobjdump"), "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {
        key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage.stdout + usage.stderr)
    }
    accesses = re.findall(r"\b(?:LDG|STG|LDGSTS)\.(\S+)", code)
    matrix = re.findall(r"\b(?:HMMA|DMMA|HGMMA|IMMA|UTC\w*MMA)\S*", code)
    return {
        "registers": numbers["REG"],
        "spill_bytes": numbers["STACK"] + numbers["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
        "accesses": len(accesses),
        "accesses_128_bit": sum(".128" in access or access.endswith("128") for access in accesses),
        "loads_128_bit": len(re.findall(r"\bLDG(?:STS)?\.\S*128", code)),
        "stores_128_bit": len(re.findall(r"\bSTG\.\S*128", code)),
        "tensor_core_instructions": len(matrix),
        "tensor_core_kinds": sorted({instruction.split(".")[0] for instruction in matrix}),
    }


def _read_amd(compiled: Any) -> dict[str, Any]:
    code = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", code)
        return int(found.group(1)) if found else 0

    accesses = re.findall(r"\b(?:global|buffer|flat)_(load|store)_(\S+)", code)
    matrix = re.findall(r"\bv_mfma_\S+", code)
    return {
        "registers": number("vgpr_count"),
        "spill_bytes": 4 * (number("vgpr_spill_count") + number("sgpr_spill_count"))
        + number("private_segment_fixed_size"),
        "shared_bytes": compiled.metadata.shared,
        "accesses": len(accesses),
        "accesses_128_bit": sum("x4" in width for _, width in accesses),
        "loads_128_bit": sum(kind == "load" and "x4" in width for kind, width in accesses),
        "stores_128_bit": sum(kind == "store" and "x4" in width for kind, width in accesses),
        "tensor_core_instructions": len(matrix),
        "tensor_core_kinds": sorted({re.sub(r"_\d.*", "", instruction) for instruction in matrix}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--architecture", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--kernel", help="only this kernel")
    parser.add_argument("--rank", type=int, action="append", help=f"default: {', '.join(map(str, RANKS))}")
    parser.add_argument("--only", action="append", help="only variants whose label contains this; may be repeated")
    arguments = parser.parse_args()
    rows = []
    for arch in arguments.architecture or TARGETS:
        for variant in variants(arch, arguments.rank or RANKS):
            name = variant.kernel.__name__.strip("_").removesuffix("_kernel")
            if arguments.kernel in (None, name) and any(part in variant.label for part in arguments.only or [""]):
                rows.append(compile_variant(variant, arch))
                if not arguments.json:
                    print(_line(rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))


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
