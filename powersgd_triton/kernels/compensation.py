"""Device functions of the two kernels that compensate: M ← G + growth · (M − P Qᵀ), for one tile.

P Qᵀ is the pending product: what the last step's reconstruction took out of M. It is subtracted here, one step late,
since M is read here anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_pending(factor, ok, pending):
    """A tile of P or Q of the pending product; zeros where that product was never applied.

    Zeroing the product instead would not do: factors of a step that overflowed may be infinite, and 0 · inf is NaN.
    """
    return tl.where(pending > 0, tl.load(factor, ok, 0.0), 0.0)


@triton.jit
def subtract_further_panels(
    value, P, Q, left, right_t, row_ok, col_ok, ranks, r, pending, C: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """value − P Qᵀ, of the columns of P [rows, r] and Q [cols, r] behind their first C.

    Args:
        P, Q: the tile's first row of each.
        left, right_t: offsets of the first C columns from there, [rows, C] and [C, cols].
        ranks: 0 to C − 1.
    """
    # Panel by panel into ``value``, in this order: another one would round differently.
    for k in range(C, r, C):
        more = k + ranks < r
        P_tile = load_pending(P + k + left, row_ok[:, None] & more[None, :], pending)
        Q_tile = load_pending(Q + k + right_t, more[:, None] & col_ok[None, :], pending)
        value -= tl.dot(P_tile, Q_tile, input_precision=PRECISION)
    return value


@triton.jit
def add_gradient(value, gradient, growth, M, ok):
    """gradient + growth · value, which is stored in M except for what is not finite of the gradient.

    What is returned has those elements: this is how the step finds that its gradients are not finite, and M, which
    outlives the step, is not spoiled by them.
    """
    value *= growth
    # NaN and ±inf fail the comparison.
    finite = tl.where(tl.abs(gradient) < float("inf"), gradient, 0.0)
    tl.store(M, (finite + value).to(M.dtype.element_ty), ok)
    return value + gradient
