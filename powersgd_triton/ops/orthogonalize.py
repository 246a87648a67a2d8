"""Orthogonalization: by Householder QR, and on the CPU by CholeskyQR for groups of factors where it is exact enough."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.layout.constants import DEAD_COLUMN, ORTHONORMAL
from powersgd_triton.ops.blocks import multiply

PASSES = 4
"""Decompositions after which no further column of a factor is found to be dead. Nearly always the first one finds all.
What is not found then is no loss: such a column is kept, and the basis is orthonormal with it."""

LARGEST_GROWTH = 1e5
"""One pass of CholeskyQR in fp64 is enough if the terms of each new column have at most so many times its norm. Columns
are then orthogonal up to the square of this times the rounding errors of inner products, about 2⁻⁵³: 1e-6."""

LARGEST_ERROR = 6e-4
"""The same if all rounding errors of n terms add up, which are 2⁻⁵³ n relative to norms."""

NARROW_GROWTH = 8.0
"""The new columns may be computed in fp32 if the root of the squares of these terms is at most so many times their
norm. Bases then depart from orthonormal ones by less than 1e-6. It is 1 to 8 where bases are kept from step to step."""

NARROW_NORM = 2.0**100
"""Largest norm of a column for that. The smallest one is its inverse."""

LARGEST_FIRST_GROWTH = 1e7
"""The same for the first of two passes. Its columns are nearly orthogonal, so that the second pass is exact. If errors
add up and they are not, the second pass sees that, and Householder QR takes its place."""


def orthogonalize_reference(
    A: Tensor, *, keys: Tensor, step: int | Tensor, epsilon: float = 0.0, out: Tensor
) -> Tensor:
    """out = orthonormal basis of A's columns, in their order: Gram–Schmidt as Householder QR in fp64.

    Dead columns are replaced first, see ``replace_dead_columns``. A finite A gives a finite, orthonormal result, whose
    span contains A's columns up to what is dead. A non-finite A gives a finite result.

    Args:
        A, out: [B, n, r] with r ≤ n, A in fp32 or fp64. They may be the same.
        keys: [B] int64, a number for each matrix.
        step: Number of the step, also as an int64 scalar on the device.
        epsilon: Share of its norm up to which a column is dead, if that is more than 2⁻²².

    Return the number of columns that are zero since they would not be orthonormal, an int64 scalar.
    """
    basis, zeroed = householder_qr(replace_dead_columns(A, keys=keys, step=step, epsilon=epsilon))
    out.copy_(basis)
    return zeroed


def householder_qr(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q with X = Q R, for X [B, n, r] in fp64 and R with a positive diagonal, and how many of its columns are 0.

    Q is orthonormal for any finite X (Higham: "Accuracy and Stability of Numerical Algorithms", theorem 19.4). If that
    is not so after all, the columns concerned are zero. Then nothing of them is sent, and the error keeps it.
    """
    Q, R = torch.linalg.qr(X)
    Q = torch.where(R.diagonal(dim1=-2, dim2=-1).unsqueeze(1) < 0, -Q, Q)
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    orthonormal = (torch.bmm(Q.mT, Q) - identity).abs().amax(dim=1) <= ORTHONORMAL
    return torch.where(orthonormal.unsqueeze(1), Q, 0), (~orthonormal).sum()


