"""Blocked Gram–Schmidt: panels of columns, each orthonormalized as X L⁻ᵀ with L Lᵀ = XᵀX in fp64, twice."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.gram import gram_triton
from powersgd_triton.kernels.subtract_projection import subtract_projection_triton
from powersgd_triton.kernels.table import DEAD_COLUMN, FactorTable


@triton.jit
def _mix(x):
    """A bijection of uint32 in which every input bit changes about half of the output bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _sum_of_parts(grams, first, parts, C: tl.constexpr):
    ranks = tl.arange(0, C)
    at = first * C * C + ranks[:, None] * C + ranks[None, :]
    total = tl.zeros([C, C], tl.float64)
    for part in range(parts):
        total += tl.load(grams + part * C * C + at)
    return total


@triton.jit
def _diagonal(gram, C: tl.constexpr):
    ranks = tl.arange(0, C)
    return tl.sum(tl.where(ranks[:, None] == ranks[None, :], gram, 0.0), axis=0)


@triton.jit
def _inverse_cholesky(gram, before, threshold, r, C: tl.constexpr):
    """L⁻¹ with L Lᵀ = gram [C, C], and 1 for each column that is alive [C]; rows of dead columns are zero."""
    ranks = tl.arange(0, C)
    i, j = ranks[:, None], ranks[None, :]
    diagonal = _diagonal(gram, C)
    finite = (diagonal < float("inf")).to(tl.int32)
    rest = tl.where(finite[:, None] * finite[None, :] > 0, gram, 0.0)
    inverse = tl.where(i == j, 1.0, 0.0).to(tl.float64)
    alive = tl.zeros([C], tl.int32)
    for k in range(r):
        column = tl.sum(tl.where(j == k, rest, 0.0), axis=1)
        row = tl.sum(tl.where(i == k, inverse, 0.0), axis=0)
        left = tl.sum(tl.where(ranks == k, column, 0.0), axis=0)
        needed = tl.sum(tl.where(ranks == k, before, 0.0), axis=0) * threshold
        # False where anything is NaN, and where all is zero.
        good = left > needed
        scale = tl.where(good, 1.0 / tl.sqrt(tl.where(good, left, 1.0)), 0.0)
        column = tl.where(ranks > k, column * scale, 0.0)
        row = row * scale
        rest -= column[:, None] * column[None, :]
        inverse = tl.where(i == k, row[None, :], inverse - column[:, None] * row[None, :])
        alive = tl.where(ranks == k, good.to(tl.int32), alive)
    return inverse, alive


