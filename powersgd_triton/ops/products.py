"""Products of gradients and factors of few columns on the CPU in C, ``products.c``.

Each function does what the one in ``ops/reference.py`` does, with its arguments. Sums differ by rounding. What the
library does not take is left to that function.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from powersgd_triton.ops.blocks import Matrices
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

MOST_COLUMNS, MOST_TO_BACKPROJECT = 8, 16
"""Columns of factors up to which the library takes less time than torch's."""


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
    if M is None:
        done = _multiply(PROJECT, G, basis=Q, out=out)
    else:
        done = _multiply(COMPENSATE, M, pending, G=G, basis=Q, growth=growth, out=out)
    if not done:
        compensate_project_reference(G, M, _still_pending(M, pending), Q, growth=growth, out=out)


def compensate_backproject(
    G: Matrices, M: Matrices | None, pending: Pending | None, P: Tensor, *, growth: Tensor | None = None, out: Tensor
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = Q = Mᵀ P."""
    if M is not None or not _multiply(BACKPROJECT, G, basis=P, out=out):
        compensate_backproject_reference(G, M, _still_pending(M, pending), P, growth=growth, out=out)


def backproject(M: Matrices, P: Tensor, *, out: Tensor) -> None:
    """out = Q = Mᵀ P."""
    if not _multiply(BACKPROJECT, M, basis=P, out=out):
        backproject_reference(M, P, out=out)


def reconstruct(P: Tensor, Q: Tensor, *, out: Matrices, verdict: Tensor | None = None) -> None:
    """out = P Qᵀ. ``verdict`` becomes 0 if an element is not finite."""
    if not _multiply(RECONSTRUCT, out, (P, Q, True)):
        reconstruct_reference(P, Q, out=out, verdict=verdict)
    elif verdict is not None and maybe(verdict) and may_overflow(P, Q, torch.float32):
        for matrix in out:
            note_overflow(matrix, verdict)


def subtract_product(M: Matrices, P: Tensor, Q: Tensor, applied: bool | Tensor) -> None:
    """M ← M − P Qᵀ if ``applied`` is not 0."""
    if _still_pending(M, (P, Q, applied)):
        subtract_product_reference(M, P, Q, applied)


def _still_pending(M: Matrices | None, pending: Pending | None) -> Pending | None:
    """Subtract a product from M. It has the same bits, whatever else the library takes. Return it if it does not."""
    return None if M is None or pending is None or _multiply(SUBTRACT, M, pending) else pending


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
    """Return False, without a change, if the library does not take these tensors."""
    multiply = getattr(library(), "powersgd_multiply", None)
    left, right = (None, None) if product is None or not maybe(product[2]) else product[:2]
    factors, most = (left, right, basis, out), MOST_TO_BACKPROJECT if kind == BACKPROJECT else MOST_COLUMNS
    if multiply is None or not all(x is None or (x.shape[-1] <= most and _is_plain(x)) for x in factors):
        return False
    places = [None if x is None else _places(x) for x in (G, M)]
    if places[1] is None or (G is not None and places[0] is None):
        return False
    n, m = M.shape[1:] if isinstance(M, Tensor) else M[0].shape
    stage = _Stage(
        *(None if x is None else ctypes.addressof(x) for x in places),
        *(None if x is None else x.data_ptr() for x in factors),
        *(len(places[1]), n, m, 0 if left is None else left.shape[-1], 0 if out is None else out.shape[-1]),
        1.0 if growth is None else growth.item(),
        kind,
    )
    multiply(ctypes.byref(stage), torch.get_num_threads())
    return True


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0


def _places(matrices: Matrices) -> ctypes.Array[ctypes.c_void_p] | None:
    """Return the addresses of matrices, which may lie at any distance. None if the library does not take them."""
    if isinstance(matrices, Tensor):
        (count, _, m), (distance, *strides), first = matrices.shape, matrices.stride(), matrices.data_ptr()
        if strides != [m, 1] or matrices.dtype != torch.float32 or not matrices.numel():
            return None
        return (ctypes.c_void_p * count)(*(first + 4 * distance * i for i in range(count)))
    if not all(map(_is_plain, matrices)):
        return None
    return (ctypes.c_void_p * len(matrices))(*(matrix.data_ptr() for matrix in matrices))
