"""Q = Mᵀ P̂, in one pass over M."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.table import BucketTable, Pointers


@triton.jit
def _columns(
    M, P_hat, parts, n, m, r, col, start, end, panel,
    VEC: tl.constexpr, C: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of columns, at whose first one M and parts point. The compiler sees that VEC divides m."""
    m = m // VEC * VEC
    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    ranks = tl.arange(0, C)
    rank_ok = panel + ranks < r
    col_ok = col + cols < m
    total = tl.zeros([C, BLOCK_COLS], tl.float32)
    for row in range(start, end, BLOCK_ROWS):
        row_ok = row + rows < end
        skip = tl.cast(row, tl.int64)
        P_tile = tl.load(
            P_hat + skip * r + panel + rows[None, :] * r + ranks[:, None], rank_ok[:, None] & row_ok[None, :], 0.0
        )  # [C, rows]
        tile = rows[:, None] * m + cols[None, :]
        value = tl.load(M + skip * m + tile, row_ok[:, None] & col_ok[None, :], 0.0).to(tl.float32)
        total += tl.dot(P_tile, value, input_precision=PRECISION)
    tl.store(parts + panel + cols[None, :] * r + ranks[:, None], total, rank_ok[:, None] & col_ok[None, :])


@triton.jit
def _backproject_kernel(
    M, M_offsets, P_hat, parts, records, tiles,
    MIXED: tl.constexpr, VEC: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of Q [m, r]. Grid: (column tiles, panels of C columns of P̂)."""
    work = tiles + tl.program_id(0) * 5
    matrix = tl.load(work)
    col = tl.load(work + 1) // BLOCK_COLS * BLOCK_COLS
    start = tl.load(work + 2)
    end = tl.load(work + 3)
    split = tl.load(work + 4)
    record = records + matrix * 8
    n = tl.load(record).to(tl.int32)
    m = tl.load(record + 1).to(tl.int32)
    r = R
    if R == 0:
        r = tl.load(record + 2).to(tl.int32)
    panel = tl.program_id(1) * C
    if panel >= r:
        return
    P_hat += tl.load(record + 3)
    parts += tl.load(record + 6) + (split * tl.load(record + 1) + col) * r
    M_at = tl.load(M_offsets + matrix * 2)
    if MIXED and tl.load(M_offsets + matrix * 2 + 1) == 0:
        _columns(
            M + M_at + col, P_hat, parts, n, m, r, col, start, end, panel,
            1, C, BLOCK_ROWS, BLOCK_COLS, PRECISION,
        )  # fmt: skip
    else:
        _columns(
            M + M_at // VEC * VEC + col, P_hat, parts, n, m, r, col, start, end, panel,
            VEC, C, BLOCK_ROWS, BLOCK_COLS, PRECISION,
        )  # fmt: skip


def backproject_triton(table: BucketTable, M: Pointers, P: Tensor, launch: Launch, *, out: Tensor) -> None:
    """out = parts of Q = Mᵀ P; see ``backproject_reference``.

    Args:
        table: the bucket's.
        M: matrices of fp32, bf16 or fp16.
        P: all matrices' factors, fp32, flat.
        launch: tile, warps and stages.
        out: fp32, ``table.q_parts_numel`` elements: each split's part of each Q [m, r].
    """
    if not table.matrices:
        return
    _backproject_kernel[(len(table.column_tiles), -(-table.rank // launch.panel))](
        M.anchor,
        M.offsets,
        P,
        out,
        table.records,
        table.column_tiles,
        MIXED=not M.aligned,
        VEC=M.vector,
        R=table.uniform_rank,
        C=launch.panel,
        BLOCK_ROWS=launch.rows,
        BLOCK_COLS=launch.columns,
        PRECISION=launch.precision,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
