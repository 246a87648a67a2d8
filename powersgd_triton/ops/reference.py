"""The operations of one PowerSGD step in plain torch: the specification, and the operations of backend "torch"."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from powersgd_triton.layout.constants import HEADROOM
from powersgd_triton.ops.blocks import (
    Matrices,
    add_product,
    backproject,
    blocks,
    dtype_of,
    load,
    multiply,
    part,
    project,
    store,
)

Pending = tuple[Tensor, Tensor, bool | Tensor]
"""A product P Qᵀ of [B, n, k] and [B, m, k] still to be subtracted from M, and a scalar, 0 if it was never applied."""


def compensate_project_reference(
    G: Matrices, M: Matrices | None, pending: Pending | None, Q: Tensor, *, growth: Tensor | None = None, out: Tensor
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = P = M Q.

    Only the finite elements of G are added to M, but P contains all: a non-finite element makes its row of P
    non-finite.

    Args:
        G: Gradients, B of [n, m], any float dtype.
        M: Error buffers, B of [n, m], updated in place. None for M = G without error feedback.
        pending: P_prev, Q_prev, and whether their product was applied. None if there is no such product.
        Q: Basis [B, m, r].
        growth: Positive scalar by which the loss scale has grown since M was written. None for 1.
        out: P [B, n, r].
    """
    for members, rows, block, spoiled in _compensated(G, M, pending, growth, Q.dtype):
        P = part(out, members, rows)
        project(block, part(Q, members), P)
        if spoiled is not None:
            P.add_(spoiled.sum(-1, keepdim=True))


