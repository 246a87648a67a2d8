"""Blocked Gram–Schmidt: panels of columns, each orthonormalized as X L⁻ᵀ with L Lᵀ = XᵀX in fp64, in several passes.

A pass leaves an error that grows with the panel's condition number, and the next one removes it. The device decides for
each matrix whether a pass was enough. Then the launches of further passes return at once.
"""

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import table_device as tables
from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.gram import PASSES, gram_triton, panel_of_rows, squares_of
from powersgd_triton.kernels.launcher import run
from powersgd_triton.kernels.table import FactorTable
from powersgd_triton.kernels.table_device import PROGRESS, PROGRESS_PASSES


@triton.jit(do_not_specialize=["number", "panel", "panels"])
def _orthogonalize_kernel(
    A, X, out, squares, progress, records, chunks, number, panel, panels,
    C: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """out_c = A_c after all passes, and X_c if there are further panels. Grid: (chunks, shares of a chunk)."""
    matrix, start, end, r, offset = tables.factor_chunk(records, chunks, tl.program_id(0))
    if panel * C >= r:
        return
    transforms, _, _ = squares_of(squares, matrix, panels, C)
    passes = tl.load(progress + matrix * PROGRESS + PROGRESS_PASSES)
    # Of a panel after the first, X holds what all passes but the last one made.
    kept, draws = tl.where(panel > 0, passes - 1, 0), (records, matrix, number)
    for row in range(start + tl.program_id(1) * BLOCK_ROWS, end, tl.num_programs(1) * BLOCK_ROWS):
        value, within, ok = panel_of_rows(
            A + offset, row, end, r, panel, transforms, kept, passes, draws, C, BLOCK_ROWS
        )
        # A may be X or out: no thread stores before all have loaded.
        tl.debug_barrier()
        tl.store(out + offset + within, value.to(tl.float32), ok)
        if panels > 1:
            tl.store(X + offset + within, value, ok)


def orthogonalize_triton(
    factors: FactorTable, A: Tensor, rank: int, number: Tensor, epsilon: float, launch_gram: Launch, launch: Launch, *,
    X: Tensor, grams: Tensor, finite: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """out = orthonormal basis of A's columns, see ``orthogonalize_reference``.

    A rank within one panel takes three launches: two passes, and the product. Each further panel takes five.

    Args:
        factors: Table of one side's factors, of which ``rank`` is the largest rank.
        A, out: Factors, fp32, flat. ``out`` may be A.
        number: int64 scalar on the device, the step's number, on which random directions depend.
        X, grams: fp64 workspaces of A's size and of ``grams_numel``. X may be empty for ranks within one panel.
        finite: int32 scalar on the device that becomes 0 if A is not finite.
    """
    if not len(factors.chunks):
        return
    panels, of_parts = _panels(factors, rank, launch.panel)
    parts, squares = grams[:of_parts], grams[of_parts:]
    for panel in range(panels):
        source = A
        for attempt in range(2):
            gram_triton(
                factors, source, number, epsilon, attempt, panel, panels, launch_gram,
                X=X, parts=parts, squares=squares, finite=finite,
            )  # fmt: skip
            if panel > 0:
                source = X
        run(
            _orthogonalize_kernel, (len(factors.chunks), factors.shares), launch.of_factors,
            source, X, out, squares, factors.progress, factors.records, factors.chunks, number, panel, panels,
        )  # fmt: skip


def grams_numel(factors: FactorTable, rank: int, panel: int) -> int:
    """Return the elements of the workspace ``grams`` for panels of so many columns."""
    panels, of_parts = _panels(factors, rank, panel)
    return of_parts + len(factors.records) * (int(PASSES.value) + 1 + panels) * panel**2


def _panels(factors: FactorTable, rank: int, panel: int) -> tuple[int, int]:
    """Return the number of panels, and the elements of the parts of their inner products."""
    panels = -(-rank // panel)
    return panels, panels * len(factors.chunks) * panel**2