@triton.jit(do_not_specialize=["salt", "threshold", "panel", "before_first"])
def _orthogonalize_kernel(
    A, X, out, grams, before, next_grams, finite, records, chunks, salt, threshold, panel, before_first,
    CHECK: tl.constexpr, LAST: tl.constexpr, KEEP: tl.constexpr, C: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """X_c = A_c L⁻ᵀ with L Lᵀ = A_cᵀ A_c, dead columns random, and parts of X_cᵀ X_c; or out_c. Grid: chunks."""
    chunk = tl.program_id(0)
    matrix = tl.load(chunks + chunk * 3)
    start = tl.load(chunks + chunk * 3 + 1)
    end = tl.load(chunks + chunk * 3 + 2)
    record = records + matrix * 6
    r = tl.load(record + 1).to(tl.int32)
    if panel * C >= r:
        return
    offset = tl.load(record + 2)
    first = tl.load(record + 4)
    parts = tl.load(record + 5)
    ranks = tl.arange(0, C)
    gram = _sum_of_parts(grams, first, parts, C)
    reference = _diagonal(_sum_of_parts(before, before_first + first, parts, C), C)
    if CHECK:
        # Squares of fp32 values do not overflow fp64: a diagonal that is not finite shows a value that is not.
        broken = tl.sum(tl.where(reference < float("inf"), 0, 1), axis=0)
        if (broken > 0) & (chunk == first):
            tl.store(finite, 0)
    inverse, alive = _inverse_cholesky(gram, reference, threshold, tl.minimum(r - panel * C, C), C)
    inverse_t = tl.trans(inverse)
    column_ok = panel * C + ranks < r
    dead = tl.sum(tl.where(column_ok, 1 - alive, 0), axis=0)
    stream = _mix(_mix(tl.load(record + 3).to(tl.uint32)) ^ salt.to(tl.uint32))
    total = tl.zeros([C, C], tl.float64)
    for row in range(start, end, BLOCK_ROWS):
        rows = row + tl.arange(0, BLOCK_ROWS)
        ok = (rows < end)[:, None] & column_ok[None, :]
        within = rows.to(tl.int64)[:, None] * r + panel * C + ranks[None, :]
        value = tl.load(A + offset + within, ok & (alive > 0)[None, :], 0.0).to(tl.float64)
        value = tl.dot(value, inverse_t, out_dtype=tl.float64)
        if LAST:
            tl.store(out + offset + within, value.to(tl.float32), ok)
        else:
            if dead > 0:
                bits = _mix(_mix(within.to(tl.uint32)) ^ stream)
                random = ((bits >> 8).to(tl.float32) * 2.0**-23 - 1.0).to(tl.float64)
                value = tl.where(ok & (alive == 0)[None, :], random, value)
            total = tl.dot(tl.trans(value), value, total, out_dtype=tl.float64)
        if KEEP:
            tl.store(X + offset + within, value, ok)
    if not LAST:
        tl.store(next_grams + chunk.to(tl.int64) * C * C + ranks[:, None] * C + ranks[None, :], total)


def orthogonalize_triton(
    factors: FactorTable,
    A: Tensor,
    rank: int,
    step: int,
    epsilon: float,
    launch_gram: Launch,
    launch: Launch,
    *,
    X: Tensor,
    grams: Tensor,
    finite: Tensor,
    out: Tensor,
) -> None:
    """out = orthonormal basis of A's columns; see ``orthogonalize_reference``.

    Three launches for a rank within one panel. Two passes: the first replaces dead columns by random directions, the
    second makes them orthogonal. Should one be dead again, which one in a million is, it becomes zero for this step.

    Args:
        factors: table of one side's factors.
        A: fp32, flat.
        rank: the largest.
        step: number of the step, for random directions.
        epsilon: see the reference.
        launch_gram, launch: rows of a block, columns of a panel.
        X: fp64 workspace of A's size.
        grams: fp64 workspace [panels + 1, chunks, C, C].
        finite: int32 scalar on the device, becomes 0 where A is not finite.
        out: fp32, flat; may be A.
    """
    if not len(factors.chunks):
        return
    salt = (step * 0x9E3779B9 + 0x85EBCA6B) & 0xFFFFFFFF
    # As int32 whatever its value, so that the kernel is compiled once.
    salt -= (salt >> 31) << 32
    threshold = max(epsilon, DEAD_COLUMN) ** 2
    panels = -(-rank // launch.panel)

    def run(source: Tensor, panel: int, own: Tensor, before: Tensor, before_panel: int, following: Tensor,
            *, check: bool, last: bool) -> None:  # fmt: skip
        _orthogonalize_kernel[(len(factors.chunks),)](
            source,
            X,
            out,
            own,
            before,
            following,
            finite,
            factors.records,
            factors.chunks,
            salt,
            threshold,
            panel,
            before_panel * len(factors.chunks),
            CHECK=check,
            LAST=last,
            KEEP=not last or panels > 1,
            C=launch.panel,
            BLOCK_ROWS=launch.rows,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )

    own = grams[panels]
    for panel in range(panels):
        gram_triton(factors, A, X, panel, launch_gram, out=grams)
        if panel == 0:
            run(A, panel, grams, grams, 0, own, check=True, last=False)
            run(X, panel, own, own, 0, own, check=False, last=True)
            continue
        for attempt, source in enumerate((A, X)):
            if attempt:
                gram_triton(factors, X, X, panel, launch_gram, out=grams)
            subtract_projection_triton(factors, source, grams, panel, launch_gram, X=X, out=own)
            run(X, panel, own, grams, panel, own, check=not attempt, last=bool(attempt))
