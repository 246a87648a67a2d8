"""Orthogonalization on the CPU: CholeskyQR for groups of factors where it is exact enough, else the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from powersgd_triton.ops.reference import (
    DEAD_COLUMN,
    householder_qr,
    orthogonalize_reference,
    replace_dead_columns,
)

LARGEST_GROWTH = 1e4
"""One pass of CholeskyQR in fp64 is enough if the terms of each new column have at most so many times its norm. Columns
are then orthogonal up to the square of this times the rounding errors of inner products, which are 4e-16 relative to
norms, or 6e-12 if all errors of 50,000 terms add up: 4e-8, at the most 6e-4."""

LARGEST_FIRST_GROWTH = 1e7
"""The same for the first of two passes. Its columns are nearly orthogonal, so that the second pass is exact. If errors
add up and they are not, the second pass sees that, and Householder QR takes its place."""


def orthogonalize_groups(
    sources: Sequence[Tensor],
    *,
    keys: Sequence[Tensor],
    step: int | Tensor,
    epsilon: float = 0.0,
    out: Sequence[Tensor],
) -> int | Tensor:
    """Do what ``orthogonalize_reference`` does for each group of factors, by CholeskyQR where that is exact enough.

    On small matrices the calls take longer than the arithmetic, so groups of equal rank share a decomposition. On other
    devices the host would have to wait to know what is exact enough, and fp64 bases need more, so these are left to the
    reference.
    """
    zeroed: int | Tensor = 0
    ranks: dict[int, list[int]] = {}
    for i, A in enumerate(sources):
        if A.device.type == "cpu" and A.dtype == torch.float32:
            ranks.setdefault(A.shape[-1], []).append(i)
        else:
            zeroed += orthogonalize_reference(A, keys=keys[i], step=step, epsilon=epsilon, out=out[i])
    for group in ranks.values():
        # The vectors are rows instead of columns, which makes the products below twice as fast.
        Xts = [sources[i].mT.to(torch.float64, memory_format=torch.contiguous_format) for i in group]
        for i, (Xt, growth) in zip(group, _cholesky_qr(Xts, max(epsilon, DEAD_COLUMN)), strict=True):
            inexact = (growth > LARGEST_GROWTH).nonzero().squeeze(1)
            if len(inexact):
                X = Xt[inexact].mT
                # Of the others the first pass has made nearly orthonormal columns.
                (unknown,) = (growth[inexact] > LARGEST_FIRST_GROWTH).nonzero(as_tuple=True)
                which = inexact[unknown]
                X[unknown] = replace_dead_columns(sources[i][which], keys=keys[i][which], step=step, epsilon=epsilon)
                ((again, growth),) = _cholesky_qr([X.mT.contiguous()], 0.0)
                (rest,) = (growth > LARGEST_GROWTH).nonzero(as_tuple=True)
                Q, more = householder_qr(X[rest])
                again[rest], zeroed = Q.mT, zeroed + more
                Xt[inexact] = again
            out[i].copy_(Xt.mT)
    return zeroed


def _cholesky_qr(Xts: Sequence[Tensor], threshold: float) -> list[tuple[Tensor, Tensor]]:
    """Return orthonormal bases X R⁻¹ of the columns of each X [B, n, r] of one rank, with RᵀR = XᵀX, both transposed.

    (Yamazaki, Tomov, Dongarra: "Mixed-precision Cholesky QR factorization and its case studies on multicore CPU with
    multiple GPUs", SIAM J. Sci. Comput. 37, 2015.) With each comes how large the terms of a new column are, relative to
    its norm, [B]: infinite if a share of at most ``threshold`` is left of one. Rounding errors grow by this factor.
    """
    gram = torch.cat([torch.bmm(Xt, Xt.mT) for Xt in Xts])
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    L, failed = torch.linalg.cholesky_ex(gram)
    inverse = torch.linalg.solve_triangular(L.mT, torch.eye(L.shape[-1], dtype=L.dtype), upper=True)
    growth = (inverse.abs() * norms.unsqueeze(2)).sum(dim=1).amax(dim=1)
    alive = (L.diagonal(dim1=-2, dim2=-1) > threshold * norms).all(dim=1) & (failed == 0) & growth.isfinite()
    growth = torch.where(alive, growth, math.inf)
    counts = [len(Xt) for Xt in Xts]
    transforms = inverse.mT.split(counts)
    return [(torch.bmm(T, Xt), grown) for T, Xt, grown in zip(transforms, Xts, growth.split(counts), strict=True)]
