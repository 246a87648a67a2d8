"""M ← G + growth · (M − P Qᵀ) and Q = Mᵀ · basis, in one pass over G and M, for the alternating algorithm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.addresses import known_multiple, pointer_to, rows_are_aligned, tensor_address
from powersgd_triton.kernels.backproject import backproject_triton
from powersgd_triton.kernels.compensate_project import add_gradient, load_pending, subtract_further_panels
from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.launcher import ELEMENTS, run, vector_of
from powersgd_triton.kernels.table import BucketTable, Pointers
from powersgd_triton.kernels.table_device import column_tile, factor_offsets, matrix_sizes, part_of_Q


@triton.jit(do_not_specialize=["G_base", "M_base", "applied", "growth"])
def _compensate_backproject_kernel(
    G_base: tl.int64, G_at, M_base: tl.int64, M_at, P_prev, Q_prev, applied, growth, basis, parts, records, tiles,
    G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of Q [m, r], its first C columns, and M [n, m] in place. Grid: column tiles."""
    matrix, col, start, end, split = column_tile(tiles, tl.program_id(0), BLOCK_COLS)
    _, m, r = matrix_sizes(records, matrix)
    P_at, Q_at = factor_offsets(records, matrix)
    G = tensor_address(G_base, G_at, matrix)
    M = tensor_address(M_base, M_at, matrix)
    P_prev += P_at
    basis += P_at
    Q_prev += Q_at + tl.cast(col, tl.int64) * r
    parts += part_of_Q(records, matrix, split, col, r)
    pending = tl.load(applied)
    scale = tl.load(growth)
    if rows_are_aligned(G | M, m, VEC):
        _walk_down_rows(
            G, M, P_prev, Q_prev, pending, scale, basis, parts, known_multiple(m, VEC), r, col, start, end,
            G_TYPE, M_TYPE, WIDE, VEC, C, BLOCK_ROWS, BLOCK_COLS, PRECISION,
        )  # fmt: skip
    else:
        _walk_down_rows(
            G, M, P_prev, Q_prev, pending, scale, basis, parts, m, r, col, start, end,
            G_TYPE, M_TYPE, WIDE, 1, C, BLOCK_ROWS, BLOCK_COLS, PRECISION,
        )  # fmt: skip


@triton.jit
def _walk_down_rows(
    G, M, P_prev, Q_prev, pending, scale, basis, parts, m, r, col, start, end,
    G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The kernel's work, where all rows of the matrices at addresses G and M start at multiples of VEC elements."""
    G = pointer_to(G, G_TYPE, VEC) + col
    M = pointer_to(M, M_TYPE, VEC) + col
    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    ranks = tl.arange(0, C)
    rank_ok = ranks < r
    col_ok = col + cols < m
    # Offsets within a tile fit 32 bits, which halves their registers; ``first`` takes what does not.
    tile = rows[:, None] * m + cols[None, :]
    left = rows[:, None] * r + ranks[None, :]  # [rows, C]
    left_t = rows[None, :] * r + ranks[:, None]  # [C, rows]
    right_t = ranks[:, None] + cols[None, :] * r  # [C, cols]
    # The first panel's tile of Q is the same for all rows.
    Q_tile = load_pending(Q_prev + right_t, rank_ok[:, None] & col_ok[None, :], pending)
    total = tl.zeros([C, BLOCK_COLS], tl.float32)
    # Blocks in the order of their rows: on every worker the same sums in the same order, hence the same bits.
    for row in range(start, end, BLOCK_ROWS):
        row_ok = row + rows < end
        ok = row_ok[:, None] & col_ok[None, :]
        first = tl.cast(row, tl.int64)
        value = tl.load(M + first * m + tile, ok, 0.0).to(tl.float32)
        gradient = tl.load(G + first * m + tile, ok, 0.0).to(tl.float32)
        P_tile = load_pending(P_prev + first * r + left, row_ok[:, None] & rank_ok[None, :], pending)
        value -= tl.dot(P_tile, Q_tile, input_precision=PRECISION)
        if WIDE:
            value = subtract_further_panels(
                value, P_prev + first * r, Q_prev, left, right_t, row_ok, col_ok, ranks, r, pending, C, PRECISION
            )
        value = add_gradient(value, gradient, scale, M + first * m + tile, ok)
        # Q is the product with M in fp32, before M was rounded to its dtype.
        basis_tile = tl.load(basis + first * r + left_t, rank_ok[:, None] & row_ok[None, :], 0.0)
        total += tl.dot(basis_tile, value, input_precision=PRECISION)
    tl.store(parts + right_t, total, rank_ok[:, None] & col_ok[None, :])


def compensate_backproject_triton(
    table: BucketTable, G: Pointers, M: Pointers | None, P_prev: Tensor, Q_prev: Tensor, applied: Tensor,
    growth: Tensor, P: Tensor, launch: Launch, launch_backproject: Launch, *, out: Tensor,
) -> None:  # fmt: skip
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = parts of Q = Mᵀ P, see ``compensate_backproject_reference``.

    Arguments are those of ``compensate_project_triton``. ``launch_backproject`` is for columns of P beyond the first
    panel, and ``out`` has ``table.q_parts_numel`` elements.
    """
    if M is None:
        backproject_triton(table, G, P, launch_backproject, out=out)
        return
    if not table.matrices:
        return
    run(
        _compensate_backproject_kernel, (len(table.column_tiles),), launch.of_tiles, G.base, G.distances, M.base,
        M.distances, P_prev, Q_prev, applied, growth, P, out, table.records, table.column_tiles,
        G_TYPE=ELEMENTS[G.dtype], M_TYPE=ELEMENTS[M.dtype], WIDE=launch.wide, VEC=vector_of(G.dtype, M.dtype),
    )  # fmt: skip
    # Columns of P beyond the first panel: these programs read M as the kernel above stored it.
    backproject_triton(table, M, P, launch_backproject, out=out, first_panel=1)
