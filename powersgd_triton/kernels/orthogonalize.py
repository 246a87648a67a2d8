"""Blocked Gram–Schmidt: panels of columns, each orthonormalized as X L⁻ᵀ with L Lᵀ = XᵀX in fp64, twice.

The first pass leaves an error that grows with the panel's condition number; the second pass removes it, since its input
is already close to orthonormal. Every program computes the small decomposition of its matrix itself: that costs less
than another launch, and all programs get the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.gram import gram_triton
from powersgd_triton.kernels.random_device import random_values, stream_of
from powersgd_triton.kernels.subtract_projection import subtract_projection_triton
from powersgd_triton.kernels.table import DEAD_COLUMN, FactorTable
from powersgd_triton.kernels.table_device import chunks_of, factor_chunk, key_of

NOISE = tl.constexpr(4 * 2.0**-53)
"""Rounding error of an inner product relative to the vectors' norms: a few units, since errors of long sums cancel."""


@triton.jit
def _sum_of_parts(grams, parts, r, C: tl.constexpr):
    """Sum of parts [C, C], of which the first r rows and columns were written."""
    ranks = tl.arange(0, C)
    at = ranks[:, None] * C + ranks[None, :]
    ok = (ranks < r)[:, None] & (ranks < r)[None, :]
    total = tl.zeros([C, C], tl.float64)
    # In the order of the chunks: every program of the matrix gets the same bits.
    for part in range(parts):
        total += tl.load(grams + part * C * C + at, ok, 0.0)
    return total


@triton.jit
def _diagonal(gram, C: tl.constexpr):
    """The diagonal [C] of gram [C, C]."""
    # A tensor in registers cannot be indexed: masks and sums pick its elements, here and below.
    ranks = tl.arange(0, C)
    return tl.sum(tl.where(ranks[:, None] == ranks[None, :], gram, 0.0), axis=0)


@triton.jit
def _inverse_cholesky(gram, before, threshold, r, C: tl.constexpr):
    """L⁻¹ with L Lᵀ = gram [C, C], and 1 for each column that is alive [C]; rows of dead columns are zero.

    Args:
        before: squared norms [C] of the columns before earlier panels were projected out.
        threshold: a column is dead if at most this share of ``before`` is left of its squared norm.
        r: number of columns, at most C.
    """
    ranks = tl.arange(0, C)
    i, j = ranks[:, None], ranks[None, :]
    diagonal = _diagonal(gram, C)
    finite = (diagonal < float("inf")).to(tl.int32)
    # A column that is not finite is dead, and must not spread to the others.
    rest = tl.where(finite[:, None] * finite[None, :] > 0, gram, 0.0)
    inverse = tl.where(i == j, 1.0, 0.0).to(tl.float64)
    alive = tl.zeros([C], tl.int32)
    size = tl.sqrt(tl.where(finite > 0, diagonal, 0.0))
    noise = tl.zeros([C], tl.float64)
    # Each step eliminates column k from the rest of the Gram matrix; the same operations turn the identity into L⁻¹.
    for k in range(r):
        column = tl.sum(tl.where(j == k, rest, 0.0), axis=1)
        row = tl.sum(tl.where(i == k, inverse, 0.0), axis=0)
        left = tl.sum(tl.where(ranks == k, column, 0.0), axis=0)
        needed = tl.sum(tl.where(ranks == k, before * threshold + noise, 0.0), axis=0)
        # False where anything is NaN, and where all is zero.
        good = left > needed
        scale = tl.where(good, 1.0 / tl.sqrt(tl.where(good, left, 1.0)), 0.0)
        column = tl.where(ranks > k, column * scale, 0.0)
        row = row * scale
        # Fused explicitly, here and below, since the compiler may not (see ``NUMERICS``): fewer registers.
        rest = tl.fma(-column[:, None], column[None, :], rest)
        # A column that depends on this one is not eliminated exactly: the rounding errors of their inner products
        # remain, and they are large if little is left of this column itself. Such a remainder must not pass for a
        # direction: the second pass would find it dependent, too late to replace it.
        inverse_share = tl.sum(tl.where(ranks == k, size, 0.0), axis=0) * scale
        error = NOISE * inverse_share * (size + tl.abs(column) * inverse_share)
        noise += (2.0 * tl.abs(column) + error) * error
        inverse = tl.where(i == k, row[None, :], tl.fma(-column[:, None], row[None, :], inverse))
        alive = tl.where(ranks == k, good.to(tl.int32), alive)
    return inverse, alive


@triton.jit
def _with_random_columns(value, alive, within, stream):
    """value [rows, C] with columns that are not alive replaced by random values, the same on all workers."""
    return tl.where((alive == 0)[None, :], random_values(within, stream).to(tl.float64), value)


