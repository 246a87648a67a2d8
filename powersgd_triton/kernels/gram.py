"""Inner products of a factor's panels of columns, in fp64 because factorizing them squares the condition number."""

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import table_device as tables
from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.factorize import arrives_last, diagonal_of, factorize, sum_of_parts
from powersgd_triton.kernels.launcher import run
from powersgd_triton.kernels.random_device import WINDOW, random_values, stream_of, window_of
from powersgd_triton.kernels.table import FactorTable
from powersgd_triton.kernels.table_device import (
    PROGRESS,
    PROGRESS_ARRIVED,
    PROGRESS_FINISHED,
    PROGRESS_PASSES,
    PROGRESS_ZEROED,
)
from powersgd_triton.layout.constants import DEAD_COLUMN

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
    source, row, end, r, panel, transforms, first, passes, draws, C: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """(value, elements, mask) [BLOCK_ROWS, C]: rows of a panel, fp64, after transforms ``first`` to ``passes``.

    A transform puts random values in the place of dead columns, the same on all workers. The last one leaves them zero,
    since no further pass would make them orthonormal. They depend on ``draws``, (records, matrix, number).
    """
    records, matrix, number = draws
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
            stream = stream_of((tables.key_of(records, matrix) + done).to(tl.uint32), tl.load(number))
            everywhere = done == 0
            window = window_of(tables.rows_of(records, matrix), stream)
            some = everywhere | ((rows >= window) & (rows < window + WINDOW))
            direction = tl.where(some[:, None], random_values(within, stream), 0.0)
            value = tl.where(dead[None, :] & ok, direction.to(tl.float64), value)
    return value, within, ok


@triton.jit
def inner_products(
    source, X, start, end, r, panel, left, transforms, first, passes, draws, C: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """X_dᵀ A_c [C, C] of some rows, with d = left and c = panel; A_cᵀ A_c if they are the same."""
    ranks = tl.arange(0, C)
    total = tl.zeros([C, C], tl.float64)
    for row in range(start, end, BLOCK_ROWS):
        value, within, _ = panel_of_rows(source, row, end, r, panel, transforms, first, passes, draws, C, BLOCK_ROWS)
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
    matrix, start, end, r, offset = tables.factor_chunk(records, chunks, chunk)
    state = progress + matrix * PROGRESS
    # Launched for the largest rank; this matrix may have fewer panels.
    if panel * C >= r:
        return
    if attempt > 0 and tl.load(state + PROGRESS_FINISHED) > 0:
        return
    transforms, _, products = squares_of(squares, matrix, panels, C)
    kept, draws = tl.maximum(attempt - 1, 0), (records, matrix, number)
    total = inner_products(
        A + offset, X + offset, start, end, r, panel, left, transforms, kept, attempt, draws, C, BLOCK_ROWS
    )
    ranks = tl.arange(0, C)
    at = ranks[:, None] * C + ranks[None, :]
    width = tl.minimum(r - panel * C, C)
    height = tl.where(left < panel, C, width)
    ok = (ranks < height)[:, None] & (ranks < width)[None, :]
    place = (left * chunks_number + chunk).to(tl.int64) * C * C
    tl.store(parts + place + at, total, ok)
    first, count = tables.chunks_of(records, matrix)
    if arrives_last(state + PROGRESS_ARRIVED + left, count):
        place = (left * chunks_number + first).to(tl.int64) * C * C
        tl.store(products + left * C * C + at, sum_of_parts(parts + place, count, height, width, C), ok)


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
    matrix, start, end, r, offset = tables.factor_chunk(records, chunks, chunk)
    state = progress + matrix * PROGRESS
    # Launched for the largest rank; this matrix may have fewer panels.
    width = tl.minimum(r - panel * C, C)
    if width <= 0:
        return
    if attempt > 0 and tl.load(state + PROGRESS_FINISHED) > 0:
        return
    transforms, norms, products = squares_of(squares, matrix, panels, C)
    A += offset
    X += offset
    draws = records, matrix, number
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
                        A, X, start, end, r, panel, left, transforms, kept, passes, draws, C, BLOCK_ROWS
                    )
                    tl.store(products + left * C * C + at, product, (ranks < width)[None, :])
                tl.debug_barrier()
        gram = tl.zeros([C, C], tl.float64)
        for row in range(start, end, BLOCK_ROWS):
            value, within, ok = panel_of_rows(A, row, end, r, panel, transforms, kept, passes, draws, C, BLOCK_ROWS)
            if PROJECT:
                value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
                row_ok = (row + tl.arange(0, BLOCK_ROWS) < end)[:, None] & (ranks < C)[None, :]
                for left in range(panel):
                    product = tl.load(products + left * C * C + at, (ranks < width)[None, :], 0.0)
                    product = tl.where(tl.abs(product) < float("inf"), product, 0.0)
                    other = tl.load(X + within - (panel - left) * C, row_ok, 0.0)
                    value -= tl.dot(other, product, out_dtype=tl.float64)
                # A may be X: no thread stores before all have loaded.
                tl.debug_barrier()
                tl.store(X + within, value, ok)
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
            first, count = tables.chunks_of(records, matrix)
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
            n = tables.rows_of(records, matrix)
            # (A product keeps the type that these values have in the loop.)
            start, end = start * 0, n
            if not PROJECT:
                renewed = inexact == 0
                if renewed:
                    # Only the columns that died are new, and their directions have few rows.
                    stream = stream_of((tables.key_of(records, matrix) + passes).to(tl.uint32), tl.load(number))
                    start = window_of(n, stream)
                    end = tl.minimum(start + WINDOW, n)
            passes += 1
            tl.debug_barrier()


def gram_triton(
    factors: FactorTable, A: Tensor, number: Tensor, epsilon: float, attempt: int, panel: int, panels: int,
    launch: Launch, *, X: Tensor, parts: Tensor, squares: Tensor, finite: Tensor,
) -> None:  # fmt: skip
    """Compute what makes one of so many panels of A's columns orthonormal, in pass number ``attempt``.

    Its transform and norms are written to ``squares``, see ``squares_of``. The panels of X, fp64, before this one are
    orthonormal. What is left of this one without them is written there, and A is X in the second pass.
    """
    chunks, which = len(factors.chunks), (attempt, panel, panels)
    work = factors.records, factors.chunks, number
    if panel > 0:
        run(
            _inner_products_kernel, (chunks, panel + (attempt == 0)), launch.of_factors,
            A, X, parts, squares, factors.progress, *work, chunks, *which,
        )  # fmt: skip
    run(
        _gram_kernel, (chunks,), launch.of_factors, A, X, parts, squares, factors.progress, finite, *work,
        max(epsilon, DEAD_COLUMN) ** 2, *which, PROJECT=panel > 0,
    )  # fmt: skip
