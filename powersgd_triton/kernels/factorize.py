"""Device functions around the small C × C matrices of orthogonalization: sums of parts, and the factorization."""

import triton
import triton.language as tl

from powersgd_triton.layout import constants

NOISE = tl.constexpr(4 * 2.0**-53)
"""Rounding error of an inner product relative to the vectors' norms: a few units, since errors of long sums cancel."""

ENOUGH = tl.constexpr(1e-7)
"""A pass is enough if rounding errors are at most this share of what is left of each column's squared norm."""

ORTHONORMAL = tl.constexpr(constants.ORTHONORMAL)
"""The same after the last pass, where other columns become zero."""


@triton.jit
def arrives_last(counter, expected):
    """Return whether all other programs have arrived at this counter. Then it is 0 again, for the next launch."""
    # All threads have stored their results before one of them says so.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def sum_of_parts(squares, parts, rows, columns, C: tl.constexpr):
    """Sum of parts [C, C], of which the first so many rows and columns were written."""
    ranks = tl.arange(0, C)
    at = ranks[:, None] * C + ranks[None, :]
    ok = (ranks < rows)[:, None] & (ranks < columns)[None, :]
    total = tl.zeros([C, C], tl.float64)
    # In the order of the chunks, so that the bits do not depend on which program adds them. The parts come from other
    # multiprocessors: .cg reads them from the cache that all share. As many are loaded at once as registers hold.
    UNROLL: tl.constexpr = 2 if C > 16 else 8
    for part in tl.range(0, parts, loop_unroll_factor=UNROLL):
        total += tl.load(squares + part * C * C + at, ok, 0.0, cache_modifier=".cg")
    return total


@triton.jit
def diagonal_of(gram, C: tl.constexpr):
    """The diagonal [C] of gram [C, C]."""
    ranks = tl.arange(0, C)
    return tl.sum(tl.where(ranks[:, None] == ranks[None, :], gram, 0.0), axis=0)


@triton.jit
def _row(square, k, C: tl.constexpr):
    """Row k [C] of square [C, C]."""
    # A tensor in registers cannot be indexed. A sum of integers, of which all but one are 0, takes less time than one
    # of floats.
    bits = tl.where(tl.arange(0, C)[:, None] == k, square.to(tl.int64, bitcast=True), 0)
    return tl.sum(bits, axis=0).to(tl.float64, bitcast=True)


@triton.jit
def _everywhere(vector, k, C: tl.constexpr):
    """Element k of vector [C], in each of C places."""
    return tl.gather(vector, tl.zeros([C], tl.int32) + k, 0)


@triton.jit
def _chances(left, inverse, noise, threshold, final):
    """Return (share of its squared norm left of a column, whether that is a direction, whether it may be), each [C]."""
    share = (left * inverse).to(tl.float32)
    largest = tl.where(final, ORTHONORMAL, 1.0) * share
    return share, (noise < largest) & (share > threshold), (noise > threshold) & (final == 0)


@triton.jit
def factorize(gram, before, exact, threshold, final, r, transform, norms, C: tl.constexpr):
    """transform = L⁻ᵀ [C, C] with L Lᵀ = gram [C, C], whose first r columns count. Dead columns are zero.

    Returns (number of dead columns, number of those that are not exact). If both are 0, no further pass is needed.

    A column is dead if at most the share ``threshold`` of ``before``, its original squared norm, is left of it.
    Rounding errors, which are relative to ``exact``, may exceed that share if little was left of an earlier column.
    Then it is not known what is left: the column is kept, and the next pass decides. There the columns are nearly
    orthogonal, so errors are small. In the ``final`` pass a column that is not known to be orthonormal is dead too.

    ``norms`` [C] gets ``before`` in the units of the transformed columns. 0 stands for their own.
    """
    ranks = tl.arange(0, C)
    left = diagonal_of(gram, C)
    # False where anything is NaN. A column that is not finite is dead, and must not spread to the others.
    present = (before < float("inf")) & (left < float("inf")) & (left > 0)
    square = tl.where(present[:, None] & present[None, :], gram, 0.0)
    left = tl.where(present, left, 0.0)
    norm = tl.where(present, before, 1.0)
    inverse = 1.0 / norm
    size = tl.sqrt(inverse)
    # Of the squared norm, like each share: rounding errors of what is left.
    noise = tl.where(present, NOISE * exact * inverse, 0.0).to(tl.float32)
    # One matrix holds what is left of the Gram matrix and, in the columns that are finished, the rows of L⁻¹ so far.
    for k in range(r):
        row = _row(square, k, C)
        # This is computed for all columns at once. It counts for column k.
        share, known, unclear = _chances(left, inverse, noise, threshold, final)
        floor = tl.where(known, left, noise.to(tl.float64) * norm)
        scales = tl.where(known | unclear, tl.rsqrt(tl.where(known | unclear, floor, 1.0)), 0.0)
        # A column in doubt has a negative sign here. It is not a direction yet: others keep their share of it.
        sign = _everywhere(tl.where(known, scales, -scales), k, C)
        doubt = _everywhere(noise / tl.where(known, share, 1.0), k, C)
        scale, removal = tl.abs(sign), tl.maximum(sign, 0.0)
        finished = tl.where(ranks == k, scale, tl.where(ranks < k, row * scale, 0.0))
        tl.store(transform + ranks * C + k, finished, ranks < r)
        row = tl.where(ranks == k, removal, row * removal)
        column = tl.where(ranks > k, row, 0.0)
        # A multiplier's error comes from those of both columns.
        part = tl.abs(column * size).to(tl.float32)
        error = tl.sqrt(doubt * noise) + part * doubt
        noise += tl.where((ranks > k) & (sign > 0), (2.0 * part + error) * error, 0.0)
        left = tl.fma(-column, column, left)
        # Fused explicitly, since the compiler may not (see ``NUMERICS``): fewer registers.
        square = tl.fma(-column[:, None], row[None, :], tl.where((ranks == k)[None, :], 0.0, square))
    share, known, unclear = _chances(left, inverse, noise, threshold, final)
    doubtful = unclear & ~known
    # Nothing else is lost if a column in doubt dies. A known one was projected out of others, which lose their share of
    # it with it. So it dies only if little is left of what it is now, and not of the original.
    floor = tl.where(doubtful, noise.to(tl.float64) * norm, 1.0)
    tl.store(norms + ranks, tl.where(doubtful, norm / floor, 0.0), ranks < r)
    dead = ~known & ~unclear
    exact_enough = known & (noise < share * ENOUGH)
    return (
        tl.sum(tl.where((ranks < r) & dead, 1, 0), axis=0),
        tl.sum(tl.where((ranks < r) & ~dead & ~exact_enough, 1, 0), axis=0),
    )
