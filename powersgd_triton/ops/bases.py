"""Orthonormal bases on the CPU: by CholeskyQR in C, ``basis.c``, or by Householder QR where that is too inexact."""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from powersgd_triton.ops.host import fields, library
from powersgd_triton.ops.orthogonalize import orthogonalize_reference

LARGEST_GROWTH = 1e4
"""CholeskyQR with Gram matrices in fp64 is exact enough if the root of the squares of the terms of each new column is
at most so many times its norm. Inner products are then wrong by the square of this times 2⁻⁵³: 1e-8."""

LARGEST_ERROR = 6e-4
"""The same for the errors of n terms, 2⁻⁵³ n relative to norms, if they all add up."""

SURELY_ALIVE = 2.0**-18
"""If CholeskyQR leaves a larger share of a column, the column is alive for certain."""


class _Factors(ctypes.Structure):
    _fields_ = fields(void_p="A out exact", int64="count n r", double="enough most")


def orthogonalize(
    A: Sequence[Tensor], *, keys: Sequence[Tensor], step: int | Tensor, epsilon: float = 0.0, out: Sequence[Tensor]
) -> int | Tensor:
    """Do what ``orthogonalize_reference`` does for each group, on the CPU by CholeskyQR where that is exact enough.

    ``out`` must not be the memory of ``A``. On other devices the host would have to wait to know what is exact enough,
    and fp64 needs more time: these are left to the reference.
    """
    if not all(x.device.type == "cpu" and x.dtype == torch.float32 for x in (*A, *out)):
        each = zip(A, keys, out, strict=True)
        return sum(orthogonalize_reference(x, keys=k, step=step, epsilon=epsilon, out=basis) for x, k, basis in each)
    exact = cholesky_qr(A, epsilon, out=out)
    if exact.all():
        return 0
    zeroed: int | Tensor = 0
    for factors, own, basis, found in zip(A, keys, out, exact.split(list(map(len, A))), strict=True):
        (lost,) = (~found).nonzero(as_tuple=True)
        if len(lost):
            again = factors[lost]
            zeroed += orthogonalize_reference(again, keys=own[lost], step=step, epsilon=epsilon, out=again)
            basis[lost] = again
    return zeroed


def cholesky_qr(A: Sequence[Tensor], epsilon: float, *, out: Sequence[Tensor]) -> Tensor:
    """out = A R⁻¹ with RᵀR = AᵀA, for groups A [B, n, r] in fp32 on the CPU.

    Return whether each matrix is orthonormal, bool, one group after the other.

    All is computed in fp64. Rounding errors grow by the root of the squares of the terms of a new column, relative to
    its norm. Where that is large, ``basis.c`` decomposes once more what it has found. (Yamamoto, Nakatsukasa,
    Yanagisawa, Fukaya: "Roundoff error analysis of the CholeskyQR2 algorithm", ETNA 44, 2015.)
    """
    exact = torch.empty(sum(map(len, A)), dtype=torch.bool, device="cpu")
    groups, parts, code = [], exact.split(list(map(len, A))), library()
    # If the share of a column that is left is small, its terms are large.
    most = 1 / max(epsilon, SURELY_ALIVE)
    for factors, basis, part in zip(A, out, parts, strict=True):
        count, n, r = factors.shape
        # A sum of as many terms as columns is at most the root of the squares times the root of their number.
        enough = min(LARGEST_GROWTH, math.sqrt(LARGEST_ERROR * 2**53 / (r * n)))
        places = factors.data_ptr(), basis.data_ptr(), part.data_ptr()
        groups.append(_Factors(*places, count, n, r, enough, most))
    if code is not None and all(x.is_contiguous() for x in (*A, *out)):
        arguments = (_Factors * len(groups))(*groups), len(groups), torch.get_num_threads()
        if code.powersgd_orthogonalize(*arguments):
            return exact
    for factors, basis, part, group in zip(A, out, parts, groups, strict=True):
        part.copy_(_in_torch(factors, min(group.enough, most), basis))
    return exact


def _in_torch(A: Tensor, most: float, out: Tensor) -> Tensor:
    """out = A R⁻¹ for one group. Return whether the terms have grown by no more than ``most``, bool [B]."""
    X = A.double()
    gram, identity = torch.bmm(X.mT, X), torch.eye(A.shape[2], dtype=X.dtype, device=A.device)
    L, failed = torch.linalg.cholesky_ex(gram)
    inverse = torch.linalg.solve_triangular(L, identity, upper=False).mT
    out.copy_(torch.bmm(X, inverse))
    terms = gram.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(2) * inverse
    found: Tensor = (failed == 0) & (terms.norm(dim=1).amax(1) <= most)
    return found
