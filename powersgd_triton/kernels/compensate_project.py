"""M ← G + growth · (M − P̂ Qᵀ) and P = M · basis, in one pass over G and M.

P̂ Qᵀ is the pending product: what the last step's reconstruction took out of M. It is subtracted here, one step late,
since M is read here anyway. A program holds the sum of one block of P's rows in registers and walks along the columns
of M. It writes each tile of M and multiplies it by the basis while the tile is still in registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import table_device as tables
from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.launcher import ELEMENTS, run, vector_of
from powersgd_triton.kernels.product_device import multiply
from powersgd_triton.kernels.rounding_device import both
from powersgd_triton.kernels.table import BucketTable, Pointers

Pending = tuple[Tensor, Tensor, Tensor]
"""A product P Qᵀ still to be subtracted from M: P and Q of all matrices, fp32, flat, and a scalar, 0 if it is not."""


@triton.jit
def load_pending(factor, ok, pending):
    """A tile of P or Q of the pending product, or zeros if that product was never applied.

    Zeroing the product would not do: factors of a step that overflowed may be infinite, and 0 · inf is NaN.
    """
    return tl.load(factor, both(ok, pending > 0), 0.0)


@triton.jit
def subtract_further_panels(
    value, P, Q, left, right_t, row_ok, col_ok, ranks, r, pending, C: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """value − P Qᵀ, of the columns of P [rows, r] and Q [cols, r] behind their first C at ``left`` and ``right_t``."""
    # Panel by panel into ``value``, in this order: another one would round differently.
    for k in range(C, r, C):
        more = k + ranks < r
        P_tile = load_pending(P + k + left, row_ok[:, None] & more[None, :], pending)
        Q_tile = load_pending(Q + k + right_t, more[:, None] & col_ok[None, :], pending)
        value -= multiply(P_tile, Q_tile, PRECISION)
    return value


@triton.jit
def add_gradient(value, gradient, growth, M, ok):
    """gradient + growth · value, which is stored in M except for what is not finite of the gradient.

    What is returned has those elements, so that the step finds that its gradients are not finite.
    """
    value *= growth
    # NaN and ±inf fail the comparison.
    finite = tl.where(tl.abs(gradient) < float("inf"), gradient, 0.0)
    tl.store(M, (finite + value).to(M.dtype.element_ty), ok)
    return value + gradient


@triton.jit(do_not_specialize=["G_base", "M_base", "applied", "growth", "first_panel", "panels"])
def _compensate_project_kernel(
    G_base: tl.int64, G_at, M_base: tl.int64, M_at, P_hat, Q, applied, growth, basis, parts, records, tiles,
    first_panel, panels,
    G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, COMPENSATE: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of P [n, r], and M [n, m] in place. Grid: for each row tile, ``panels`` of C columns of the basis."""
    # Programs of the same tile of M run at the same time, so that they read it from memory once.
    matrix, row, start, end, split = tables.tile_of(tiles, tl.program_id(0) // panels, 1, BLOCK_COLS)
    n, m, r = tables.matrix_sizes(records, matrix)
    # The grid has the panels of the largest rank; this matrix may have fewer.
    panel = (first_panel + tl.program_id(0) % panels) * C
    if panel >= r:
        return
    first = row.to(tl.int64)
    P_at, Q_at, parts_at, _ = tables.factor_offsets(records, matrix)
    G = tables.tensor_address(G_base, G_at, matrix)
    M = tables.tensor_address(M_base, M_at, matrix)
    P_hat += P_at + first * r
    Q += Q_at
    basis += Q_at
    parts += parts_at + (split.to(tl.int64) * n + first) * r
    pending = (tl.load(applied) > 0).to(tl.int32)
    scale = tl.load(growth)
    if tables.rows_are_aligned(G | M, m, VEC):
        _walk_along_columns(
            G, M, P_hat, Q, pending, scale, basis, parts, n, tables.known_multiple(m, VEC), r, panel, row, start, end,
            G_TYPE, M_TYPE, COMPENSATE, WIDE, VEC, C, BLOCK_ROWS, BLOCK_COLS, PRECISION,
        )  # fmt: skip
    else:
        _walk_along_columns(
            G, M, P_hat, Q, pending, scale, basis, parts, n, m, r, panel, row, start, end,
            G_TYPE, M_TYPE, COMPENSATE, WIDE, 1, C, BLOCK_ROWS, BLOCK_COLS, PRECISION,
        )  # fmt: skip


@triton.jit
def _walk_along_columns(
    G, M, P_hat, Q, pending, scale, basis, parts, n, m, r, panel, row, start, end,
    G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, COMPENSATE: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The kernel's work, where all rows of the matrices at addresses G and M start at multiples of VEC elements."""
    first = row.to(tl.int64)
    G = tables.pointer_to(G, G_TYPE, VEC) + first * m
    M = tables.pointer_to(M, M_TYPE, VEC) + first * m
    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    ranks = tl.arange(0, C)
    row_ok = row + rows < n
    # Offsets within a tile fit 32 bits, which halves their registers; ``first`` takes what does not.
    tile = rows[:, None] * m + cols[None, :]
    left = rows[:, None] * r + ranks[None, :]  # [rows, C]
    right = cols[:, None] * r + panel + ranks[None, :]  # [cols, C]
    right_t = ranks[:, None] + cols[None, :] * r  # [C, cols]
    total = tl.zeros([BLOCK_ROWS, C], tl.float32)
    if COMPENSATE:
        # The first panel's tile of P is the same for all columns.
        P_tile = load_pending(P_hat + left, row_ok[:, None] & (ranks < r)[None, :], pending)
    # Blocks in the order of their columns: on every worker the same sums in the same order, hence the same bits.
    for col in range(start, end, BLOCK_COLS):
        col_ok = col + cols < m
        ok = row_ok[:, None] & col_ok[None, :]
        factor = tl.cast(col, tl.int64) * r
        value = tl.load(M + col + tile, ok, 0.0).to(tl.float32)
        if COMPENSATE:
            gradient = tl.load(G + col + tile, ok, 0.0).to(tl.float32)
            Q_tile = load_pending(Q + factor + right_t, (ranks < r)[:, None] & col_ok[None, :], pending)
            value -= multiply(P_tile, Q_tile, PRECISION)
            if WIDE:
                value = subtract_further_panels(
                    value, P_hat, Q + factor, left, right_t, row_ok, col_ok, ranks, r, pending, C, PRECISION
                )
            value = add_gradient(value, gradient, scale, M + col + tile, ok)
        # P is the product with M in fp32, before M was rounded to its dtype.
        basis_tile = tl.load(basis + factor + right, col_ok[:, None] & (panel + ranks < r)[None, :], 0.0)
        total += multiply(value, basis_tile, PRECISION)
    tl.store(parts + panel + left, total, row_ok[:, None] & (panel + ranks < r)[None, :])


def compensate_project_triton(
    table: BucketTable, G: Pointers, M: Pointers | None, pending: Pending, growth: Tensor, Q: Tensor, launch: Launch, *,
    out: Tensor,
) -> None:  # fmt: skip
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = parts of P = M Q, see ``compensate_project_reference``.

    G is in fp32, bf16 or fp16, M in fp32 or bf16, or None for M = G. ``growth`` is an fp32 scalar on the device. Q has
    the bases of all matrices, fp32, flat, and ``out`` has ``table.p_parts_numel`` elements in fp32.
    """
    launches = launch, launch
    launch_product(_compensate_project_kernel, table, table.row_tiles, G, M, pending, growth, Q, launches, out=out)


def launch_product(
    kernel: Any, table: BucketTable, tiles: Tensor, G: Pointers, M: Pointers | None, pending: Pending, growth: Tensor,
    basis: Tensor, launches: tuple[Launch, Launch], *, out: Tensor,
) -> None:  # fmt: skip
    """Launch a kernel that compensates M and multiplies it by the first panel of a basis, then by the other panels.

    Programs of the other panels read M as it was stored. The second of the ``launches`` is for them, and for M = G.
    """

    def panels(G: Pointers, M: Pointers, launch: Launch, first: int, count: int, *, compensate: bool) -> None:
        if count > 0:
            fp32 = G.dtype == M.dtype == torch.float32
            options = launch.of_limited_tiles[0 if fp32 else 1] if compensate else launch.of_tiles
            run(
                kernel, (count * len(tiles),), options, G.base, G.distances, M.base, M.distances, *pending,
                growth, basis, out, table.records, tiles, first, count, G_TYPE=ELEMENTS[G.dtype],
                M_TYPE=ELEMENTS[M.dtype], COMPENSATE=compensate, WIDE=launch.wide, VEC=vector_of(G.dtype, M.dtype),
            )  # fmt: skip

    if not table.matrices:
        return
    compensating, multiplying = launches
    count = -(-table.rank // multiplying.panel)
    if M is None:
        panels(G, G, multiplying, 0, count, compensate=False)
    else:
        panels(G, M, compensating, 0, 1, compensate=True)
        panels(M, M, multiplying, 1, count - 1, compensate=False)