def replace_dead_columns(A: Tensor, *, keys: Tensor, step: int | Tensor, epsilon: float = 0.0) -> Tensor:
    """Return A's columns in fp64, scaled if they were fp64 before, with random directions in the place of dead ones.

    A column is dead if at most max(epsilon, 2⁻²²) of its norm is left after projecting out the columns before it that
    are not dead, or if it is not finite.

    In X = Q R, |R_jj| is what is left of column j after projecting out all columns before it. These may include dead
    ones, which must not count. So a column is dead for certain only if it has no larger part in the directions of other
    columns that seem dead. Then it is moved behind all others, and R is decomposed again. A column of Q R is that of X
    up to rounding of this column, for any X (Higham, theorem 19.4). So rounding loses no direction.
    """
    # As rows instead of columns, in which order LAPACK wants them in memory.
    Xt = A.mT.to(torch.float64, memory_format=torch.contiguous_format)
    if A.dtype == torch.float64:
        # Squares of fp64 values may overflow, or vanish.
        largest = Xt.abs().amax(dim=2, keepdim=True)
        Xt = Xt / torch.where(largest > 0, largest, 1)
    norms = Xt.norm(dim=2)
    norms = torch.where(norms.isfinite(), norms, 0)
    # A column that is not finite is dead, and must not spread to others.
    Xt.masked_fill_((norms == 0).unsqueeze(2), 0)
    R = torch.linalg.qr(Xt.mT, mode="r").R
    dead = torch.zeros_like(norms, dtype=torch.bool)
    order = torch.arange(A.shape[2], device=A.device).expand_as(dead)
    on_host = A.device.type == "cpu"
    for _ in range(PASSES):
        little = max(epsilon, DEAD_COLUMN) * norms.gather(1, order)
        weak = R.diagonal(dim1=-2, dim2=-1).abs() <= little
        certain = weak & (torch.where(weak.unsqueeze(2), R, 0).norm(dim=1) <= little)
        if on_host and not (certain & ~dead.gather(1, order)).any():
            break
        dead = dead.scatter(1, order, dead.gather(1, order) | certain)
        if on_host and torch.equal(weak, certain):
            # The others are alive, whatever was projected out of them.
            break
        later = torch.argsort(dead.gather(1, order).byte(), dim=1, stable=True)
        R = torch.linalg.qr(R.gather(2, later.unsqueeze(1).expand_as(R)), mode="r").R
        order = order.gather(1, later)
    # The random numbers take longer than the rest, so the host draws only those that are needed.
    columns = dead.any(dim=0).nonzero().squeeze(1) if on_host else torch.arange(A.shape[2], device=A.device)
    random = random_directions(keys, step, A.shape[1], A.shape[2], columns).mT.double()
    Xt[:, columns] = torch.where(dead[:, columns].unsqueeze(2), random, Xt[:, columns])
    return Xt.mT


def random_directions(keys: Tensor, step: int | Tensor, n: int, r: int, columns: Tensor | None = None) -> Tensor:
    """Return uniform numbers in [−1, 1), [B, n, r] fp32, or only these of the r columns. Keys are [B] int64.

    They are a function of (key, step, row, column) on any device: no generator's state changes, and all workers draw
    the same.
    """
    if columns is None:
        counter = torch.arange(n * r, device=keys.device).view(1, n, r)
    else:
        counter = torch.arange(0, n * r, r, device=keys.device).view(1, n, 1) + columns
    # Keys are mixed separately from counters, so that no key's stream is a shifted copy of another key's stream.
    salt = (step * 0x9E3779B9 + 0x85EBCA6B) & 0xFFFFFFFF
    if keys.device.type == "cpu" and isinstance(salt, int):
        # On few numbers, calls take longer than Python.
        stream = torch.tensor([mix(mix(key & 0xFFFFFFFF) ^ salt) for key in keys.tolist()], dtype=torch.int64)
    else:
        stream = mix(mix(keys & 0xFFFFFFFF) ^ salt)
    numbers: Tensor = mix(mix(counter) ^ stream.view(-1, 1, 1))
    return ((numbers >> 8).float() * 2.0**-23).sub_(1.0)


