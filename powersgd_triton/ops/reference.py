"""The operations of one PowerSGD step in plain torch: the specification, and the operations of backend "torch"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from powersgd_triton.layout.constants import HEADROOM
from powersgd_triton.ops.blocks import add_product, blocks, multiply, product, warm

Matrices = Sequence[Tensor]
"""B matrices [n, m]."""

Pending = tuple[Tensor, Tensor, Tensor]
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
    Qt = Q.mT.contiguous()
    for members, rows, block, spoiled in _compensated(G, M, pending, growth, Q):
        P = out[members, rows]
        multiply(block, Qt[members].mT, out=P)
        if spoiled is not None:
            P.add_(spoiled.sum(-1, keepdim=True))


def compensate_backproject_reference(
    G: Matrices, M: Matrices | None, pending: Pending | None, P: Tensor, *, growth: Tensor | None = None, out: Tensor
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = Q = Mᵀ P. As ``compensate_project_reference``, from the left.

    P [B, n, r], out [B, m, r]. A non-finite element in column j of G makes row j of Q non-finite.
    """
    Qt = torch.zeros_like(out.mT, memory_format=torch.contiguous_format)
    for members, rows, block, spoiled in _compensated(G, M, pending, growth, P):
        add_product(Qt[members], P[members, rows].mT, block)
        if spoiled is not None:
            Qt[members] += spoiled.sum(-2, keepdim=True)
    out.copy_(Qt.mT)


def _compensated(
    G: Matrices, M: Matrices | None, pending: Pending | None, growth: Tensor | None, basis: Tensor
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
    """Update M block by block. Yield slices of matrices and rows, their M, and the non-finite part of G if any."""
    subtracted = None if M is None or pending is None or not _maybe(pending[2]) else _applied(*pending)
    if growth is not None and _on_host(growth) and growth == 1:
        growth = None
    for members, rows, (G_block, M_block) in blocks(basis.shape[-1], G, G if M is None else M):
        if M is None:
            yield members, rows, G_block.to(basis.dtype), None
            continue
        block = M_block.to(basis.dtype)
        if subtracted is not None:
            P, Qt = subtracted
            # With one column the product takes no longer than reading the block.
            if Qt.shape[1] > 1:
                warm(block)
            add_product(block, P[members, rows], Qt[members], alpha=-1)
        if growth is not None:
            block.mul_(growth)
        spoiled = None
        if _on_host(G_block) and math.isfinite(G_block.sum(dtype=basis.dtype).item()):
            block.add_(G_block)
        else:
            finite = _finite_part(G_block)
            block.add_(finite)
            spoiled = G_block - finite
        if block.dtype != M_block.dtype:
            M_block.copy_(block)
        yield members, rows, block, spoiled


def backproject_reference(M: Matrices, P: Tensor, *, out: Tensor) -> None:
    """out = Q = Mᵀ P.  M: B of [n, m], P [B, n, r] orthonormal, out [B, m, r]."""
    Qt = torch.zeros_like(out.mT, memory_format=torch.contiguous_format)
    # A product over long rows with few columns runs on one thread. Split it into as many products as there are threads.
    parts = torch.get_num_threads() if _on_host(P) else 1
    for members, rows, (M_block,) in blocks(P.shape[-1], M):
        left, right = P[members, rows].mT, M_block.to(P.dtype)
        warm(right)
        height = right.shape[1] // parts
        if len(right) == 1 < parts and height:
            split = parts * height
            partial = left[0, :, :split].unflatten(1, (parts, height)).transpose(0, 1)
            Qt[members] += product(partial, right[0, :split].unflatten(0, (parts, height))).sum(dim=0)
            left, right = left[:, :, split:], right[:, split:]
        if right.shape[1]:
            add_product(Qt[members], left, right)
    out.copy_(Qt.mT)


def reconstruct_reference(P: Tensor, Q: Tensor, *, out: Matrices, verdict: Tensor | None = None) -> None:
    """out = P Qᵀ.  P [B, n, r], Q [B, m, r], out: B of [n, m] in any float dtype, to which it is rounded once.

    ``verdict`` is a scalar that becomes 0 if an element of ``out`` is not finite. None skips this check.
    """
    Qt = Q.mT.contiguous()
    look = verdict is not None and _maybe(verdict) and may_overflow(P, Q, out[0].dtype)
    for members, rows, (block,) in blocks(P.shape[-1], out):
        if block.dtype == P.dtype and P.shape[-1] == 1:
            multiply(P[members, rows], Qt[members], out=block)
        elif block.dtype == P.dtype:
            # With several columns, zeroing the block and adding the product takes less time than the product alone.
            add_product(block.zero_(), P[members, rows], Qt[members])
        else:
            block.copy_(product(P[members, rows], Qt[members]))
        if look and verdict is not None:
            note_overflow(block, verdict)


def may_overflow(P: Tensor, Q: Tensor, dtype: torch.dtype) -> bool:
    """Return False only if the largest elements of P [..., n, r] and Q [..., m, r] rule out that P Qᵀ overflows.

    Non-finite factors may overflow too. On other devices than the CPU, the host would have to wait for the elements, so
    the result is True.
    """
    if not _on_host(P):
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
    if written.numel() and _maybe(verdict):
        # This takes one pass. If an element is NaN, the smallest and the largest are NaN.
        smallest, largest = torch.aminmax(written)
        verdict.mul_(smallest.isfinite() & largest.isfinite())


def subtract_product_reference(M: Matrices, P: Tensor, Q: Tensor, applied: Tensor) -> None:
    """M ← M − P Qᵀ if ``applied`` is not 0: the subtraction that lazy error feedback has deferred."""
    if not _maybe(applied):
        return
    P, Qt = _applied(P, Q, applied)
    for members, rows, (M_block,) in blocks(P.shape[-1], M):
        block = M_block.to(P.dtype)
        add_product(block, P[members, rows], Qt[members], alpha=-1)
        if block.dtype != M_block.dtype:
            M_block.copy_(block)


def _applied(P: Tensor, Q: Tensor, applied: Tensor) -> tuple[Tensor, Tensor]:
    """Return P and Qᵀ, or zeros if ``applied`` is 0. On the host it is known not to be 0."""
    if not _on_host(applied):
        P, Q = torch.where(applied > 0, P, 0), torch.where(applied > 0, Q, 0)
    return P, Q.mT.contiguous()


def rollback_reference(G: Matrices, M: Matrices, finite: Tensor) -> None:
    """M ← M − (finite elements of G) if the scalar ``finite`` is 0: undo what compensating added.

    An element whose sum overflowed is lost and becomes 0. Others are clamped to ``largest_error``.
    """
    if _on_host(finite) and finite:
        return
    for _, _, (G_block, M_block) in blocks(2, G, M):
        rest = M_block.to(torch.promote_types(M_block.dtype, torch.float32)) - _finite_part(G_block)
        largest = largest_error(rest.dtype)
        M_block.copy_(torch.where(finite > 0, M_block, _finite_part(rest).clamp_(-largest, largest)))


def largest_error(dtype: torch.dtype) -> float:
    """Return the largest element that an error may keep after a step that was not finite."""
    return HEADROOM * torch.finfo(dtype).max


def _finite_part(G: Tensor) -> Tensor:
    return torch.where(G.isfinite(), G, 0)


def _on_host(tensor: Tensor) -> bool:
    """Return whether the host decides, since it need not wait for a device. Elsewhere decisions are masks."""
    return tensor.device.type == "cpu"


def _maybe(flag: Tensor) -> bool:
    """Return False only if the flag is known to be 0 without waiting for a device."""
    return not _on_host(flag) or bool(flag)
