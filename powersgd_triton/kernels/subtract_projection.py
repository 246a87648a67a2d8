"""Projecting finished panels out of the next one: the outer step of blocked Gram–Schmidt."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.table import FactorTable
from powersgd_triton.kernels.table_device import chunks_of, factor_chunk


@triton.jit(do_not_specialize=["panel", "chunks_number"])
def _subtract_projection_kernel(
    A, X, grams, own, records, chunks, chunks_number, panel, C: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """X_c = A_c − Σ_d X_d (X_dᵀ A_c) over panels d < c, and parts of X_cᵀ X_c [C, C]. Grid: chunks."""
    chunk = tl.program_id(0)
    matrix, start, end, r, offset = factor_chunk(records, chunks, chunk)
    # Launched for the largest rank; this matrix may have fewer panels.
    if panel * C >= r:
        return
    first, parts = chunks_of(records, matrix)
    ranks = tl.arange(0, C)
    square = ranks[:, None] * C + ranks[None, :]
    # Panels before this one are full, this one may not be.
    column_ok = panel * C + ranks < r
    total = tl.zeros([C, C], tl.float64)
    for row in range(start, end, BLOCK_ROWS):
        rows = row + tl.arange(0, BLOCK_ROWS)
        row_ok = (rows < end)[:, None]
        at = offset + rows.to(tl.int64)[:, None] * r + ranks[None, :]
        ok = row_ok & column_ok[None, :]
        value = tl.load(A + panel * C + at, ok, 0.0).to(tl.float64)
        # A column that is not finite is dead; it must not spread.
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        for left in range(panel):
            # X_dᵀ A_c: every program adds the parts of its matrix's chunks, in their order.
            product = tl.zeros([C, C], tl.float64)
            for part in range(parts):
                place = (left * chunks_number + first + part) * C * C
                product += tl.load(grams + place + square, column_ok[None, :], 0.0)
            product = tl.where(tl.abs(product) < float("inf"), product, 0.0)
            other = tl.load(X + left * C + at, row_ok & (left * C + ranks < r)[None, :], 0.0)
            value -= tl.dot(other, product, out_dtype=tl.float64)
        # A may be X: no thread stores before all have loaded.
        tl.debug_barrier()
        tl.store(X + panel * C + at, value, ok)
        total = tl.dot(tl.trans(value), value, total, out_dtype=tl.float64)
    tl.store(own + chunk.to(tl.int64) * C * C + square, total, column_ok[:, None] & column_ok[None, :])


def subtract_projection_triton(
    factors: FactorTable, A: Tensor, grams: Tensor, panel: int, launch: Launch, *, X: Tensor, out: Tensor
) -> None:
    """X = A minus its projection on the panels of X before it, for one panel; out = parts of its inner products.

    Args:
        factors: table of one side's factors.
        A: factors, fp32 or fp64, flat; may be X.
        grams: from ``gram_triton``.
        panel: number of the panel.
        launch: rows of a block, columns of a panel.
        X: fp64, flat; panels before this one are orthonormal.
        out: fp64 [chunks, C, C].
    """
    _subtract_projection_kernel[(len(factors.chunks),)](
        A,
        X,
        grams,
        out,
        factors.records,
        factors.chunks,
        len(factors.chunks),
        panel,
        **launch.of_factors,
    )
