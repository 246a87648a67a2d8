"""Inner products of the columns of factors, in fp64.

fp64 costs little, since factors are small, and doubles the digits: the Cholesky decomposition of a Gram matrix squares
the condition number.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.table import FactorTable
from powersgd_triton.kernels.table_device import factor_chunk


@triton.jit(do_not_specialize=["panel", "chunks_number"])
def _gram_kernel(
    A, X, grams, records, chunks, chunks_number, panel, C: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """Parts of X_dᵀ A_c [C, C] for the finished panels d < c of X, and of A_cᵀ A_c. Grid: (chunks, panels d ≤ c)."""
    chunk = tl.program_id(0)
    left = tl.program_id(1)
    _, start, end, r, offset = factor_chunk(records, chunks, chunk)
    # Launched for the largest rank; this matrix may have fewer panels.
    if panel * C >= r:
        return
    ranks = tl.arange(0, C)
    total = tl.zeros([C, C], tl.float64)
    # Every chunk keeps its own sum: who needs the whole adds the parts in the order of the chunks, without atomics.
    for row in range(start, end, BLOCK_ROWS):
        rows = row + tl.arange(0, BLOCK_ROWS)
        row_ok = (rows < end)[:, None]
        at = offset + rows.to(tl.int64)[:, None] * r + ranks[None, :]
        right = tl.load(A + panel * C + at, row_ok & (panel * C + ranks < r)[None, :], 0.0).to(tl.float64)
        if left < panel:
            other = tl.load(X + left * C + at, row_ok & (left * C + ranks < r)[None, :], 0.0).to(tl.float64)
        else:
            other = right
        total = tl.dot(tl.trans(other), right, total, out_dtype=tl.float64)
    out = (left * chunks_number + chunk).to(tl.int64) * C * C
    ok = (left * C + ranks < r)[:, None] & (panel * C + ranks < r)[None, :]
    tl.store(grams + out + ranks[:, None] * C + ranks[None, :], total, ok)


def gram_triton(factors: FactorTable, A: Tensor, X: Tensor, panel: int, launch: Launch, *, out: Tensor) -> None:
    """out = parts of the inner products of one panel of columns with itself and the panels before it.

    Args:
        factors: table of one side's factors.
        A: the factors of which one panel is taken, fp32 or fp64, flat.
        X: factors whose panels before this one are orthonormal, fp64, flat.
        panel: number of the panel.
        launch: rows of a block, columns of a panel.
        out: fp64 [panel + 1, chunks, C, C].
    """
    _gram_kernel[(len(factors.chunks), panel + 1)](
        A,
        X,
        out,
        factors.records,
        factors.chunks,
        len(factors.chunks),
        panel,
        **launch.of_factors,
    )
