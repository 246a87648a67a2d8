"""Panels of columns of a factor: their rows after the passes so far, and their products with finished panels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.factorize import arrives_last, sum_of_parts
from powersgd_triton.kernels.launcher import run
from powersgd_triton.kernels.random_device import in_window, random_values, stream_of
from powersgd_triton.kernels.table import FactorTable
from powersgd_triton.kernels.table_device import (
    PROGRESS,
    PROGRESS_ARRIVED,
    PROGRESS_FINISHED,
    chunks_of,
    factor_chunk,
    key_of,
    rows_of,
)

PASSES = tl.constexpr(4)
"""At most. Two passes orthogonalize independent columns ("twice is enough"). A third pass is needed if a column died in
the second one, and a fourth if its replacement is nearly dependent on the others."""


@triton.jit
def squares_of(squares, matrix, panels, C: tl.constexpr):
    """(transforms [PASSES, C, C], norms [C], products with the panels [panels, C, C]) of a matrix."""
    transforms = squares + matrix.to(tl.int64) * (PASSES + 1 + panels) * C * C
    return transforms, transforms + PASSES * C * C, transforms + (PASSES + 1) * C * C


@triton.jit
def panel_of_rows(
    source, row, end, r, panel, transforms, first, passes, records, matrix, number,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """(value, elements, mask) [BLOCK_ROWS, C]: rows of a panel, fp64, after transforms ``first`` to ``passes``.

    A transform puts random values in the place of dead columns, the same on all workers. The last one leaves them zero,
    since no further pass would make them orthonormal.
    """
    ranks = tl.arange(0, C)
    rows = row + tl.arange(0, BLOCK_ROWS)
    width = tl.minimum(r - panel * C, C)
    ok = (rows < end)[:, None] & (ranks < width)[None, :]
    within = rows.to(tl.int64)[:, None] * r + panel * C + ranks[None, :]
    value = tl.load(source + within, ok, 0.0)
    # A column that is not finite is dead once it is transformed, and must not spread.
    value = tl.where((tl.abs(value) < float("inf")) | (passes == 0), value, 0.0).to(tl.float64)
    for done in range(first, passes):
        transform = transforms + done * C * C
        ok_square = (ranks < width)[:, None] & (ranks < width)[None, :]
        multipliers = tl.load(transform + ranks[:, None] * C + ranks[None, :], ok_square, 0.0)
        value = tl.dot(value, multipliers, out_dtype=tl.float64)
        # A dead column of the transform is zero.
        dead = tl.load(transform + ranks * (C + 1), ranks < width, 1.0) == 0
        # Nearly always 0: random values are computed only where they are needed.
        if (tl.sum(dead.to(tl.int32), axis=0) > 0) & (done + 1 < PASSES):
            # The step's number is read here, since a launch that is replayed has the same arguments.
            stream = stream_of((key_of(records, matrix) + done).to(tl.uint32), tl.load(number))
            some = (done == 0) | in_window(rows, rows_of(records, matrix), stream)
            direction = tl.where(some[:, None], random_values(within, stream), 0.0)
            value = tl.where(dead[None, :] & ok, direction.to(tl.float64), value)
    return value, within, ok


@triton.jit
def inner_products(
    source, X, start, end, r, panel, left, transforms, first, passes, records, matrix, number,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """X_dᵀ A_c [C, C] of some rows, with d = left and c = panel; A_cᵀ A_c if they are the same."""
    ranks = tl.arange(0, C)
    total = tl.zeros([C, C], tl.float64)
    for row in range(start, end, BLOCK_ROWS):
        value, within, _ = panel_of_rows(
            source, row, end, r, panel, transforms, first, passes, records, matrix, number, C, BLOCK_ROWS
        )
        other = value
        if left < panel:
            # Finished panels are full.
            row_ok = (row + tl.arange(0, BLOCK_ROWS) < end)[:, None] & (ranks < C)[None, :]
            other = tl.load(X + within - (panel - left) * C, row_ok, 0.0)
        total = tl.dot(tl.trans(other), value, total, out_dtype=tl.float64)
    return total


@triton.jit(do_not_specialize=["number", "chunks_number", "attempt", "panel", "panels"])
def _inner_products_kernel(
    A, X, parts, squares, progress, records, chunks, number, chunks_number: tl.int64, attempt, panel, panels,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """X_dᵀ A_c [C, C] for finished panels d < c of X, and in the first pass A_cᵀ A_c. Grid: (chunks, panels d).

    The last program of a matrix and a panel adds the parts.
    """
    chunk = tl.program_id(0)
    left = tl.program_id(1)
    matrix, start, end, r, offset = factor_chunk(records, chunks, chunk)
    state = progress + matrix * PROGRESS
    # Launched for the largest rank; this matrix may have fewer panels.
    if panel * C >= r:
        return
    if attempt > 0 and tl.load(state + PROGRESS_FINISHED) > 0:
        return
    transforms, _, products = squares_of(squares, matrix, panels, C)
    total = inner_products(
        A + offset, X + offset, start, end, r, panel, left, transforms, tl.maximum(attempt - 1, 0), attempt,
        records, matrix, number, C, BLOCK_ROWS,
    )  # fmt: skip
    ranks = tl.arange(0, C)
    at = ranks[:, None] * C + ranks[None, :]
    width = tl.minimum(r - panel * C, C)
    height = tl.where(left < panel, C, width)
    ok = (ranks < height)[:, None] & (ranks < width)[None, :]
    place = (left * chunks_number + chunk).to(tl.int64) * C * C
    tl.store(parts + place + at, total, ok)
    first, count = chunks_of(records, matrix)
    if arrives_last(state + PROGRESS_ARRIVED + left, count):
        place = (left * chunks_number + first).to(tl.int64) * C * C
        tl.store(products + left * C * C + at, sum_of_parts(parts + place, count, height, width, C), ok)


def inner_products_triton(
    factors: FactorTable, A: Tensor, number: Tensor, attempt: int, panel: int, panels: int, launch: Launch, *,
    X: Tensor, parts: Tensor, squares: Tensor,
) -> None:  # fmt: skip
    """Multiply one panel of columns with the panels before it and, in the first pass, with itself.

    The products are written to ``squares``. Arguments are those of ``gram_triton``.
    """
    chunks = len(factors.chunks)
    run(
        _inner_products_kernel, (chunks, panel + (attempt == 0)), launch.of_factors,
        A, X, parts, squares, factors.progress, factors.records, factors.chunks, number, chunks,
        attempt, panel, panels,
    )  # fmt: skip
