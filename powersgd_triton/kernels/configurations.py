"""Launch parameters by architecture, kernel and rank: one table, and no search at run time.

(Triton's autotuner runs a kernel several times to time it. Kernels that update M in place would do so several times.)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from powersgd_triton.layout.wire_format import BLOCK

NUMERICS = {"enable_fp_fusion": False}
"""Triton's options that decide what kernels compute; every launch passes them.

If a product and a sum may be fused, which of them are is the compiler's choice. Workers with other versions of Triton,
or other environment variables, would then compute other bits.
"""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        rows, columns: a tile of a matrix.
        panel: columns of the factors that one program multiplies by; at least 16, which is the least for tl.dot.
        num_warps, num_stages: Triton's.
        precision: of products of fp32 values, Triton's ``input_precision``.
        wide: whether factors may have more columns than a panel.
    """

    rows: int
    columns: int
    panel: int
    num_warps: int
    num_stages: int
    precision: str
    wide: bool = False

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, self.columns

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """Triton's own keywords, which every kernel takes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **NUMERICS}

    @functools.cached_property
    def of_factors(self) -> dict[str, Any]:
        """The keywords of a kernel that works on blocks of rows of a factor."""
        return {"C": self.panel, "BLOCK_ROWS": self.rows, **self.options}

    @functools.cached_property
    def of_tiles(self) -> dict[str, Any]:
        """The keywords of a kernel that works on tiles of matrices."""
        return {**self.of_factors, "BLOCK_COLS": self.columns, "PRECISION": self.precision}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The launches of a bucket whose largest rank is at most some bound.

    ``gram`` and ``orthogonalize`` work on blocks of ``rows`` of a factor and on a panel of its columns. So does
    ``wire``, whose rows are a block of the format.
    """

    compensate_project: Launch
    compensate_backproject: Launch
    backproject: Launch
    reconstruct: Launch
    gram: Launch
    orthogonalize: Launch
    wire: Launch


def _narrow(precision: str, rows: int, stages: int, gram_warps: int) -> Configuration:
    # Kernels that walk along rows share a table of tiles, and so do those that walk along columns: the rows of the
    # former and the columns of the latter must be the same.
    return Configuration(
        compensate_project=Launch(rows, 32, 16, 8, stages, precision),
        compensate_backproject=Launch(16, 64, 16, 4, min(stages, 2), precision),
        backproject=Launch(32, 64, 16, 4, 2, precision),
        reconstruct=Launch(rows, 32, 16, 8, min(stages, 2), precision),
        gram=Launch(32, 16, 16, gram_warps, 1, precision),
        orthogonalize=Launch(32, 16, 16, 1, 1, precision),
        wire=Launch(BLOCK, 16, 16, 4, 1, precision),
    )


def _wide(
    precision: str, stages: int, left_stages: int, wire_warps: int, gram_warps: int, *, several: bool = False
) -> Configuration:
    return Configuration(
        compensate_project=Launch(32, 32, 32, 4, 2, precision, several),
        compensate_backproject=Launch(32, 32, 32, 4, left_stages, precision, several),
        backproject=Launch(32, 32, 32, 4, 3, precision),
        reconstruct=Launch(32, 32, 32, 4, stages, precision, several),
        gram=Launch(16, 32, 32, gram_warps, 1, precision, several),
        orthogonalize=Launch(16, 32, 32, gram_warps, 1, precision, several),
        wire=Launch(BLOCK, 32, 32, wire_warps, 1, precision),
    )


def _table(
    precision: str, stages: tuple[int, int, int], wire_warps: int, gram_warps: tuple[int, int]
) -> dict[int, Configuration]:
    narrow, wide, several_panels = stages
    return {
        # Each tile reads its columns' rows of Q: few tiles where that is much of the traffic, else many for even work.
        8: _narrow(precision, 128, narrow, gram_warps[0]),
        16: _narrow(precision, 64, narrow, gram_warps[0]),
        32: _wide(precision, wide, wide, wire_warps, gram_warps[1]),
        256: _wide(precision, several_panels, 1, wire_warps, 2, several=True),
    }


# Stages are the most for which nothing is spilled with any dtypes, as benchmarks/kernel_report.py shows. The wire's
# warps make 512 threads, each of which has four elements of half a tile: the widest access. tf32x3 splits each fp32
# value into two of tf32 and is nearly as exact as fp32.
TABLES = {
    "sm_80": _table("tf32x3", (2, 2, 1), 16, (1, 2)),
    "sm_90": _table("tf32x3", (2, 2, 1), 16, (1, 1)),
    "sm_100": _table("tf32x3", (3, 2, 2), 16, (1, 1)),
    "gfx942": _table("ieee", (1, 1, 1), 8, (2, 2)),
}
"""By architecture, then by the largest rank that a configuration is for."""


def architecture(device: torch.device) -> str:
    """Name of a device's architecture; the interpreter's is NVIDIA's."""
    if device.type != "cuda":
        return "sm_80"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def multiprocessors(device: torch.device) -> int:
    """Return how many a device has; an H100's number on the CPU, for the interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


def select_configuration(arch: str, rank: int) -> Configuration:
    """The launches for a bucket of matrices of at most ``rank``. What is not listed is served as its vendor's first."""
    table = TABLES.get(arch, TABLES["gfx942" if arch.startswith("gfx") else "sm_80"])
    return table[min(bound for bound in table if bound >= rank)]