def mix(x: Any) -> Any:
    """Map 32-bit integers, or tensors of them, one to one. Every input bit changes about half of the output bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = x ^ (x >> shift)
        x *= factor
        x &= 0xFFFFFFFF
    return x


def orthogonalize_groups(
    sources: Sequence[Tensor],
    *,
    keys: Sequence[Tensor],
    step: int | Tensor,
    epsilon: float = 0.0,
    out: Sequence[Tensor],
    wide: Sequence[Tensor] = (),
) -> int | Tensor:
    """Do what ``orthogonalize_reference`` does for each group of factors, by CholeskyQR where that is exact enough.

    ``wide`` are fp64 copies of the sources, if there are any. ``out`` must not be the sources' memory. Calls take
    longer than arithmetic on small matrices, so groups of similar rank share a decomposition. On other devices the host
    would have to wait to know what is exact enough, and fp64 needs more: these are left to the reference.
    """
    zeroed: int | Tensor = 0
    widths: dict[int, list[int]] = {}
    for i, A in enumerate(sources):
        if A.device.type == "cpu" and out[i].dtype == torch.float32:
            widths.setdefault(1 << (A.shape[-1] - 1).bit_length(), []).append(i)
        else:
            zeroed += orthogonalize_reference(A, keys=keys[i], step=step, epsilon=epsilon, out=out[i])
    for group in widths.values():
        Xs = [wide[i] if wide else sources[i].double() for i in group]
        inverse, growths, roots = _inverses(Xs, max(epsilon, DEAD_COLUMN))
        largest = min(LARGEST_GROWTH, math.sqrt(LARGEST_ERROR * 2**53 / max(X.shape[1] for X in Xs)))
        narrow, few = inverse.float(), (roots <= NARROW_GROWTH).tolist()
        end = 0
        for i, X in zip(group, Xs, strict=True):
            start, end, r = end, end + len(X), X.shape[-1]
            if all(few[start:end]):
                multiply(sources[i], narrow[start:end, :r, :r], out=out[i])
                continue
            basis, growth = torch.bmm(X, inverse[start:end, :r, :r]), growths[start:end]
            (which,) = (growth > largest).nonzero(as_tuple=True)
            if len(which):
                # Of the others the first pass has made nearly orthonormal columns.
                X, (lost,) = basis[which], (growth[which] > LARGEST_FIRST_GROWTH).nonzero(as_tuple=True)
                A, numbers = sources[i][which[lost]], keys[i][which[lost]]
                X[lost] = replace_dead_columns(A, keys=numbers, step=step, epsilon=epsilon)
                second, again, _ = _inverses([X], 0.0)
                basis[which] = torch.bmm(X, second)
                (rest,) = (again > largest).nonzero(as_tuple=True)
                basis[which[rest]], more = householder_qr(X[rest])
                zeroed += more
            out[i].copy_(basis)
    return zeroed


@functools.cache
def _identity(width: int) -> Tensor:
    return torch.eye(width, dtype=torch.float64)


def _inverses(Xs: Sequence[Tensor], threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return R⁻¹ with RᵀR = XᵀX, so that X R⁻¹ has orthonormal columns, for all matrices of some X [B, n, r] in fp64.

    (Yamazaki, Tomov, Dongarra: "Mixed-precision Cholesky QR factorization and its case studies on multicore CPU with
    multiple GPUs", SIAM J. Sci. Comput. 37, 2015.) Smaller ones are in the corners of larger ones. Then how large the
    terms of a new column are at most, relative to its norm, two numbers for each matrix: a bound of their sum, and the
    root of their squares. They are infinite if a share of at most ``threshold`` is left of a column, the second also if
    a norm is not one for fp32. Rounding errors grow by them.
    """
    counts, ranks = [len(X) for X in Xs], [X.shape[-1] for X in Xs]
    width, grams = max(ranks), [torch.bmm(X.transpose(1, 2), X) for X in Xs]
    identity = _identity(width)
    if min(ranks) < width:
        # Factors of smaller rank are padded with columns that are orthonormal to all others.
        padded = identity.repeat(sum(counts), 1, 1)
        for gram, r, part in zip(grams, ranks, padded.split(counts), strict=True):
            part[:, :r, :r] = gram
        grams = [padded]
    gram = grams[0] if len(grams) == 1 else torch.cat(grams)
    norms = gram.diagonal(dim1=1, dim2=2).sqrt()
    L, failed = torch.linalg.cholesky_ex(gram)
    inverse = torch.linalg.solve_triangular(L, identity, upper=False).transpose(1, 2)
    terms = norms.unsqueeze(2) * inverse
    roots = terms.square_().sum(1).amax(1).sqrt_()
    # Comparisons are False for NaN.
    alive = (L.diagonal(dim1=1, dim2=2) > threshold * norms).all(dim=1) & (failed == 0) & (roots < math.inf)
    ordinary = ((norms > 1 / NARROW_NORM) & (norms < NARROW_NORM)).all(dim=1)
    # A sum of as many terms as columns is at most this.
    sums = torch.where(alive, roots * math.sqrt(width), math.inf)
    return inverse, sums, torch.where(alive & ordinary, roots, math.inf)
