"""M ← G + (M − P Qᵀ) and Q = Mᵀ P̂, in one pass over G and M: the left half of the alternating algorithm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.backproject import backproject_triton
from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.table import BucketTable, Pointers


@triton.jit(do_not_specialize=["applied", "growth"])
def _compensate_backproject_kernel(
    G, G_offsets, M, M_offsets, P_prev, Q_prev, applied, growth, basis, parts, records, tiles,
    WIDE: tl.constexpr, VEC: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of Q [m, r], its first C columns, and M [n, m] in place. Grid: column tiles."""
    work = tiles + tl.program_id(0) * 5
    matrix = tl.load(work)
    col = tl.load(work + 1) // BLOCK_COLS * BLOCK_COLS
    start = tl.load(work + 2)
    end = tl.load(work + 3)
    split = tl.load(work + 4)
    record = records + matrix * 7
    # Written so that the compiler sees what VEC divides.
    m = tl.load(record + 1).to(tl.int32) // VEC * VEC
    r = R
    if R == 0:
        r = tl.load(record + 2).to(tl.int32)
    G += tl.load(G_offsets + matrix) // VEC * VEC + col
    M += tl.load(M_offsets + matrix) // VEC * VEC + col
    P_prev += tl.load(record + 3)
    basis += tl.load(record + 3)
    Q_prev += tl.load(record + 4) + tl.cast(col, tl.int64) * r
    parts += tl.load(record + 6) + (split * tl.load(record + 1) + col) * r
    pending = tl.load(applied)
    scale = tl.load(growth)

    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    ranks = tl.arange(0, C)
    rank_ok = ranks < r
    col_ok = col + cols < m
    tile = rows[:, None] * m + cols[None, :]
    left = rows[:, None] * r + ranks[None, :]  # [rows, C]
    left_t = rows[None, :] * r + ranks[:, None]  # [C, rows]
    right_t = ranks[:, None] + cols[None, :] * r  # [C, cols]
    Q_tile = tl.load(Q_prev + right_t, rank_ok[:, None] & col_ok[None, :], 0.0)
    # 0 · inf would be NaN: what was not applied may have overflowed.
    Q_tile = tl.where(pending > 0, Q_tile, 0.0)
    total = tl.zeros([C, BLOCK_COLS], tl.float32)
    for row in range(start, end, BLOCK_ROWS):
        row_ok = row + rows < end
        ok = row_ok[:, None] & col_ok[None, :]
        first = tl.cast(row, tl.int64)
        value = tl.load(M + first * m + tile, ok, 0.0).to(tl.float32)
        gradient = tl.load(G + first * m + tile, ok, 0.0).to(tl.float32)
        P_tile = tl.load(P_prev + first * r + left, row_ok[:, None] & rank_ok[None, :], 0.0)
        P_tile = tl.where(pending > 0, P_tile, 0.0)
        value -= tl.dot(P_tile, Q_tile, input_precision=PRECISION)
        if WIDE:
            for k in range(C, r, C):
                more = k + ranks < r
                P_more = tl.load(P_prev + first * r + k + left, row_ok[:, None] & more[None, :], 0.0)
                Q_more = tl.load(Q_prev + k + right_t, more[:, None] & col_ok[None, :], 0.0)
                P_more = tl.where(pending > 0, P_more, 0.0)
                Q_more = tl.where(pending > 0, Q_more, 0.0)
                value -= tl.dot(P_more, Q_more, input_precision=PRECISION)
        value *= scale
        # NaN and ±inf fail the comparison: they enter Q, but not M.
        finite = tl.where(tl.abs(gradient) < float("inf"), gradient, 0.0)
        tl.store(M + first * m + tile, (finite + value).to(M.dtype.element_ty), ok)
        value += gradient
        basis_tile = tl.load(basis + first * r + left_t, rank_ok[:, None] & row_ok[None, :], 0.0)
        total += tl.dot(basis_tile, value, input_precision=PRECISION)
    tl.store(parts + right_t, total, rank_ok[:, None] & col_ok[None, :])


def compensate_backproject_triton(
    table: BucketTable,
    G: Pointers,
    M: Pointers | None,
    P_prev: Tensor,
    Q_prev: Tensor,
    applied: Tensor,
    growth: Tensor,
    P: Tensor,
    launch: Launch,
    launch_backproject: Launch,
    *,
    out: Tensor,
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = parts of Q = Mᵀ P; see ``compensate_backproject_reference``.

    Args:
        table: the bucket's.
        G: gradients of fp32, bf16 or fp16.
        M: error buffers of fp32 or bf16, updated; None for M = G.
        P_prev, Q_prev, P: all matrices' factors, fp32, flat.
        applied: fp32 scalar on the device, 0 where the product was never applied.
        growth: fp32 scalar on the device by which the loss scale has grown since M was written.
        launch, launch_backproject: tile, warps and stages; of the latter for columns of P beyond the first panel.
        out: fp32, ``table.q_parts_numel`` elements: each split's part of each Q [m, r].
    """
    if M is None:
        backproject_triton(table, G, P, launch_backproject, out=out)
        return
    if not table.matrices:
        return
    _compensate_backproject_kernel[(len(table.column_tiles),)](
        G.anchor,
        G.offsets,
        M.anchor,
        M.offsets,
        P_prev,
        Q_prev,
        applied,
        growth,
        P,
        out,
        table.records,
        table.column_tiles,
        WIDE=table.rank > launch.panel,
        VEC=min(G.vector, M.vector),
        R=table.uniform_rank,
        **launch.of_tiles,
    )
    backproject_triton(table, M, P, launch_backproject, out=out, first_panel=1)
