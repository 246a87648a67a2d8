"""Products of gradients and factors on the CPU in C, ``products.c`` and ``panels.c``.

Each function does for groups of matrices what the one in ``ops/reference.py`` does for one group, with its arguments.
Sums differ by rounding. What the library does not take is left to that function.
"""

import ctypes
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from powersgd_triton.ops.blocks import Matrices, blocks, dtypes_of, load, part, store
from powersgd_triton.ops.host import fields, library
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
    _fields_ = fields(void_p="G M left right basis out", int64="count n m k r", float="growth", int32="kind")


Stages = list[tuple[_Stage, object]]
"""Stages, each with what it points to."""


def compensate_project(
    G: Sequence[Matrices],
    M: Sequence[Matrices | None],
    pending: Sequence[Pending | None],
    Q: Sequence[Tensor],
    *,
    growth: Tensor | None = None,
    out: Sequence[Tensor],
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = P = M Q."""
    stages = Stages()
    for g, m, product, basis, P in zip(G, M, pending, Q, out, strict=True):
        product = _pending(m, product, basis)
        if not _add_compensation(stages, g, m, product, basis, growth, P):
            compensate_project_reference(g, m, product, basis, growth=growth, out=P)
    _run(stages)


def compensate_backproject(
    G: Sequence[Matrices],
    M: Sequence[Matrices | None],
    pending: Sequence[Pending | None],
    P: Sequence[Tensor],
    *,
    growth: Tensor | None = None,
    out: Sequence[Tensor],
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = Q = Mᵀ P."""
    stages, rest = Stages(), list[tuple[Matrices, Matrices, Tensor, Tensor | None, Tensor]]()
    for g, m, product, basis, Q in zip(G, M, pending, P, out, strict=True):
        if m is None:
            rest.append((g, g, basis, None, Q))
            continue
        product, rows = _pending(m, product, basis), basis.new_empty(*basis.shape[:2], 1)
        # A product by zeros says which rows of G are not finite.
        if _way(basis) > 0 and _add_compensation(stages, g, m, product, Q.new_zeros(*Q.shape[:2], 1), growth, rows):
            rest.append((g, m, basis, rows, Q))
        else:
            compensate_backproject_reference(g, m, product, basis, growth=growth, out=Q)
    _run(stages)
    backproject([m for _, m, *_ in rest], [basis for _, _, basis, *_ in rest], out=[Q for *_, Q in rest])
    for g, _, _, rows_of_g, Q in rest:
        if rows_of_g is not None and not math.isfinite(rows_of_g.sum()):
            for own, column in zip(g, Q, strict=True):
                column.add_((own - torch.where(own.isfinite(), own, 0)).sum(0).unsqueeze(1))


def backproject(M: Sequence[Matrices], P: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
    """out = Q = Mᵀ P."""
    stages = Stages()
    for matrices, basis, Q in zip(M, P, out, strict=True):
        if not _add(stages, BACKPROJECT, matrices, basis=basis, out=Q):
            backproject_reference(matrices, basis, out=Q)
    _run(stages)


def reconstruct(
    factors: Sequence[tuple[Tensor, Tensor]], *, out: Sequence[Matrices], verdict: Tensor | None = None
) -> None:
    """out = P Qᵀ for each pair of factors P, Q.

    ``verdict`` is a scalar that becomes 0 if an element of ``out`` is not finite. None skips this check.
    """
    stages = Stages()
    for (P, Q), matrices in zip(factors, out, strict=True):
        if not _add_reconstruction(stages, P, Q, matrices):
            reconstruct_reference(P, Q, out=matrices)
    _run(stages)
    for (P, Q), matrices in zip(factors, out, strict=True):
        if verdict is not None and maybe(verdict) and any(may_overflow(P, Q, dtype) for dtype in dtypes_of(matrices)):
            for written in [matrices] if isinstance(matrices, Tensor) else matrices:
                note_overflow(written, verdict)


def subtract_product(M: Matrices, P: Tensor, Q: Tensor, applied: bool | Tensor) -> None:
    """M ← M − P Qᵀ if ``applied`` is not 0, for one group."""
    if not _add(None, SUBTRACT, M, (P, Q, applied)):
        subtract_product_reference(M, P, Q, applied)


# The library computes the stages of several groups, which do not depend on each other, in one call. The functions that
# add them return False, without a change, if it does not take matrices or factors.


def _add(
    stages: Stages | None,
    kind: int,
    M: Matrices,
    product: Pending | None = None,
    *,
    G: Matrices | None = None,
    basis: Tensor | None = None,
    growth: Tensor | None = None,
    out: Tensor | None = None,
) -> bool:
    """Add a stage, or compute it at once if ``stages`` is None. G must be plain."""
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
    found = Stages() if stages is None else stages
    found.append((stage, (G_places, M_places, G, M, factors)))
    if stages is None:
        _run(found)
    return True


def _add_compensation(
    stages: Stages, G: Matrices, M: Matrices | None, sent: Pending | None, Q: Tensor, growth: Tensor | None, out: Tensor
) -> bool:
    """Add what ``compensate_project`` does for a group, or do it if G is not plain."""
    if M is None:
        return _add(stages, PROJECT, G, basis=Q, out=out)
    if _are_plain(G):
        return _add(stages, COMPENSATE, M, sent, G=G, basis=Q, growth=growth, out=out)
    if not _takes(M, *(sent or ())[:2], Q, out):
        return False
    for members, rows in blocks(M, torch.float32):
        block, product = part(M, members, rows) if isinstance(M, Tensor) else [x[rows] for x in M[members]], sent
        if sent is not None:
            product = part(sent[0], members, rows), part(sent[1], members), sent[2]
        g, P = [x.contiguous() for x in load(G, members, rows, torch.float32)], part(out, members, rows)
        _add(None, COMPENSATE, block, product, G=g, basis=part(Q, members), growth=growth, out=P)
    return True


def _add_reconstruction(stages: Stages, P: Tensor, Q: Tensor, out: Matrices) -> bool:
    """Add ``out`` = P Qᵀ, or write it if it is not plain."""
    if _add(stages, RECONSTRUCT, out, (P, Q, True)):
        return True
    if not _takes((), P, Q):
        return False
    # Rounded from the same bits, whatever the dtype.
    for members, rows in blocks(out, torch.float32):
        left, right = part(P, members, rows).contiguous(), part(Q, members)
        block = P.new_empty(*left.shape[:2], right.shape[1])
        _add(None, RECONSTRUCT, block, (left, right, True))
        store(block, out, members, rows)
    return True


def _run(stages: Stages) -> None:
    """Compute the stages that were added."""
    host, count = library(), len(stages)
    if count:
        assert host is not None
        host.powersgd_multiply((_Stage * count)(*(stage for stage, _ in stages)), count, torch.get_num_threads())


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


def _takes(M: Matrices, *factors: Tensor) -> bool:
    """Return whether the library takes matrices and factors."""
    most = most_columns()
    return most > 0 and all(x.shape[-1] <= most and _is_plain(x) for x in factors) and _are_plain(M)


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() and x.numel() > 0


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
