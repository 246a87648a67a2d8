"""M ← G + growth · (M − P̂ Qᵀ) and P = M · basis, in one pass over G and M."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.table import BucketTable, Pointers


@triton.jit(do_not_specialize=["first_panel", "applied", "growth"])
def _compensate_project_kernel(
    G, G_offsets, M, M_offsets, P_hat, Q, applied, growth, basis, parts, records, tiles, first_panel,
    COMPENSATE: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of P [n, r], and M [n, m] in place. Grid: (row tiles, panels of C columns of the basis)."""
    work = tiles + tl.program_id(0) * 5
    matrix = tl.load(work)
    row = tl.load(work + 1)
    start = tl.load(work + 2) // BLOCK_COLS * BLOCK_COLS
    end = tl.load(work + 3)
    split = tl.load(work + 4)
    record = records + matrix * 7
    n = tl.load(record).to(tl.int32)
    # Written so that the compiler sees what VEC divides.
    m = tl.load(record + 1).to(tl.int32) // VEC * VEC
    r = R
    if R == 0:
        r = tl.load(record + 2).to(tl.int32)
    panel = (first_panel + tl.program_id(1)) * C
    if panel >= r:
        return
    first = row.to(tl.int64)
    G += tl.load(G_offsets + matrix) // VEC * VEC + first * m
    M += tl.load(M_offsets + matrix) // VEC * VEC + first * m
    P_hat += tl.load(record + 3) + first * r
    Q += tl.load(record + 4)
    basis += tl.load(record + 4)
    parts += tl.load(record + 5) + (split * tl.load(record) + first) * r
    pending = tl.load(applied)
    scale = tl.load(growth)

    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    ranks = tl.arange(0, C)
    row_ok = row + rows < n
    tile = rows[:, None] * m + cols[None, :]
    left = rows[:, None] * r + ranks[None, :]
    right = cols[:, None] * r + panel + ranks[None, :]  # [cols, C]
    right_t = ranks[:, None] + cols[None, :] * r  # [C, cols]
    total = tl.zeros([BLOCK_ROWS, C], tl.float32)
    if COMPENSATE:
        P_tile = tl.load(P_hat + left, row_ok[:, None] & (ranks < r)[None, :], 0.0)
        P_tile = tl.where(pending > 0, P_tile, 0.0)
    for col in range(start, end, BLOCK_COLS):
        col_ok = col + cols < m
        ok = row_ok[:, None] & col_ok[None, :]
        factor = tl.cast(col, tl.int64) * r
        value = tl.load(M + col + tile, ok, 0.0).to(tl.float32)
        if COMPENSATE:
            gradient = tl.load(G + col + tile, ok, 0.0).to(tl.float32)
            Q_tile = tl.load(Q + factor + right_t, (ranks < r)[:, None] & col_ok[None, :], 0.0)
            # 0 · inf would be NaN: what was not applied may have overflowed.
            Q_tile = tl.where(pending > 0, Q_tile, 0.0)
            value -= tl.dot(P_tile, Q_tile, input_precision=PRECISION)
            if WIDE:
                for k in range(C, r, C):
                    more = k + ranks < r
                    P_more = tl.load(P_hat + k + left, row_ok[:, None] & more[None, :], 0.0)
                    Q_more = tl.load(Q + factor + k + right_t, more[:, None] & col_ok[None, :], 0.0)
                    P_more = tl.where(pending > 0, P_more, 0.0)
                    Q_more = tl.where(pending > 0, Q_more, 0.0)
                    value -= tl.dot(P_more, Q_more, input_precision=PRECISION)
            value *= scale
            # NaN and ±inf fail the comparison: they enter P, but not M.
            finite = tl.where(tl.abs(gradient) < float("inf"), gradient, 0.0)
            tl.store(M + col + tile, (finite + value).to(M.dtype.element_ty), ok)
            value += gradient
        basis_tile = tl.load(basis + factor + right, col_ok[:, None] & (panel + ranks < r)[None, :], 0.0)
        total += tl.dot(value, basis_tile, input_precision=PRECISION)
    tl.store(parts + panel + left, total, row_ok[:, None] & (panel + ranks < r)[None, :])


def compensate_project_triton(
    table: BucketTable,
    G: Pointers,
    M: Pointers | None,
    P_prev: Tensor,
    Q_prev: Tensor,
    applied: Tensor,
    growth: Tensor,
    Q: Tensor,
    launch: Launch,
    *,
    out: Tensor,
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = parts of P = M Q; see ``compensate_project_reference``.

    Args:
        table: the bucket's.
        G: gradients of fp32, bf16 or fp16.
        M: error buffers of fp32 or bf16, updated; None for M = G.
        P_prev, Q_prev, Q: all matrices' factors, fp32, flat.
        applied: fp32 scalar on the device, 0 where the product was never applied.
        growth: fp32 scalar on the device by which the loss scale has grown since M was written.
        launch: tile, warps and stages.
        out: fp32, ``table.p_parts_numel`` elements: each split's part of each P [n, r].
    """
    if not table.matrices:
        return
    panels = -(-table.rank // launch.panel)
    source = G if M is None else M

    def run(first_panel: int, count: int, compensate: bool) -> None:
        _compensate_project_kernel[(len(table.row_tiles), count)](
            (G if compensate else source).anchor,
            (G if compensate else source).offsets,
            source.anchor,
            source.offsets,
            P_prev,
            Q_prev,
            applied,
            growth,
            Q,
            out,
            table.records,
            table.row_tiles,
            first_panel,
            COMPENSATE=compensate,
            WIDE=panels > 1,
            VEC=min(G.vector, source.vector),
            R=table.uniform_rank,
            **launch.of_tiles,
        )

    if M is None:
        run(0, panels, compensate=False)
        return
    run(0, 1, compensate=True)
    if panels > 1:
        run(1, panels - 1, compensate=False)
