"""The operations of one PowerSGD step in plain torch: the specification, and the operations of backend "torch".

Matrices are processed in blocks that stay in cache. A step reads and writes the gradient's bytes about five times, or
four times in the alternating algorithm. On the CPU, the host makes decisions. On other devices decisions are masks, so
that the host never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from powersgd_triton.ops.blocks import add_product, blocks, multiply, product, warm

DEAD_COLUMN = 2.0**-22
"""If projection leaves a smaller share of a column of fp32 values than this, what is left is rounding error."""

PASSES = 4
"""Decompositions after which no further column of a factor is found to be dead. Nearly always the first one finds all.
What is not found then is no loss: such a column is kept, and the basis is orthonormal with it."""

ORTHONORMAL = 1e-3
"""Largest element that |P̂ᵀP̂ − I| may have. Rounding leaves less than 1e-5, dependent columns about 1. At this bound,
the sum over 256 columns is a quarter: no average is enlarged by more than that."""

HEADROOM = 2.0**-18
"""Share of the largest number that an error may keep after a step that was not finite: 2¹¹⁰ in fp32. A product of such
an n × m error with orthonormal columns is at most √n · 2¹¹⁰, so its sum over W workers fits if W √n < 2¹⁷."""


def compensate_project_reference(
    G: Sequence[Tensor],
    M: Sequence[Tensor] | None,
    P_prev: Tensor,
    Q_prev: Tensor,
    applied: Tensor | None,
    Q: Tensor,
    *,
    growth: Tensor | None = None,
    out: Tensor,
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = P = M Q.

    Only the finite elements of G are added to M, but P contains all: a non-finite element makes its row of P
    non-finite.

    Args:
        G: Gradients, B of [n, m], any float dtype.
        M: Error buffers, B of [n, m], updated in place. None for M = G without error feedback.
        P_prev, Q_prev: Product that is still to be subtracted from M, [B, n, k] and [B, m, k].
        applied: Scalar, 0 if that product was never applied. None if there is no such product.
        Q: Basis [B, m, r].
        growth: Positive scalar by which the loss scale has grown since M was written. None for 1.
        out: P [B, n, r].
    """
    Qt = Q.mT.contiguous()
    for members, rows, block, spoiled in _compensated(G, M, P_prev, Q_prev, applied, growth, Q):
        P = out[members, rows]
        multiply(block, Qt[members].mT, out=P)
        if spoiled is not None:
            P.add_(spoiled.sum(-1, keepdim=True))


def compensate_backproject_reference(
    G: Sequence[Tensor],
    M: Sequence[Tensor] | None,
    P_prev: Tensor,
    Q_prev: Tensor,
    applied: Tensor | None,
    P: Tensor,
    *,
    growth: Tensor | None = None,
    out: Tensor,
) -> None:
    """M ← G + growth · (M − P_prev Q_prevᵀ), out = Q = Mᵀ P. As ``compensate_project_reference``, from the left.

    P is the basis [B, n, r], ``out`` is Q [B, m, r]. A non-finite element in column j of G makes row j of Q non-finite.
    """
    Qt = torch.zeros_like(out.mT, memory_format=torch.contiguous_format)
    for members, rows, block, spoiled in _compensated(G, M, P_prev, Q_prev, applied, growth, P):
        add_product(Qt[members], P[members, rows].mT, block)
        if spoiled is not None:
            Qt[members] += spoiled.sum(-2, keepdim=True)
    out.copy_(Qt.mT)


