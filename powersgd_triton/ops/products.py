"""Products of gradients and factors on the CPU in C, ``products.c`` and ``panels.c``.

Each function does what the one in ``ops/reference.py`` does, with its arguments. Sums differ by rounding. What the
library does not take is left to that function.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from powersgd_triton.ops.blocks import Matrices, blocks, dtypes_of, load, part, store
from powersgd_triton.ops.host import library
from powersgd_triton.ops.reference import (
    Pending,
    backproject_reference,
    compensate_backproject_reference,
    compensate_project_reference,
    may_overflow,
    maybe,
    note_overflow,
    reconstruct_reference,
    subtract_product_reference,
)

PROJECT, COMPENSATE, SUBTRACT, RECONSTRUCT, BACKPROJECT = range(5)

FEW = 8
"""Columns of a factor up to which ``products.c`` multiplies by it; ``panels.c`` does by those of more."""


class _Stage(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("G", "M", "left", "right", "basis", "out")),
        *((name, ctypes.c_int64) for name in ("count", "n", "m", "k", "r")),
        ("growth", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


def compensate_project(
    G: Matrices, M: Matrices | None, pending: Pending | None, Q: Tensor, *, growth: Tensor | None = None, out: Tensor
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = P = M Q."""
    pending = _pending(M, pending, Q)
    done = _multiply(PROJECT, G, basis=Q, out=out) if M is None else _compensate(G, M, pending, Q, growth, out)
    if not done:
        compensate_project_reference(G, M, pending, Q, growth=growth, out=out)


