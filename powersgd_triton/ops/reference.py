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
"""Two passes orthogonalize independent columns ("twice is enough"). A third pass is needed if a column died in the
second one, and a fourth if its replacement happened to be nearly dependent on the others."""

WINDOW = 512
"""Rows of a direction that replaces a column after the first pass. Elsewhere it is 0, so that only these rows have to
be multiplied with the other columns. Which rows they are is random."""

NOISE = 4 * 2.0**-53
"""Rounding error of an inner product relative to the vectors' norms: a few units, since errors of long sums cancel."""

LARGEST_GROWTH = 1e4
"""If the terms of each new column have at most so many times its norm, one pass in fp64 makes columns orthogonal up to
the square of this times NOISE: 4e-8. This suffices for fp32."""

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


def orthogonalize_reference(A: Tensor, *, keys: Tensor, step: int | Tensor, epsilon: float = 0.0, out: Tensor) -> None:
    """Orthonormal basis of A's columns, in their order: Gram–Schmidt as CholeskyQR2 with Gram matrices in fp64.

    If at most max(epsilon, 2⁻²²) of a column's norm is left after projecting out its predecessors, the column is
    replaced by a random direction, which is a function of (key, step). A finite A gives a finite, orthonormal result.
    A non-finite A gives a finite result.

    Stable up to κ(A) ~ 1e7, see Yamazaki, Tomov, Dongarra: "Mixed-precision Cholesky QR factorization and its case
    studies on multicore CPU with multiple GPUs" (SIAM J. Sci. Comput. 37, 2015).

    Args:
        A: [B, n, r] with r ≤ n, fp32 or fp64.
        keys: [B] int64, a number for each matrix.
        step: Number of the step, also as an int64 scalar on the device.
        epsilon: See above.
        out: [B, n, r]. It may be A.
    """
    threshold = max(epsilon, DEAD_COLUMN)
    # The vectors are rows instead of columns, which makes the products below twice as fast.
    Xt = A.mT.to(torch.float64, memory_format=torch.contiguous_format)
    if A.dtype == torch.float64:
        largest = Xt.abs().amax(dim=2, keepdim=True)
        Xt = Xt / torch.where(largest > 0, largest, 1)
    before = Xt.new_zeros(Xt.shape[:2])
    for attempt in range(PASSES):
        gram = torch.bmm(Xt, Xt.mT)
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        R, alive, before, enough = _cholesky(gram, before, threshold)
        if alive is not None:
            Xt = torch.where(alive, Xt, 0)
        inverse = torch.linalg.solve_triangular(R, torch.eye(R.shape[-1], dtype=R.dtype, device=R.device), upper=True)
        Xt = torch.bmm(inverse.mT, Xt)
        if alive is not None:
            new = random_directions(keys + attempt, step, A.shape[1], A.shape[2], None if attempt == 0 else WINDOW)
            Xt = torch.where(alive, Xt, new.mT.double())
        if enough and one_pass_is_enough(inverse, diagonal).all() and (attempt > 0 or A.dtype == torch.float32):
            break
    out.copy_(Xt.mT)


def random_directions(keys: Tensor, step: int | Tensor, n: int, r: int, window: int | None = None) -> Tensor:
    """Uniform numbers in [−1, 1), [B, n, r] fp32: a function of (key, step, row, column) on any device.

    With ``window``, only so many rows are not 0; which ones depends on (key, step). ``keys`` is [B] int64. The numbers
    are counter-based: no generator's state changes, and all workers draw the same.
    """
    counter = torch.arange(n * r, dtype=torch.int64, device=keys.device).view(1, n, r)
    # Keys are mixed separately from counters, so that no key's stream is a shifted copy of another key's stream.
    stream = _mix(_mix(keys & 0xFFFFFFFF) ^ ((step * 0x9E3779B9 + 0x85EBCA6B) & 0xFFFFFFFF)).view(-1, 1, 1)
    values = ((_mix(_mix(counter) ^ stream) >> 8).float() * 2.0**-23).sub_(1.0)
    if window is None or n <= window:
        return values
    rows = torch.arange(n, device=keys.device).view(1, n, 1) - stream % (n - window + 1)
    return torch.where((rows >= 0) & (rows < window), values, 0)


