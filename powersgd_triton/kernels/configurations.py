"""Launch parameters by architecture, kernel and rank. An autotuner would update M in place several times."""

import dataclasses
import functools
from typing import Any

import torch

from powersgd_triton.layout.wire_format import BLOCK

NUMERICS = {"enable_fp_fusion": False}
"""Triton's options that decide what kernels compute. Every launch passes them.

Else the compiler would choose which products and sums to fuse, and workers might compute different bits.
"""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched: on tiles of ``rows`` and ``columns``, with Triton's options.

    A program multiplies by ``panel`` columns of the factors. 16 is the least for tl.dot. If ``wide``, factors may have
    more. ``precision`` is "tf32x3" or "ieee", see ``multiply``. ``registers`` is the most that a thread may have, where
    a limit lets more programs run on a multiprocessor and little is spilled: if all of G, M and Ĝ that the kernel
    accesses are fp32, and otherwise. AMD's compiler knows no such limit.
    """

    rows: int
    columns: int
    panel: int
    num_warps: int
    num_stages: int
    precision: str
    wide: bool = False
    registers: tuple[int | None, int | None] = (None, None)

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, self.columns

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """Keywords of Triton, which every kernel takes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **NUMERICS}

    @functools.cached_property
    def of_factors(self) -> dict[str, Any]:
        """Keywords of a kernel that works on blocks of rows of a factor."""
        return {"C": self.panel, "BLOCK_ROWS": self.rows, **self.options}

    @functools.cached_property
    def of_tiles(self) -> dict[str, Any]:
        """Keywords of a kernel that works on tiles of matrices."""
        return {**self.of_factors, "BLOCK_COLS": self.columns, "PRECISION": self.precision}

    @functools.cached_property
    def of_limited_tiles(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same with each limit of ``registers``."""
        first, other = ({**self.of_tiles, **({"maxnreg": limit} if limit else {})} for limit in self.registers)
        return first, other


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The launches of a bucket whose largest rank is at most some bound.

    ``gram``, ``orthogonalize`` and ``wire`` work on blocks of ``rows`` of a factor and on a panel of its columns.
    """

    compensate_project: Launch
    compensate_backproject: Launch
    backproject: Launch
    reconstruct: Launch
    gram: Launch
    orthogonalize: Launch
    wire: Launch


def _table(
    precision: str,
    stages: tuple[int, int],
    *,
    left: tuple[int, int] = (16, 2),
    wire_warps: int = 16,
    gram_warps: tuple[int, int, int] = (1, 2, 2),
    registers: int | None = None,
    left_registers: int | None = None,
    written: tuple[int | None, int | None] = (128, 128),
) -> dict[int, Configuration]:
    # ``left``: rows and warps of compensate_backproject, which needs the most registers. ``gram_warps``: one warp
    # factorizes without waiting for others, where its registers suffice. Above rank 16 they do not with Triton 3.7.
    # ``registers``, ``left_registers`` and ``written`` limit compensate_project, compensate_backproject and reconstruct
    # up to rank 16: with 168, three programs of four warps fit a multiprocessor, with 128 four, or two of eight warps.
    narrow, wide = stages
    # AMD's registers hold only half of the tiles along columns.
    columns, left_stages = (64, 2) if left[0] > 8 else (32, 1)

    def launch(rows: int, columns: int, panel: int, warps: int, stages: int = 1, **options: Any) -> Launch:
        return Launch(rows, columns, panel, warps, stages, precision, **options)

    def one_narrow_panel(rows: int, warps: int, limits: tuple[int | None, int | None]) -> Configuration:
        # Kernels that walk along rows share a table of tiles, and so do those that walk along columns: the rows of the
        # former and the columns of the latter must be the same.
        return Configuration(
            compensate_project=launch(rows, 16, 16, warps, narrow, registers=limits),
            compensate_backproject=launch(16, 64, 16, 4, narrow, registers=(left_registers, left_registers)),
            # Its tile is half as large as the others' two: as many bytes ahead take more stages.
            backproject=launch(16, 64, 16, 4, narrow + 2 if narrow > 1 else 1),
            reconstruct=launch(rows, 32, 16, warps, min(narrow, 2), registers=written),
            gram=launch(32, 16, 16, gram_warps[0]),
            orthogonalize=launch(32, 16, 16, 1),
            wire=launch(BLOCK, 16, 16, 4),
        )

    def of_factors(warps: int) -> dict[str, Launch]:
        gram = launch(16, 32, 32, warps)
        return {"gram": gram, "orthogonalize": gram, "wire": launch(BLOCK, 32, 32, wire_warps)}

    return {
        # Each tile reads its columns' rows of Q: few tiles where that is much of the traffic, else many for even work.
        # 128 registers let two programs of eight warps run. They suffice for fp32 alone.
        8: one_narrow_panel(128, 8, (registers and 128, None)),
        16: one_narrow_panel(64, 4, (registers, registers)),
        # Parts of sums are long at this rank: with small tiles, there are still enough programs.
        32: Configuration(
            compensate_project=launch(32, 16, 32, 2, wide),
            compensate_backproject=launch(left[0], 32, 32, left[1]),
            backproject=launch(32, 32, 32, 2, wide),
            reconstruct=launch(32, 32, 32, 2, min(wide, 2)),
            **of_factors(gram_warps[1]),
        ),
        # Instructions limit these kernels: four warps split each operand's elements half as often as eight would.
        256: Configuration(
            compensate_project=launch(64, 16, 32, 4, wide=True),
            compensate_backproject=launch(left[0], columns, 32, 4, wide=True),
            backproject=launch(32, columns, 32, 4, left_stages),
            reconstruct=launch(64, 32, 32, 4, wide=True),
            **of_factors(gram_warps[2]),
        ),
    }


def _measured(table: dict[int, Configuration], found: dict[int, dict[str, dict[str, Any]]]) -> dict[int, Configuration]:
    """Replace values of launches by those that were found to be faster."""
    return {
        bound: dataclasses.replace(
            each, **{name: dataclasses.replace(getattr(each, name), **values) for name, values in found[bound].items()}
        )
        for bound, each in table.items()
    }


_NARROW: dict[str, dict[str, Any]] = {
    "compensate_project": {"rows": 32, "columns": 32, "num_warps": 4, "registers": (128, None)},
    "backproject": {"rows": 32, "num_stages": 4},
    "reconstruct": {"rows": 32, "columns": 64, "num_warps": 4, "num_stages": 1},
}
H100: dict[int, dict[str, dict[str, Any]]] = {
    8: _NARROW,
    16: _NARROW,
    32: {
        "compensate_project": {"columns": 32, "num_stages": 2},
        "reconstruct": {"columns": 64, "num_warps": 4, "num_stages": 1},
    },
    256: {"compensate_project": {"columns": 32}, "backproject": {"num_stages": 3}, "reconstruct": {"columns": 64}},
}
"""Of GPT-2's and Llama's gradients in fp32, with Triton 3.6. Tiles of 128 bytes and more in a row use the memory better
than high ones of 64 bytes, with which compensate_project took up to 1.5 times as long."""

# With Triton 3.9, nothing is spilled but a few bytes on sm_89 with 16-bit gradients (benchmarks/kernel_report.py).
# Up to rank 16, with three stages, two programs of a multiprocessor load 32 KiB ahead, as many as an H100 needs to
# be busy. The wire's warps make 512 threads, each of which has four elements of half a tile: the widest access. tf32x3
# splits each fp32 value into two of tf32 and is nearly as exact as fp32.
TABLES = {
    "sm_80": _table("tf32x3", (3, 2), registers=168, left_registers=128),
    "sm_89": _table("tf32x3", (3, 3), gram_warps=(2, 4, 4)),
    "sm_90": _measured(_table("tf32x3", (3, 3), registers=168), H100),
    "sm_100": _table("tf32x3", (4, 3), registers=168, left_registers=168, written=(128, None)),
    "sm_120": _table("tf32x3", (3, 3)),
    "gfx942": _table("ieee", (1, 1), left=(8, 4), wire_warps=8, gram_warps=(1, 1, 1), written=(None, None)),
}
"""By architecture, then by the largest rank that a configuration is for."""


def architecture(device: torch.device) -> str:
    """Return the name of a device's architecture. That of the interpreter is NVIDIA's."""
    if device.type != "cuda":
        return "sm_80"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def multiprocessors(device: torch.device) -> int:
    """Return how many a device has, or an H100's number for the interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


def is_captured(device: torch.device) -> bool:
    """Return whether work on the device is captured in a CUDA graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def select_configuration(arch: str, rank: int) -> Configuration:
    """Return the launches for matrices of at most this rank.

    An architecture that is not listed is served as the nearest before it, and an older one as the first of its vendor.
    """
    vendor = arch[:3]
    known = [name for name in TABLES if name.startswith(vendor)]
    if vendor == "sm_":
        known = [name for name in known if int(name[3:]) <= int(arch[3:])] or known[:1]
    table = TABLES[known[-1]]
    return table[min(bound for bound in table if bound >= rank)]