def compensate_backproject_reference(
    G: Matrices, M: Matrices | None, pending: Pending | None, P: Tensor, *, growth: Tensor | None = None, out: Tensor
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = Q = Mᵀ P. As ``compensate_project_reference``, from the left.

    P [B, n, r], out [B, m, r]. A non-finite element in column j of G makes row j of Q non-finite.
    """
    for members, rows, block, spoiled in _compensated(G, M, pending, growth, P.dtype):
        _collect(backproject(block, part(P, members, rows)), rows, part(out, members))
        if spoiled is not None:
            out[members] += spoiled.sum(-2).unsqueeze(2)


def _compensated(
    G: Matrices, M: Matrices | None, pending: Pending | None, growth: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
    """Update M block by block. Yield slices of matrices and rows, their M, and the non-finite part of G if any."""
    if growth is not None and on_host(growth) and growth == 1:
        growth = None
    subtracted = None if M is None or pending is None or not maybe(pending[2]) else _applied(*pending)
    for members, rows in blocks(G if M is None else M, dtype):
        if M is None:
            yield members, rows, load(G, members, rows, dtype), None
            continue
        block, G_block = load(M, members, rows, dtype), load(G, members, rows, dtype_of(G))
        # In this order, a run that loads E, as a checkpoint has it, goes on with the same bits.
        if subtracted is not None:
            P, Qt = subtracted
            add_product(block, part(P, members, rows), part(Qt, members), alpha=-1)
        if growth is not None:
            block.mul_(growth)
        spoiled = None
        if on_host(G_block) and math.isfinite(G_block.sum(dtype=dtype).item()):
            block.add_(G_block)
        else:
            finite = _finite_part(G_block)
            block.add_(finite)
            spoiled = G_block - finite
        store(block, M, members, rows)
        yield members, rows, block, spoiled


def backproject_reference(M: Matrices, P: Tensor, *, out: Tensor) -> None:
    """out = Q = Mᵀ P.  M: B of [n, m], P [B, n, r] orthonormal, out [B, m, r]."""
    for members, rows in blocks(M, P.dtype, once=True):
        block = load(M, members, rows, P.dtype)
        _collect(backproject(block, part(P, members, rows)), rows, part(out, members))


def _collect(contribution: Tensor, rows: slice, total: Tensor) -> None:
    """Add what some rows contribute to a product, transposed, from the first rows on."""
    if rows.start:
        total.add_(contribution.transpose(1, 2))
    else:
        total.copy_(contribution.transpose(1, 2))


def reconstruct_reference(P: Tensor, Q: Tensor, *, out: Matrices) -> None:
    """out = P Qᵀ.  P [B, n, r], Q [B, m, r], out: B of [n, m] in any float dtype, to which it is rounded once."""
    Qt = Q.transpose(1, 2)
    for members, rows in blocks(out, P.dtype):
        left, right = part(P, members, rows), part(Qt, members)
        block = part(out, members, rows) if isinstance(out, Tensor) else None
        # In a place that is not contiguous, torch would compute one matrix after the other.
        if block is None or block.dtype != P.dtype or not (len(block) == 1 or block.is_contiguous()):
            block = P.new_empty(left.shape[0], left.shape[1], right.shape[2])
        if P.shape[-1] == 1:
            multiply(left, right, out=block)
        else:
            # Zeros bring the block into the cache. The sum's bits do not depend on where it is computed.
            add_product(block.zero_(), left, right)
        store(block, out, members, rows)


def may_overflow(P: Tensor, Q: Tensor, dtype: torch.dtype) -> bool:
    """Return False only if the largest elements of P [..., n, r] and Q [..., m, r] rule out that P Qᵀ overflows.

    Non-finite factors may overflow too. On other devices than the CPU, the host would have to wait for the elements, so
    the result is True.
    """
    if not on_host(P):
        return True
    if not P.numel() or not Q.numel():
        return False
    bound = float(P.shape[-1])
    for factor in (P, Q):
        smallest, largest = torch.aminmax(factor)
        bound *= max(-float(smallest), float(largest))
    # Half of the range is left for rounding errors.
    return not bound < torch.finfo(dtype).max / 2


def note_overflow(written: Tensor, verdict: Tensor) -> None:
    """verdict ← 0 if an element of ``written`` is not finite."""
    if written.numel() and maybe(verdict):
        # This takes one pass. If an element is NaN, the smallest and the largest are NaN.
        smallest, largest = torch.aminmax(written)
        verdict.mul_(smallest.isfinite() & largest.isfinite())


def subtract_product_reference(M: Matrices, P: Tensor, Q: Tensor, applied: bool | Tensor) -> None:
    """M ← M − P Qᵀ if ``applied`` is not 0: the subtraction that lazy error feedback has deferred."""
    if not maybe(applied):
        return
    P, Qt = _applied(P, Q, applied)
    for members, rows in blocks(M, P.dtype, once=True):
        block = load(M, members, rows, P.dtype)
        add_product(block, part(P, members, rows), part(Qt, members), alpha=-1)
        store(block, M, members, rows)


def _applied(P: Tensor, Q: Tensor, applied: bool | Tensor) -> tuple[Tensor, Tensor]:
    """Return P and Qᵀ, or zeros if ``applied`` is 0. On the host it is known not to be 0."""
    if isinstance(applied, Tensor) and not on_host(applied):
        P, Q = torch.where(applied > 0, P, 0), torch.where(applied > 0, Q, 0)
    return P, Q.transpose(1, 2)


def rollback_reference(G: Matrices, M: Matrices, finite: Tensor) -> None:
    """M ← M − (finite elements of G) if the scalar ``finite`` is 0: undo what compensating added.

    An element whose sum overflowed is lost and becomes 0. Others are clamped to ``largest_error``.
    """
    if on_host(finite) and finite:
        return
    dtype = torch.promote_types(torch.promote_types(dtype_of(M), dtype_of(G)), torch.float32)
    largest = largest_error(dtype)
    for members, rows in blocks(M, dtype):
        kept = load(M, members, rows, dtype_of(M))
        rest = _finite_part(kept.to(dtype) - _finite_part(load(G, members, rows, dtype_of(G))))
        store(torch.where(finite > 0, kept, rest.clamp_(-largest, largest)), M, members, rows)


def largest_error(dtype: torch.dtype) -> float:
    """Return the largest element that an error may keep after a step that was not finite."""
    return HEADROOM * torch.finfo(dtype).max


def _finite_part(G: Tensor) -> Tensor:
    return torch.where(G.isfinite(), G, 0)


def on_host(tensor: Tensor) -> bool:
    """Return whether the host decides, since it need not wait for a device. Elsewhere decisions are masks."""
    return tensor.device.type == "cpu"


def known(flag: Tensor) -> bool:
    """Return whether a flag is known to be set without waiting for a device."""
    return on_host(flag) and bool(flag)


def maybe(flag: bool | Tensor) -> bool:
    """Return False only if the flag is known to be 0 without waiting for a device."""
    return bool(flag) if isinstance(flag, bool) or on_host(flag) else True
