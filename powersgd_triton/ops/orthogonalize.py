"""Orthogonalization: by Householder QR, and on the CPU by CholeskyQR for groups of factors where it is exact enough."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.layout.constants import DEAD_COLUMN, ORTHONORMAL
from powersgd_triton.ops.blocks import add_product, multiply, product

PASSES = 4
"""Decompositions after which no further column of a factor is found to be dead. Nearly always the first one finds all.
What is not found then is no loss: such a column is kept, and the basis is orthonormal with it."""

PANEL = 64
"""Most columns that are orthogonalized at once. Decompositions of more take longer than projections of one panel."""

LARGEST_GROWTH = 1e4
"""CholeskyQR with Gram matrices in fp64 is exact enough if the root of the squares of the terms of each new column is
at most so many times its norm. Inner products are then wrong by the square of this times 2⁻⁵³: 1e-8."""

LARGEST_ERROR = 6e-4
"""The same for the errors of n terms, 2⁻⁵³ n relative to norms, if they all add up."""

SURELY_ALIVE = 2.0**-18
"""If projections in fp32 leave a larger share of a column, the column is alive: rounding changes about 2⁻²⁰ of it."""

NARROW_GROWTH = 8.0
"""The new columns may be computed in fp32 if these terms are at most so many times their norm. Bases then depart from
orthonormal ones by about 1e-6. It is 1 to 8 where bases are kept from step to step."""

NARROW_NORM = 2.0**100
"""Largest norm of a column for CholeskyQR. The smallest one is its inverse."""


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
            r = A.shape[-1]
            widths.setdefault(r if r > PANEL else 1 << (r - 1).bit_length(), []).append(i)
        else:
            zeroed += orthogonalize_reference(A, keys=keys[i], step=step, epsilon=epsilon, out=out[i])
    for group in widths.values():
        As, found = [sources[i] for i in group], [out[i] for i in group]
        if As[0].shape[-1] <= PANEL:
            roots = _orthogonalize_panel(As, [wide[i] if wide else sources[i].double() for i in group], found)
        else:
            roots = _orthogonalize_panels(As, found, 1 / max(epsilon, SURELY_ALIVE))
        # A sum of as many terms as columns is at most the root of the squares times the root of their number. If the
        # share of a column that is left is small, its terms are large.
        bound = math.sqrt(LARGEST_ERROR * 2**53 / PANEL / max(A.shape[1] for A in As))
        exact = roots <= min(LARGEST_GROWTH, bound, 1 / epsilon if epsilon else math.inf)
        if exact.all():
            continue
        for i, sure in zip(group, exact.split([len(A) for A in As]), strict=True):
            (lost,) = (~sure).nonzero(as_tuple=True)
            if len(lost):
                basis = sources[i][lost]
                zeroed += orthogonalize_reference(basis, keys=keys[i][lost], step=step, epsilon=epsilon, out=basis)
                out[i][lost] = basis
    return zeroed


def _orthogonalize_panels(As: Sequence[Tensor], out: Sequence[Tensor], largest: float) -> Tensor:
    """Do what ``_orthogonalize_panel`` does for matrices of the same rank, after projecting out the panels before.

    Return infinity for matrices with a column whose norm is ``largest`` times what is left of it, or more. (Barlow,
    Smoktunowicz: "Reorthogonalized block classical Gram–Schmidt", Numer. Math. 123, 2013.)
    """
    worst = torch.zeros(sum(map(len, As)), dtype=torch.float64)
    r = As[0].shape[-1]
    # Of equal width, since sums of products with few columns are less exact.
    width = -(-r // -(-r // PANEL))
    for start in range(0, r, width):
        columns = slice(start, start + width)
        panel, places = [A[..., columns].contiguous() for A in As], [basis[..., columns] for basis in out]
        before = [basis[..., :start] for basis in out] if start else []
        norms = None
        if start:
            longer, norms = _norms(panel), _norms(_project_out(panel, before))
            loss = (longer / norms).amax(1)
            if (loss < NARROW_GROWTH).all():
                norms = longer
            else:
                # Relative to what is left, rounding has left too much of other panels.
                _project_out(panel, before)
        roots = _orthogonalize_panel(panel, [A.double() for A in panel], places, before, norms)
        worst = torch.maximum(worst, roots)
        if start:
            # Comparisons are False for NaN.
            worst.masked_fill_(~(loss * roots < largest), math.inf)
    return worst


def _norms(As: Sequence[Tensor]) -> Tensor:
    return torch.cat([A.double().square_().sum(1) for A in As]).sqrt_()


def _project_out(As: Sequence[Tensor], bases: Sequence[Tensor]) -> Sequence[Tensor]:
    """A −= basis basisᵀ A, for each A [B, n, k] and orthonormal basis [B, n, r]."""
    for A, basis in zip(As, bases, strict=True):
        add_product(A, basis, product(basis.mT, A), alpha=-1)
    return As


def _orthogonalize_panel(
    As: Sequence[Tensor],
    Xs: Sequence[Tensor],
    out: Sequence[Tensor],
    before: Sequence[Tensor] = (),
    norms: Tensor | None = None,
) -> Tensor:
    """Write bases of groups As [B, n, r] in fp32 to ``out``. Return by what rounding errors grow at most.

    Xs are As in fp64. As have been projected onto what is orthogonal to the bases in ``before``, if there are any, and
    had ``norms`` before that.
    """
    inverse, roots = _inverses(Xs, norms)
    narrow, few = inverse.float(), (roots <= NARROW_GROWTH).tolist()
    end = 0
    for i, (A, X, basis) in enumerate(zip(As, Xs, out, strict=True)):
        start, end, r = end, end + len(X), X.shape[-1]
        if all(few[start:end]):
            multiply(A, narrow[start:end, :r, :r], out=basis)
            continue
        new = torch.bmm(X, inverse[start:end, :r, :r])
        if before:
            new = new.float()
            _project_out([new], [before[i]])
        basis.copy_(new)
    return roots


@functools.cache
def _identity(width: int) -> Tensor:
    return torch.eye(width, dtype=torch.float64)


def _inverses(Xs: Sequence[Tensor], norms: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return R⁻¹ with RᵀR = XᵀX, so that X R⁻¹ has orthonormal columns, for all matrices of some X [B, n, r] in fp64.

    (Yamazaki, Tomov, Dongarra: "Mixed-precision Cholesky QR factorization and its case studies on multicore CPU with
    multiple GPUs", SIAM J. Sci. Comput. 37, 2015.) Smaller ones are in the corners of larger ones. Then for each matrix
    the largest root of the squares of the terms of a new column, relative to its norm: rounding errors grow by it.
    The terms are as long as the columns of X, or as ``norms`` if these were longer before. It is infinite or NaN if the
    decomposition failed, and infinite if a norm is not one for fp32.
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
    if norms is None:
        norms = gram.diagonal(dim1=1, dim2=2).sqrt()
    L, failed = torch.linalg.cholesky_ex(gram)
    inverse = torch.linalg.solve_triangular(L, identity, upper=False).transpose(1, 2)
    roots = (norms.unsqueeze(2) * inverse).square_().sum(1).amax(1).sqrt_()
    ordinary = (norms > 1 / NARROW_NORM) & (norms < NARROW_NORM)
    return inverse, roots.masked_fill_(~ordinary.all(dim=1) | (failed != 0), math.inf)
