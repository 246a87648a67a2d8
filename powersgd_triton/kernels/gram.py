"""Gram matrices of panels of columns, in fp64 because factorizing them squares the condition number."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.factorize import arrives_last, diagonal_of, factorize, sum_of_parts
from powersgd_triton.kernels.launcher import run
from powersgd_triton.kernels.panels import PASSES, inner_products, panel_of_rows, squares_of
from powersgd_triton.kernels.random_device import WINDOW, stream_of, window_of
from powersgd_triton.kernels.table import FactorTable
from powersgd_triton.kernels.table_device import (
    PROGRESS,
    PROGRESS_ARRIVED,
    PROGRESS_FINISHED,
    PROGRESS_PASSES,
    PROGRESS_ZEROED,
    chunks_of,
    factor_chunk,
    key_of,
    rows_of,
)
from powersgd_triton.layout.constants import DEAD_COLUMN


@triton.jit(do_not_specialize=["number", "threshold", "attempt", "panel", "panels"])
def _gram_kernel(
    A, X, parts, squares, progress, finite, records, chunks, number, threshold, attempt, panel, panels,
    PROJECT: tl.constexpr, C: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """L⁻ᵀ with L Lᵀ = YᵀY [C, C] for a panel Y of A after the passes before this one. Grid: chunks.

    Each program writes its chunk's part of YᵀY. The last one of a matrix adds the parts and factorizes. If columns have
    died in the second pass, it makes a third by itself, and a fourth if their replacements died. Up to rank 32 these
    passes read few rows: those of the new directions.

    PROJECT is for panels after the first: Y = A_c − Σ_d X_d (X_dᵀ A_c) over the finished panels of X, and X_c = Y.
    """
    chunk = tl.program_id(0)
    matrix, start, end, r, offset = factor_chunk(records, chunks, chunk)
    state = progress + matrix * PROGRESS
    # Launched for the largest rank; this matrix may have fewer panels.
    width = tl.minimum(r - panel * C, C)
    if width <= 0:
        return
    if attempt > 0 and tl.load(state + PROGRESS_FINISHED) > 0:
        return
    transforms, norms, products = squares_of(squares, matrix, panels, C)
    ranks = tl.arange(0, C)
    at = ranks[:, None] * C + ranks[None, :]
    passes = attempt
    alone = attempt < 0
    working = attempt >= 0
    renewed = attempt < 0
    while working:
        # X_c holds what all passes but the last one made of it.
        kept = passes * 0
        if PROJECT:
            kept = tl.maximum(passes - 1, 0)
            if alone:
                for left in range(panel):
                    product = inner_products(
                        A + offset, X + offset, start, end, r, panel, left, transforms, kept, passes, records, matrix,
                        number, C, BLOCK_ROWS,
                    )  # fmt: skip
                    tl.store(products + left * C * C + at, product, (ranks < width)[None, :])
                tl.debug_barrier()
        gram = tl.zeros([C, C], tl.float64)
        for row in range(start, end, BLOCK_ROWS):
            value, within, ok = panel_of_rows(
                A + offset, row, end, r, panel, transforms, kept, passes, records, matrix, number, C, BLOCK_ROWS
            )
            if PROJECT:
                value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
                row_ok = (row + tl.arange(0, BLOCK_ROWS) < end)[:, None] & (ranks < C)[None, :]
                for left in range(panel):
                    product = tl.load(products + left * C * C + at, (ranks < width)[None, :], 0.0)
                    product = tl.where(tl.abs(product) < float("inf"), product, 0.0)
                    other = tl.load(X + offset + within - (panel - left) * C, row_ok, 0.0)
                    value -= tl.dot(other, product, out_dtype=tl.float64)
                # A may be X: no thread stores before all have loaded.
                tl.debug_barrier()
                tl.store(X + offset + within, value, ok)
            gram = tl.dot(tl.trans(value), value, gram, out_dtype=tl.float64)
        if not PROJECT:  # noqa: SIM102 — a constant, which decides what is compiled
            if renewed:
                # The others are orthonormal; their products are not to be summed over a few rows.
                diagonal = tl.load(transforms + (passes - 1) * C * C + ranks * (C + 1), ranks < width, 1.0)
                new = (diagonal == 0)[:, None] | (diagonal == 0)[None, :]
                one = ((ranks[:, None] == ranks[None, :]) & (ranks < width)[None, :]).to(tl.float64)
                gram = tl.where(new, gram, one)
        last = alone
        if not alone:
            tl.store(parts + chunk.to(tl.int64) * C * C + at, gram, (ranks < width)[:, None] & (ranks < width)[None, :])
            first, count = chunks_of(records, matrix)
            last = arrives_last(state + PROGRESS_ARRIVED, count)
            if last:
                gram = sum_of_parts(parts + first * C * C, count, width, width, C)
        working = False
        if last:
            own = diagonal_of(gram, C)
            if passes > 0:
                before = tl.load(norms + ranks, ranks < width, 0.0)
                before = tl.where(before > 0, before, own)
                exact = own
            else:
                # What a column had before earlier panels were projected out of it decides whether what is left is a
                # direction, and how large rounding errors are.
                before = own
                if PROJECT:
                    before = tl.load(products + panel * C * C + ranks * (C + 1), ranks < width, 0.0)
                exact = before
                # Squares of fp32 values do not overflow fp64: a norm that is not finite shows a value that is not.
                if tl.sum(tl.where(before < float("inf"), 0, 1), axis=0) > 0:
                    tl.store(finite, 0)
            # All threads have read the norms of the pass before.
            tl.debug_barrier()
            final = passes + 1 == PASSES
            dead, inexact = factorize(
                gram, before, exact, threshold, final, width, transforms + passes * C * C, norms, C
            )
            if final:
                tl.atomic_add(state + PROGRESS_ZEROED, dead, sem="relaxed")
            unfinished = dead + inexact
            # Further panels are projected against this one, which enlarges its error where little is left of them.
            enough = (unfinished == 0) & ((passes > 0) | ((panel + 1) * C >= r))
            tl.store(state + PROGRESS_PASSES, passes + 1)
            tl.store(state + PROGRESS_FINISHED, enough.to(tl.int32))
            # The second pass has a launch of its own.
            working = (unfinished > 0) & (attempt > 0) & (passes + 1 < PASSES)
            alone = working
            n = rows_of(records, matrix)
            # (A product keeps the type that these values have in the loop.)
            start, end = start * 0, n
            if not PROJECT:
                renewed = inexact == 0
                if renewed:
                    # Only the columns that died are new, and their directions have few rows.
                    stream = stream_of((key_of(records, matrix) + passes).to(tl.uint32), tl.load(number))
                    start = window_of(n, stream)
                    end = tl.minimum(start + WINDOW, n)
            passes += 1
            tl.debug_barrier()


def gram_triton(
    factors: FactorTable, A: Tensor, number: Tensor, epsilon: float, attempt: int, panel: int, panels: int,
    launch: Launch, *, X: Tensor, parts: Tensor, squares: Tensor, finite: Tensor,
) -> None:  # fmt: skip
    """Compute in one pass what makes one panel of A's columns orthonormal. See ``orthogonalize_triton`` for the others.

    Args:
        A: Factors, fp32 or fp64, flat. X in the second pass over a panel after the first.
        attempt: Number of the pass.
        panel, panels: Number of the panel, and how many there are.
        X: Factors whose panels before this one are orthonormal, fp64, flat. What is left of this panel is written.
        parts: fp64 workspace [panels, chunks, C, C].
        squares: See ``squares_of``. A transform and norms are written there.
    """
    run(
        _gram_kernel, (len(factors.chunks),), launch.of_factors,
        A, X, parts, squares, factors.progress, finite, factors.records, factors.chunks, number,
        max(epsilon, DEAD_COLUMN) ** 2, attempt, panel, panels, PROJECT=panel > 0,
    )  # fmt: skip