@triton.jit(do_not_specialize=["number", "threshold", "panel", "before_first"])
def _orthogonalize_kernel(
    A, X, out, grams, before, next_grams, transforms, finite, records, chunks, number, threshold, panel, before_first,
    FIRST: tl.constexpr, CHECK: tl.constexpr, KEEP: tl.constexpr, C: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """X_c = A_c L⁻ᵀ with L Lᵀ = A_cᵀ A_c. Grid: chunks.

    The first pass (FIRST) replaces dead columns by random ones and writes parts of X_cᵀ X_c; the second pass writes
    out_c. With KEEP the first pass also writes X_c, for the panels that follow. Without, where a rank fits one panel,
    it writes only L⁻¹, to ``transforms``, from which the second pass computes X_c again: an fp64 factor is neither
    written nor read.
    """
    chunk = tl.program_id(0)
    matrix, start, end, r, offset = factor_chunk(records, chunks, chunk)
    # Launched for the largest rank; this matrix may have fewer panels.
    width = tl.minimum(r - panel * C, C)
    if width <= 0:
        return
    offset += panel * C
    first, parts = chunks_of(records, matrix)
    ranks = tl.arange(0, C)
    square = ranks[:, None] * C + ranks[None, :]
    gram = _sum_of_parts(grams + first * C * C, parts, width, C)
    # What a column had before earlier panels were projected out of it decides whether what is left is a direction.
    if CHECK and panel > 0:
        reference = _diagonal(_sum_of_parts(before + (before_first + first) * C * C, parts, width, C), C)
    else:
        reference = _diagonal(gram, C)
    if CHECK:
        # Squares of fp32 values do not overflow fp64: a diagonal that is not finite shows a value that is not.
        broken = tl.sum(tl.where(reference < float("inf"), 0, 1), axis=0)
        if (broken > 0) & (chunk == first):
            tl.store(finite, 0)
    inverse, alive = _inverse_cholesky(gram, reference, threshold, width, C)
    inverse_t = tl.trans(inverse)
    usable = alive
    # The step's number is read here, since a launch that is replayed has the same arguments.
    stream = stream_of(key_of(records, matrix), tl.load(number))
    square_ok = (ranks < width)[:, None] & (ranks < width)[None, :]
    if FIRST and not KEEP and chunk == first:
        tl.store(transforms + matrix.to(tl.int64) * C * C + square, inverse, square_ok)
    if not FIRST and not KEEP:
        before_t = tl.trans(tl.load(transforms + matrix.to(tl.int64) * C * C + square, square_ok, 0.0))
        # A dead column's row of L⁻¹ is zero.
        usable = (_diagonal(before_t, C) > 0).to(tl.int32)
    # Nearly always 0: random values are computed only where they are needed.
    dead = tl.sum(tl.where(ranks < width, 1 - usable, 0), axis=0)
    total = tl.zeros([C, C], tl.float64)
    for row in range(start, end, BLOCK_ROWS):
        rows = row + tl.arange(0, BLOCK_ROWS)
        ok = (rows < end)[:, None] & (ranks < width)[None, :]
        within = rows.to(tl.int64)[:, None] * r + ranks[None, :]
        value = tl.load(A + offset + within, ok & (usable > 0)[None, :], 0.0).to(tl.float64)
        if not FIRST and not KEEP:
            value = tl.dot(value, before_t, out_dtype=tl.float64)
            if dead > 0:
                value = tl.where(ok, _with_random_columns(value, usable, panel * C + within, stream), 0.0)
        value = tl.dot(value, inverse_t, out_dtype=tl.float64)
        # A may be X or out: no thread stores before all have loaded.
        tl.debug_barrier()
        if FIRST:
            if dead > 0:
                value = tl.where(ok, _with_random_columns(value, usable, panel * C + within, stream), 0.0)
            total = tl.dot(tl.trans(value), value, total, out_dtype=tl.float64)
        else:
            tl.store(out + offset + within, value.to(tl.float32), ok)
        if KEEP:
            tl.store(X + offset + within, value, ok)
    if FIRST:
        tl.store(next_grams + chunk.to(tl.int64) * C * C + square, total, square_ok)


def orthogonalize_triton(
    factors: FactorTable,
    A: Tensor,
    rank: int,
    number: Tensor,
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

    Three launches for a rank within one panel. The first pass replaces dead columns by random directions, the second
    makes these orthogonal to the others. If one is dead again, it is zero in this step.

    Args:
        factors: table of one side's factors.
        A: fp32, flat.
        rank: the largest.
        number: int64 scalar on the device, the step's number; random directions depend on it.
        epsilon: see the reference.
        launch_gram, launch: rows of a block, columns of a panel.
        X: fp64 workspace of A's size; not used, and may be empty, for ranks within one panel.
        grams: fp64 workspace [panels + 2, max(chunks, matrices), C · C].
        finite: int32 scalar on the device, becomes 0 where A is not finite.
        out: fp32, flat; may be A.
    """
    if not len(factors.chunks):
        return
    panels = -(-rank // launch.panel)
    own, transforms = grams[panels], grams[panels + 1]

    def run(source: Tensor, panel: int, gram: Tensor, *, first: bool, check: bool = False) -> None:
        _orthogonalize_kernel[(len(factors.chunks),)](
            source,
            X,
            out,
            gram,
            grams,
            # Not over the sums that other programs still read. After the first panel these parts are not used.
            grams if panel else own,
            transforms,
            finite,
            factors.records,
            factors.chunks,
            number,
            max(epsilon, DEAD_COLUMN) ** 2,
            panel,
            panel * len(factors.chunks),
            FIRST=first,
            CHECK=check,
            KEEP=panels > 1,
            **launch.of_factors,
        )

    for panel in range(panels):
        gram_triton(factors, A, X, panel, launch_gram, out=grams)
        if panel == 0:
            run(A, panel, grams, first=True, check=True)
            run(X if panels > 1 else A, panel, own, first=False)
            continue
        subtract_projection_triton(factors, A, grams, panel, launch_gram, X=X, out=own)
        run(X, panel, own, first=True, check=True)
        gram_triton(factors, X, X, panel, launch_gram, out=grams)
        subtract_projection_triton(factors, X, grams, panel, launch_gram, X=X, out=own)
        run(X, panel, own, first=False)
