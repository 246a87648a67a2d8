"""Q = Mᵀ P, in one pass over M; in the alternating algorithm also M ← G + growth · (M − P_prev Q_prevᵀ).

A program holds the sums for some columns of M and walks down the rows. What ``compensate_project.py`` says of its tiles
and panels is so here too.
"""

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import table_device as tables
from powersgd_triton.kernels.compensate_project import (
    Pending,
    add_gradient,
    launch_product,
    load_pending,
    subtract_further_panels,
)
from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.product_device import multiply
from powersgd_triton.kernels.table import BucketTable, Pointers


@triton.jit(do_not_specialize=["G_base", "M_base", "applied", "growth", "first_panel", "panels"])
def _backproject_kernel(
    G_base: tl.int64, G_at, M_base: tl.int64, M_at, P_prev, Q_prev, applied, growth, basis, parts, records, tiles,
    first_panel, panels,
    G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, COMPENSATE: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of Q [m, r], and M [n, m] in place. Grid: for each column tile, ``panels`` of C columns of the basis."""
    matrix, col, start, end, split = tables.tile_of(tiles, tl.program_id(0) // panels, BLOCK_COLS, 1)
    _, m, r = tables.matrix_sizes(records, matrix)
    panel = (first_panel + tl.program_id(0) % panels) * C
    if panel >= r:
        return
    P_at, Q_at, _, parts_at = tables.factor_offsets(records, matrix)
    G = tables.tensor_address(G_base, G_at, matrix)
    M = tables.tensor_address(M_base, M_at, matrix)
    P_prev += P_at
    basis += P_at + panel
    Q_prev += Q_at + tl.cast(col, tl.int64) * r
    parts += parts_at + (split.to(tl.int64) * m + col) * r + panel
    pending = (tl.load(applied) > 0).to(tl.int32)
    scale = tl.load(growth)
    if tables.rows_are_aligned(G | M, m, VEC):
        _walk_down_rows(
            G, M, P_prev, Q_prev, pending, scale, basis, parts, tables.known_multiple(m, VEC), r, panel, col, start,
            end, G_TYPE, M_TYPE, COMPENSATE, WIDE, VEC, C, BLOCK_ROWS, BLOCK_COLS, PRECISION,
        )  # fmt: skip
    else:
        _walk_down_rows(
            G, M, P_prev, Q_prev, pending, scale, basis, parts, m, r, panel, col, start, end,
            G_TYPE, M_TYPE, COMPENSATE, WIDE, 1, C, BLOCK_ROWS, BLOCK_COLS, PRECISION,
        )  # fmt: skip


@triton.jit
def _walk_down_rows(
    G, M, P_prev, Q_prev, pending, scale, basis, parts, m, r, panel, col, start, end,
    G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, COMPENSATE: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The kernel's work, where all rows of the matrices at addresses G and M start at multiples of VEC elements."""
    G = tables.pointer_to(G, G_TYPE, VEC) + col
    M = tables.pointer_to(M, M_TYPE, VEC) + col
    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    ranks = tl.arange(0, C)
    rank_ok = panel + ranks < r
    col_ok = col + cols < m
    tile = rows[:, None] * m + cols[None, :]
    left = rows[:, None] * r + ranks[None, :]  # [rows, C]
    left_t = ranks[:, None] + rows[None, :] * r  # [C, rows]
    right_t = ranks[:, None] + cols[None, :] * r  # [C, cols]
    if COMPENSATE:
        # The first panel's tile of Q is the same for all rows.
        Q_tile = load_pending(Q_prev + right_t, (ranks < r)[:, None] & col_ok[None, :], pending)
    # Transposed, Pᵀ M, so that the tiles of M are operands as they were loaded.
    total = tl.zeros([C, BLOCK_COLS], tl.float32)
    # Blocks in the order of their rows: on every worker the same sums in the same order, hence the same bits.
    for row in range(start, end, BLOCK_ROWS):
        row_ok = row + rows < end
        ok = row_ok[:, None] & col_ok[None, :]
        first = tl.cast(row, tl.int64)
        value = tl.load(M + first * m + tile, ok, 0.0).to(tl.float32)
        if COMPENSATE:
            gradient = tl.load(G + first * m + tile, ok, 0.0).to(tl.float32)
            P_tile = load_pending(P_prev + first * r + left, row_ok[:, None] & (ranks < r)[None, :], pending)
            value -= multiply(P_tile, Q_tile, PRECISION)
            if WIDE:
                value = subtract_further_panels(
                    value, P_prev + first * r, Q_prev, left, right_t, row_ok, col_ok, ranks, r, pending, C, PRECISION
                )
            value = add_gradient(value, gradient, scale, M + first * m + tile, ok)
        basis_tile = tl.load(basis + first * r + left_t, rank_ok[:, None] & row_ok[None, :], 0.0)
        total += multiply(basis_tile, value, PRECISION)
    tl.store(parts + right_t, total, rank_ok[:, None] & col_ok[None, :])


def compensate_backproject_triton(
    table: BucketTable, G: Pointers, M: Pointers | None, pending: Pending, growth: Tensor, P: Tensor, launch: Launch,
    launch_backproject: Launch, *, out: Tensor,
) -> None:  # fmt: skip
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = parts of Q = Mᵀ P, see ``compensate_backproject_reference``.

    ``launch_backproject`` is for columns of P beyond the first panel. ``out`` has ``table.q_parts_numel`` elements.
    """
    launches = launch, launch_backproject
    launch_product(_backproject_kernel, table, table.column_tiles, G, M, pending, growth, P, launches, out=out)


def backproject_triton(table: BucketTable, M: Pointers, P: Tensor, launch: Launch, *, out: Tensor) -> None:
    """Write each split's part of each Q = Mᵀ P [m, r] to ``out``, with M in fp32, bf16 or fp16."""
    unread = P, P, P
    launch_product(_backproject_kernel, table, table.column_tiles, M, None, unread, P, P, (launch, launch), out=out)