def _mix(x: Tensor) -> Tensor:
    """Map 32-bit integers to 32-bit integers one to one. Every input bit changes about half of the output bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x


def one_pass_is_enough(inverse: Tensor, diagonal: Tensor) -> Tensor:
    """Return [B] for R⁻¹ [B, r, r] and the columns' squared norms [B, r]; see LARGEST_GROWTH."""
    return (inverse.abs() * diagonal.sqrt().unsqueeze(2)).sum(dim=1).amax(dim=1) <= LARGEST_GROWTH


def _cholesky(gram: Tensor, before: Tensor, threshold: float) -> tuple[Tensor, Tensor | None, Tensor, bool]:
    """Return R with RᵀR = gram [B, r, r], which columns are alive [B, r, 1], norms, and whether one pass may do.

    ``alive`` is None if all columns are known to be alive. R has the identity's row and column for a dead column.

    If little is left of a column, rounding errors of later columns are large, and may exceed what is left of these.
    Such a column in doubt is kept. The next pass decides, since errors are small once columns are nearly orthogonal.
    ``before`` [B, r] holds squared norms of the original columns of those that were in doubt, and 0 for the others, in
    the units of gram. The norms returned are those of the next pass.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    norm = torch.where(before > 0, before, diagonal)
    if _on_host(gram):
        L, failed = torch.linalg.cholesky_ex(gram)
        squares = L.diagonal(dim1=-2, dim2=-1).square()
        # If the decomposition failed, the diagonal does not hold square roots.
        if bool((squares > threshold**2 * norm).all()) and not failed.any():
            return L.mT, None, torch.zeros_like(before), True
    R, following = torch.zeros_like(gram), torch.zeros_like(before)
    alive = torch.zeros_like(diagonal, dtype=torch.bool)
    # Relative to the squared norms: rounding errors of what is left of each column.
    noise = NOISE * diagonal / norm
    for j in range(gram.shape[-1]):
        row = gram[:, j] - (R[:, None, :j, j] @ R[:, :j]).squeeze(1)
        share = row[:, j] / norm[:, j]
        possible = (diagonal[:, j] > 0) & diagonal[:, j].isfinite()
        unclear = possible & (noise[:, j] > threshold**2)
        known = possible & (share > noise[:, j].clamp_min(threshold**2)) & share.isfinite()
        alive[:, j] = known | unclear
        doubtful = unclear & ~known
        following[:, j] = torch.where(doubtful, 1 / noise[:, j], 0)
        # What is left of a column in doubt is not a direction yet: others keep their share of it.
        R[:, j] = torch.where(known.unsqueeze(-1), row * row[:, j].rsqrt().unsqueeze(-1), 0)
        size = torch.where(doubtful, noise[:, j] * norm[:, j], row[:, j]).sqrt()
        R[:, j, j] = torch.where(alive[:, j], size, 1)
        # The error of a multiplier comes from those of both columns.
        part = R[:, j].abs() / norm.sqrt()
        doubt = torch.where(known, noise[:, j] / share, 0).unsqueeze(-1)
        error = (doubt * noise).sqrt() + part * doubt
        noise = torch.where(known.unsqueeze(-1), noise + (2 * part + error) * error, noise)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.where(alive.unsqueeze(1), R.triu(), identity), alive.unsqueeze(2), following, False


def _finite_part(G: Tensor) -> Tensor:
    return torch.where(G.isfinite(), G, 0)


def _on_host(tensor: Tensor) -> bool:
    """Return whether the host can read a value of the tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def _maybe(flag: Tensor) -> bool:
    """Return False only if the flag is known to be 0 without waiting for a device."""
    return not _on_host(flag) or bool(flag)
