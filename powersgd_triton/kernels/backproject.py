"""Q = Mᵀ P̂, in one pass over M. A program holds the sums for some columns of M and walks down the rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.addresses import known_multiple, pointer_to, rows_are_aligned, tensor_address
from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.launcher import ELEMENTS, run, vector_of
from powersgd_triton.kernels.table import BucketTable, Pointers
from powersgd_triton.kernels.table_device import column_tile, factor_offsets, matrix_sizes, part_of_Q


@triton.jit(do_not_specialize=["M_base", "first_panel", "panels"])
def _backproject_kernel(
    M_base: tl.int64, M_at, P_hat, parts, records, tiles, first_panel, panels,
    M_TYPE: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of Q [m, r]. Grid: for each column tile, ``panels`` of C columns of P̂."""
    # Programs of the same tile of M run at the same time, so that they read it from memory once.
    matrix, col, start, end, split = column_tile(tiles, tl.program_id(0) // panels, BLOCK_COLS)
    _, m, r = matrix_sizes(records, matrix)
    # The grid has the panels of the largest rank; this matrix may have fewer.
    panel = (first_panel + tl.program_id(0) % panels) * C
    if panel >= r:
        return
    M = tensor_address(M_base, M_at, matrix)
    P_at, _ = factor_offsets(records, matrix)
    P_hat += P_at + panel
    parts += part_of_Q(records, matrix, split, col, r) + panel
    if rows_are_aligned(M, m, VEC):
        _walk_down_rows(
            M, P_hat, parts, known_multiple(m, VEC), r, panel, col, start, end,
            M_TYPE, VEC, C, BLOCK_ROWS, BLOCK_COLS, PRECISION,
        )  # fmt: skip
    else:
        _walk_down_rows(M, P_hat, parts, m, r, panel, col, start, end, M_TYPE, 1, C, BLOCK_ROWS, BLOCK_COLS, PRECISION)


@triton.jit
def _walk_down_rows(
    M, P_hat, parts, m, r, panel, col, start, end,
    M_TYPE: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The kernel's work, where all rows of the matrix at address M start at multiples of VEC elements."""
    M = pointer_to(M, M_TYPE, VEC) + col
    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    ranks = tl.arange(0, C)
    rank_ok = panel + ranks < r
    col_ok = col + cols < m
    # Offsets within a tile fit 32 bits, which halves their registers; ``first`` takes what does not.
    tile = rows[:, None] * m + cols[None, :]
    left_t = ranks[:, None] + rows[None, :] * r  # [C, rows]
    # Transposed, P̂ᵀ M, so that the tiles of M are operands as they were loaded.
    total = tl.zeros([C, BLOCK_COLS], tl.float32)
    # Blocks in the order of their rows: on every worker the same sums in the same order, hence the same bits.
    for row in range(start, end, BLOCK_ROWS):
        row_ok = row + rows < end
        first = tl.cast(row, tl.int64)
        P_tile = tl.load(P_hat + first * r + left_t, rank_ok[:, None] & row_ok[None, :], 0.0)
        value = tl.load(M + first * m + tile, row_ok[:, None] & col_ok[None, :], 0.0).to(tl.float32)
        total += tl.dot(P_tile, value, input_precision=PRECISION)
    tl.store(parts + ranks[:, None] + cols[None, :] * r, total, rank_ok[:, None] & col_ok[None, :])


def backproject_triton(
    table: BucketTable, M: Pointers, P: Tensor, launch: Launch, *, out: Tensor, first_panel: int = 0
) -> None:
    """Write each split's part of each Q = Mᵀ P [m, r] to ``out`` [``table.q_parts_numel``], fp32.

    M is in fp32, bf16 or fp16. P holds the factors of all matrices, fp32 and flat, of which panels of columns from
    ``first_panel`` on are multiplied.
    """
    panels = -(-table.rank // launch.panel) - first_panel
    if panels > 0:
        tiles = table.column_tiles
        arguments = M.base, M.distances, P, out, table.records, tiles, first_panel, panels
        kind, vector = ELEMENTS[M.dtype], vector_of(M.dtype)
        run(_backproject_kernel, (panels * len(tiles),), launch.of_tiles, *arguments, M_TYPE=kind, VEC=vector)