def _compensated(
    G: Sequence[Tensor],
    M: Sequence[Tensor] | None,
    P_prev: Tensor,
    Q_prev: Tensor,
    applied: Tensor | None,
    growth: Tensor | None,
    basis: Tensor,
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
    """Update M block by block. Yield slices of matrices and rows, their M, and the non-finite part of G if any."""
    Qt_prev = None
    if M is not None and applied is not None and _maybe(applied):
        if not _on_host(applied):
            P_prev, Q_prev = torch.where(applied > 0, P_prev, 0), torch.where(applied > 0, Q_prev, 0)
        Qt_prev = Q_prev.mT.contiguous()
    if growth is not None and _on_host(growth) and growth == 1:
        growth = None
    for members, rows, (G_block, M_block) in blocks(basis.shape[-1], G, G if M is None else M):
        if M is None:
            yield members, rows, G_block.to(basis.dtype), None
            continue
        block = M_block.to(basis.dtype)
        if Qt_prev is not None:
            # With one column the product takes no longer than reading the block.
            if Qt_prev.shape[1] > 1:
                warm(block)
            add_product(block, P_prev[members, rows], Qt_prev[members], alpha=-1)
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


def backproject_reference(M: Sequence[Tensor], P: Tensor, *, out: Tensor) -> None:
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


def reconstruct_reference(P: Tensor, Q: Tensor, *, out: Sequence[Tensor], verdict: Tensor | None = None) -> None:
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
    """Return whether P Qᵀ, for P [..., n, r] and Q [..., m, r], may have elements that do not fit a dtype.

    On the CPU, the result is False only if the largest elements of the factors rule that out. On other devices it is
    always True, since the host would have to wait for these elements. Non-finite factors may overflow too.
    """
    if not _on_host(P) or not P.numel() or not Q.numel():
        return not _on_host(P)
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


def subtract_product_reference(M: Sequence[Tensor], P: Tensor, Q: Tensor, applied: Tensor) -> None:
    """M ← M − P Qᵀ if ``applied`` is not 0: the subtraction that lazy error feedback has deferred."""
    if not _maybe(applied):
        return
    P, Q = torch.where(applied > 0, P, 0), torch.where(applied > 0, Q, 0)
    Qt = Q.mT.contiguous()
    for members, rows, (M_block,) in blocks(P.shape[-1], M):
        block = M_block.to(P.dtype)
        add_product(block, P[members, rows], Qt[members], alpha=-1)
        if block.dtype != M_block.dtype:
            M_block.copy_(block)


def rollback_reference(G: Sequence[Tensor], M: Sequence[Tensor], finite: Tensor) -> None:
    """M ← M − (finite elements of G) if the scalar ``finite`` is 0: undo what compensating added.

    An element whose sum overflowed cannot be restored. It becomes 0, and other elements are clamped to
    ``largest_error``, so that their products do not make every later step overflow.
    """
    if _on_host(finite) and finite:
        return
    for _, _, (G_block, M_block) in blocks(2, G, M):
        rest = M_block.to(torch.promote_types(M_block.dtype, torch.float32)) - _finite_part(G_block)
        largest = largest_error(rest.dtype)
        M_block.copy_(torch.where(finite > 0, M_block, _finite_part(rest).clamp_(-largest, largest)))


def largest_error(dtype: torch.dtype) -> float:
    """Return the largest element that an error may keep after a step that was not finite, see HEADROOM."""
    return HEADROOM * torch.finfo(dtype).max


def orthogonalize_reference(
    A: Tensor, *, keys: Tensor, step: int | Tensor, epsilon: float = 0.0, out: Tensor
) -> Tensor:
    """Orthonormal basis of A's columns, in their order: Gram–Schmidt as Householder QR in fp64.

    Dead columns are replaced first, see ``replace_dead_columns``. A finite A gives a finite, orthonormal result, whose
    span contains A's columns up to what is dead. A non-finite A gives a finite result.

    Args:
        A: [B, n, r] with r ≤ n, fp32 or fp64.
        keys: [B] int64, a number for each matrix.
        step: Number of the step, also as an int64 scalar on the device.
        epsilon: Share of its norm up to which a column is dead, if that is more than 2⁻²².
        out: [B, n, r]. It may be A.

    Returns:
        Number of columns that are zero since they would not be orthonormal, an int64 scalar; see ``householder_qr``.
    """
    basis, zeroed = householder_qr(replace_dead_columns(A, keys=keys, step=step, epsilon=epsilon))
    out.copy_(basis)
    return zeroed


def householder_qr(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q with X = Q R, for X [B, n, r] in fp64 and R with a positive diagonal, and a number of columns.

    Q is orthonormal for any finite X (Higham: "Accuracy and Stability of Numerical Algorithms", theorem 19.4). If that
    is not so after all, the columns concerned are zero, and their number, an int64 scalar, is not 0. Then nothing of
    them is sent, and the error keeps it.
    """
    Q, R = torch.linalg.qr(X)
    Q = torch.where(R.diagonal(dim1=-2, dim2=-1).unsqueeze(1) < 0, -Q, Q)
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    orthonormal = (torch.bmm(Q.mT, Q) - identity).abs().amax(dim=1) <= ORTHONORMAL
    return torch.where(orthonormal.unsqueeze(1), Q, 0), (~orthonormal).sum()


def replace_dead_columns(A: Tensor, *, keys: Tensor, step: int | Tensor, epsilon: float = 0.0) -> Tensor:
    """Return A's columns in fp64, scaled if they were fp64 before, with random directions in the place of dead ones.

    A column is dead if at most max(epsilon, 2⁻²²) of its norm is left after projecting out the columns before it that
    are not dead, or if it is not finite. The random directions are a function of (key, step).

    In X = Q R, |R_jj| is what is left of column j after projecting out all columns before it. These may include dead
    ones, which must not count. So a column is dead for certain only if it has no larger part in the directions of other
    columns that seem dead. Then it is moved behind all others, and R is decomposed again. Whatever the condition of X,
    a column of Q R is that of X up to rounding of this column (Higham, theorem 19.4). So rounding loses no direction.
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
    for _ in range(PASSES):
        little = max(epsilon, DEAD_COLUMN) * norms.gather(1, order)
        weak = R.diagonal(dim1=-2, dim2=-1).abs() <= little
        certain = weak & (torch.where(weak.unsqueeze(2), R, 0).norm(dim=1) <= little)
        if _on_host(R) and not (certain & ~dead.gather(1, order)).any():
            break
        dead = dead.scatter(1, order, dead.gather(1, order) | certain)
        later = torch.argsort(dead.gather(1, order).byte(), dim=1, stable=True)
        R = torch.linalg.qr(R.gather(2, later.unsqueeze(1).expand_as(R)), mode="r").R
        order = order.gather(1, later)
    # The random numbers take longer than the rest, so the host draws only those that are needed.
    columns = dead.any(dim=0).nonzero().squeeze(1) if _on_host(R) else torch.arange(A.shape[2], device=A.device)
    random = random_directions(keys, step, A.shape[1], A.shape[2], columns).mT.double()
    Xt[:, columns] = torch.where(dead[:, columns].unsqueeze(2), random, Xt[:, columns])
    return Xt.mT


def random_directions(keys: Tensor, step: int | Tensor, n: int, r: int, columns: Tensor | None = None) -> Tensor:
    """Uniform numbers in [−1, 1), [B, n, r] fp32: a function of (key, step, row, column) on any device.

    With ``columns``, only these of the r columns. ``keys`` is [B] int64. The numbers are counter-based: no generator's
    state changes, and all workers draw the same.
    """
    columns = torch.arange(r, device=keys.device) if columns is None else columns
    counter = torch.arange(0, n * r, r, device=keys.device).view(1, n, 1) + columns
    # Keys are mixed separately from counters, so that no key's stream is a shifted copy of another key's stream.
    stream = _mix(_mix(keys & 0xFFFFFFFF) ^ ((step * 0x9E3779B9 + 0x85EBCA6B) & 0xFFFFFFFF)).view(-1, 1, 1)
    return ((_mix(_mix(counter) ^ stream) >> 8).float() * 2.0**-23).sub_(1.0)


def _mix(x: Tensor) -> Tensor:
    """Map 32-bit integers to 32-bit integers one to one. Every input bit changes about half of the output bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x


def _finite_part(G: Tensor) -> Tensor:
    return torch.where(G.isfinite(), G, 0)


def _on_host(tensor: Tensor) -> bool:
    """Return whether the host can read a value of the tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def _maybe(flag: Tensor) -> bool:
    """Return False only if the flag is known to be 0 without waiting for a device."""
    return not _on_host(flag) or bool(flag)
