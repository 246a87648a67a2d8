"""Orthonormal bases on the CPU: by CholeskyQR in C, ``bases.c``, or by Householder QR where that is too inexact."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from powersgd_triton.ops.host import library
from powersgd_triton.ops.orthogonalize import orthogonalize_reference

LARGEST_GROWTH = 1e4
"""CholeskyQR with Gram matrices in fp64 is exact enough if the root of the squares of the terms of each new column is
at most so many times its norm. Inner products are then wrong by the square of this times 2⁻⁵³: 1e-8."""

LARGEST_ERROR = 6e-4
"""The same for the errors of n terms, 2⁻⁵³ n relative to norms, if they all add up."""

SURELY_ALIVE = 2.0**-18
"""If CholeskyQR leaves a larger share of a column, the column is alive for certain."""


class _Factors(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("A", "out", "exact")),
        *((name, ctypes.c_int64) for name in ("count", "n", "r")),
        *((name, ctypes.c_double) for name in ("enough", "most")),
    )


def orthogonalize(A: Tensor, *, keys: Tensor, step: int | Tensor, epsilon: float = 0.0, out: Tensor) -> int | Tensor:
    """Do what ``orthogonalize_reference`` does, on the CPU by CholeskyQR where that is exact enough.

    ``out`` must not be the memory of ``A``. On other devices the host would have to wait to know what is exact enough,
    and fp64 needs more time: these are left to the reference.
    """
    if A.device.type != "cpu" or A.dtype != torch.float32 or out.dtype != torch.float32:
        return orthogonalize_reference(A, keys=keys, step=step, epsilon=epsilon, out=out)
    (lost,) = (~cholesky_qr(A, epsilon, out=out)).nonzero(as_tuple=True)
    if not len(lost):
        return 0
    basis = A[lost]
    zeroed = orthogonalize_reference(basis, keys=keys[lost], step=step, epsilon=epsilon, out=basis)
    out[lost] = basis
    return zeroed


def cholesky_qr(A: Tensor, epsilon: float, *, out: Tensor) -> Tensor:
    """out = A R⁻¹ with RᵀR = AᵀA, for A [B, n, r] in fp32 on the CPU. Return whether it is orthonormal, bool [B].

    All is computed in fp64. Rounding errors grow by the root of the squares of the terms of a new column, relative to
    its norm. Where that is large, ``bases.c`` decomposes once more what it has found. (Yamamoto, Nakatsukasa,
    Yanagisawa, Fukaya: "Roundoff error analysis of the CholeskyQR2 algorithm", ETNA 44, 2015.)
    """
    (count, n, r), function = A.shape, getattr(library(), "powersgd_orthogonalize", None)
    # A sum of as many terms as columns is at most the root of the squares times the root of their number.
    enough = min(LARGEST_GROWTH, math.sqrt(LARGEST_ERROR * 2**53 / (r * n)))
    # If the share of a column that is left is small, its terms are large.
    most = 1 / max(epsilon, SURELY_ALIVE)
    if function is not None and A.is_contiguous() and out.is_contiguous():
        exact = torch.empty(count, dtype=torch.bool, device=A.device)
        places = A.data_ptr(), out.data_ptr(), exact.data_ptr()
        factors = _Factors(*places, count, n, r, enough, most)
        if function(ctypes.byref(factors), torch.get_num_threads()):
            return exact
    X = A.double()
    gram, identity = torch.bmm(X.mT, X), torch.eye(r, dtype=X.dtype, device=A.device)
    L, failed = torch.linalg.cholesky_ex(gram)
    inverse = torch.linalg.solve_triangular(L, identity, upper=False).mT
    out.copy_(torch.bmm(X, inverse))
    terms = gram.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(2) * inverse
    found: Tensor = (failed == 0) & (terms.norm(dim=1).amax(1) <= min(enough, most))
    return found