def compensate_backproject(
    G: Matrices, M: Matrices | None, pending: Pending | None, P: Tensor, *, growth: Tensor | None = None, out: Tensor
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = Q = Mᵀ P."""
    pending, rows = _pending(M, pending, P), P.new_empty(*P.shape[:2], 1)
    if M is None:
        backproject(G, P, out=out)
    # A product by zeros says which rows of G are not finite.
    elif _way(P) > 0 and _compensate(G, M, pending, out.new_zeros(*out.shape[:2], 1), growth, rows):
        backproject(M, P, out=out)
        if not math.isfinite(rows.sum()):
            for g, Q in zip(G, out, strict=True):
                Q.add_((g - torch.where(g.isfinite(), g, 0)).sum(0).unsqueeze(1))
    else:
        compensate_backproject_reference(G, M, pending, P, growth=growth, out=out)


def backproject(M: Matrices, P: Tensor, *, out: Tensor) -> None:
    """out = Q = Mᵀ P."""
    if not _multiply(BACKPROJECT, M, basis=P, out=out):
        backproject_reference(M, P, out=out)


def reconstruct(P: Tensor, Q: Tensor, *, out: Matrices, verdict: Tensor | None = None) -> None:
    """out = P Qᵀ. ``verdict`` becomes 0 if an element is not finite."""
    if not _takes((), P, Q):
        reconstruct_reference(P, Q, out=out, verdict=verdict)
        return
    if not _multiply(RECONSTRUCT, out, (P, Q, True)):
        # Rounded from the same bits, whatever the dtype.
        for members, rows in blocks(out, torch.float32):
            left, right = part(P, members, rows).contiguous(), part(Q, members)
            block = P.new_empty(*left.shape[:2], right.shape[1])
            _multiply(RECONSTRUCT, block, (left, right, True))
            store(block, out, members, rows)
    if verdict is not None and maybe(verdict) and any(may_overflow(P, Q, dtype) for dtype in dtypes_of(out)):
        for matrix in out:
            note_overflow(matrix, verdict)


def subtract_product(M: Matrices, P: Tensor, Q: Tensor, applied: bool | Tensor) -> None:
    """M ← M − P Qᵀ if ``applied`` is not 0."""
    if not _multiply(SUBTRACT, M, (P, Q, applied)):
        subtract_product_reference(M, P, Q, applied)


def _compensate(
    G: Matrices, M: Matrices, pending: Pending | None, Q: Tensor, growth: Tensor | None, out: Tensor
) -> bool:
    """Do what ``compensate_project`` does. Return False, without a change, if the library does not take it."""
    if _are_plain(G):
        return _multiply(COMPENSATE, M, pending, G=G, basis=Q, growth=growth, out=out)
    if not _takes(M, *(pending or ())[:2], Q, out):
        return False
    for members, rows in blocks(M, torch.float32):
        block, product = part(M, members, rows) if isinstance(M, Tensor) else [x[rows] for x in M[members]], pending
        if pending is not None:
            product = part(pending[0], members, rows), part(pending[1], members), pending[2]
        g, P = [x.contiguous() for x in load(G, members, rows, torch.float32)], part(out, members, rows)
        _multiply(COMPENSATE, block, product, G=g, basis=part(Q, members), growth=growth, out=P)
    return True


def _pending(M: Matrices | None, pending: Pending | None, basis: Tensor) -> Pending | None:
    """Return what is to be subtracted from M in the pass of the next product, and subtract what is not.

    It is not if other functions compute the two. Where a product is computed then does not depend on the product before
    it: a run that goes on from a saved error has the same bits.
    """
    if M is None or pending is None or _way(pending[0]) == _way(basis):
        return pending
    subtract_product(M, *pending)
    return None


def _way(factor: Tensor) -> int:
    """Return who multiplies by a factor: FEW for ``products.c``, the most columns for ``panels.c``, 0 for torch."""
    columns, most = factor.shape[-1], most_columns()
    return 0 if columns > most else FEW if columns <= FEW else most


@functools.cache
def most_columns() -> int:
    """Return the number of columns of factors up to which the library takes less time than torch's, 0 without it."""
    function = getattr(library(), "powersgd_most_columns", None)
    return 0 if function is None else function()


def _multiply(
    kind: int,
    M: Matrices,
    product: Pending | None = None,
    *,
    G: Matrices | None = None,
    basis: Tensor | None = None,
    growth: Tensor | None = None,
    out: Tensor | None = None,
) -> bool:
    """Return False, without a change, if the library does not take M and factors. G must be plain."""
    left, right = (None, None) if product is None or not maybe(product[2]) else product[:2]
    factors = left, right, basis, out
    if not _takes(M, *(x for x in factors if x is not None)):
        return False
    G_places, M_places = None if G is None else _places(G), _places(M)
    n, m = M.shape[1:] if isinstance(M, Tensor) else M[0].shape
    stage = _Stage(
        None if G_places is None else ctypes.addressof(G_places),
        ctypes.addressof(M_places),
        *(None if x is None else x.data_ptr() for x in factors),
        *(len(M_places), n, m, 0 if left is None else left.shape[-1], 0 if out is None else out.shape[-1]),
        1.0 if growth is None else growth.item(),
        kind,
    )
    host = library()
    assert host is not None
    host.powersgd_multiply(ctypes.byref(stage), torch.get_num_threads())
    return True


def _takes(M: Matrices, *factors: Tensor) -> bool:
    """Return whether the library takes matrices and factors."""
    return most_columns() > 0 and all(_way(x) > 0 and _is_plain(x) for x in factors) and _are_plain(M)


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0


def _are_plain(matrices: Matrices) -> bool:
    """The same for matrices, which may lie at any distance."""
    if not isinstance(matrices, Tensor):
        return all(map(_is_plain, matrices))
    plain = matrices.dtype == torch.float32 and matrices.numel() > 0
    return plain and matrices.stride()[1:] == (matrices.shape[2], 1)


def _places(matrices: Matrices) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of matrices."""
    if not isinstance(matrices, Tensor):
        return (ctypes.c_void_p * len(matrices))(*(matrix.data_ptr() for matrix in matrices))
    count, first, distance = matrices.shape[0], matrices.data_ptr(), 4 * matrices.stride(0)
    return (ctypes.c_void_p * count)(*(first + distance * i for i in range(count)))
