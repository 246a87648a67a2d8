"""Inner products of the columns of factors, in fp64."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.table import FactorTable


@triton.jit(do_not_specialize=["panel", "chunks_number"])
def _gram_kernel(
    A, X, grams, records, chunks, chunks_number, panel, C: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """Parts of X_dᵀ A_c [C, C] for the finished panels d < c of X, and of A_cᵀ A_c. Grid: (chunks, panels d ≤ c)."""
    chunk = tl.program_id(0)
    left = tl.program_id(1)
    matrix = tl.load(chunks + chunk * 3)
    start = tl.load(chunks + chunk * 3 + 1)
    end = tl.load(chunks + chunk * 3 + 2)
    record = records + matrix * 6
    r = tl.load(record + 1).to(tl.int32)
    if panel * C >= r:
        return
    offset = tl.load(record + 2)
    ranks = tl.arange(0, C)
    total = tl.zeros([C, C], tl.float64)
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
        A: factors whose panel is looked at, fp32 or fp64, flat.
        X: orthonormal panels before it, fp64, flat.
        panel: its number.
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
        C=launch.panel,
        BLOCK_ROWS=launch.rows,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
