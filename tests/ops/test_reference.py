"""The operations in plain torch against fp64 truth, and the blocks in which they walk through matrices.

Bounds are forward errors (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5): a sum of k
products in arithmetic with unit roundoff u is off by at most γ_k = k u / (1 − k u) times the sum of absolute values,
whatever the order of summation.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from powersgd_triton.ops import blocks
from powersgd_triton.ops.reference import (
    backproject_reference,
    compensate_project_reference,
    reconstruct_reference,
)
from tests.support.bounds import assert_within
from tests.support.checks import DTYPES
from tests.support.kernel_cases import NAN, Memory

SIZES = [(1, 1, 1), (1, 9, 1), (9, 1, 1), (7, 5, 2), (16, 33, 4), (65, 12, 8)]


def rounding(terms: int, dtype: torch.dtype) -> float:
    """γ of so many operations in the arithmetic of a gradient's dtype: fp64 for fp64, else fp32."""
    u = torch.finfo(wide(dtype)).eps / 2
    return terms * u / (1 - terms * u)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def spaced(values: Tensor) -> list[Tensor]:
    """Matrices in one storage, with five elements between them."""
    memory = Memory([matrix.numel() for matrix in values], values.dtype, torch.device("cpu"), gap=5)
    return [view.view(values.shape[1:]) for view in memory.fill(list(values)).views]


class Case:
    """B matrices of n × m with random factors."""

    def __init__(self, n: int, m: int, r: int, dtype: torch.dtype, batch: int = 3) -> None:
        generator = torch.Generator().manual_seed(n * 1000 + m * 10 + r)

        def new(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(wide(dtype))

        self.G, self.M = spaced(new(batch, n, m).to(dtype)), spaced(new(batch, n, m))
        self.P, self.Q, self.basis = new(batch, n, r), new(batch, m, r), new(batch, m, r)


def stack(matrices: list[Tensor]) -> Tensor:
    """fp64 copy [B, n, m]."""
    return torch.stack(matrices).double()


def block_bytes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setitem(blocks.BLOCK_BYTES, "cpu", size // torch.get_num_threads())


# The operations -----------------------------------------------------------------------------------------------------


# Each row of a matrix a block of its own, and all matrices in one block.
over_blocks = pytest.mark.parametrize("size", [64, 1 << 20])


@over_blocks
@pytest.mark.parametrize("dtype", DTYPES)
def test_compensate_project(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch):
    block_bytes(monkeypatch, size)
    for (n, m, r), applied in itertools.product(SIZES, (None, 0.0, 1.0)):
        case = Case(n, m, r, dtype)
        G, M, P, Q, basis = stack(case.G), stack(case.M), case.P.double(), case.Q.double(), case.basis.double()
        out = torch.full_like(case.P, NAN)
        pending = None if applied is None else (case.P, case.Q, torch.tensor(applied))
        compensate_project_reference(case.G, case.M, pending, case.basis, out=out)

        product = P @ Q.mT if applied else torch.zeros_like(M)
        # r products and their sum, one subtraction, one addition.
        terms = (P.abs() @ Q.abs().mT if applied else 0) + M.abs() + G.abs()
        error = rounding(r + 2, dtype) * terms
        assert_within(torch.stack(case.M), G + M - product, error)
        slack = rounding(m, dtype) * ((terms + error) @ basis.abs())
        assert_within(out, (G + M - product) @ basis, error @ basis.abs() + slack)
        assert torch.equal(stack(case.G), G)
        # Without error feedback.
        compensate_project_reference(case.G, None, None, case.basis, out=out.fill_(NAN))
        assert_within(out, G @ basis, rounding(m, dtype) * (G.abs() @ basis.abs()))


@over_blocks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_backproject(threads: int, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch):
    block_bytes(monkeypatch, size)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for n, m, r in SIZES:
        case = Case(n, m, r, dtype)
        P = case.P.double()
        for matrices in (case.M, case.G):
            out, again = torch.full_like(case.Q, NAN), torch.full_like(case.Q, NAN)
            backproject_reference(matrices, case.P, out=out)
            backproject_reference(matrices, case.P, out=again)
            M = stack(matrices)
            assert_within(out, M.mT @ P, rounding(n, dtype) * (M.abs().mT @ P.abs()))
            assert torch.equal(out, again)


@over_blocks
@pytest.mark.parametrize("dtype", DTYPES)
def test_reconstruct(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch):
    block_bytes(monkeypatch, size)
    for n, m, r in SIZES:
        case = Case(n, m, r, dtype)
        out, again = (spaced(torch.full((3, n, m), NAN, dtype=dtype)) for _ in range(2))
        reconstruct_reference(case.P, case.Q, out=out)
        reconstruct_reference(case.P, case.Q, out=again)
        P, Q = case.P.double(), case.Q.double()
        bound = rounding(r, dtype) * (P.abs() @ Q.abs().mT)
        # Narrow dtypes are rounded to once: half a unit in the last place, at least half the smallest denormal.
        info = torch.finfo(dtype)
        half = info.eps / 2 * ((P @ Q.mT).abs() + bound) + info.smallest_normal * info.eps / 2
        assert_within(torch.stack(out), P @ Q.mT, bound + (0 if dtype == wide(dtype) else half))
        assert torch.equal(torch.stack(out), torch.stack(again))


# Blocks -------------------------------------------------------------------------------------------------------------


def blocks_of(*lists: list[Tensor], rank: int = 2) -> list[tuple[slice, slice, list[Tensor]]]:
    return list(blocks.blocks(rank, *lists))


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([0, 17, 34, 51], [slice(0, 4), slice(4, 5)]),
        ([0, 12, 24, 40, 52], [slice(0, 3), slice(3, 5), slice(5, 6)]),
        # Overlapping or descending.
        ([0, 6, 12], [slice(i, i + 1) for i in range(4)]),
        ([24, 12, 0], [slice(i, i + 1) for i in range(4)]),
    ],
)
def test_runs_end_where_distances_change_or_storage_does(starts: list[int], expected: list[slice]):
    memory = torch.arange(100.0)
    matrices = [memory[start : start + 12].view(4, 3) for start in starts] + [torch.zeros(4, 3)]
    blocks = blocks_of(matrices)
    assert [members for members, _, _ in blocks] == expected
    for members, rows, (view,) in blocks:
        assert rows == slice(0, 4)
        for matrix, given in zip(view, matrices[members], strict=True):
            assert matrix.data_ptr() == given.data_ptr()
            assert torch.equal(matrix, given)
    # At rank 1 each matrix is a block.
    assert [members for members, _, _ in blocks_of(matrices, rank=1)] == [slice(i, i + 1) for i in range(len(matrices))]


@pytest.mark.parametrize("size", [4, 16, 100, 400, 1 << 20])
def test_blocks_cover_every_row_once_and_stay_small(size: int, monkeypatch: pytest.MonkeyPatch):
    block_bytes(monkeypatch, size)
    case = Case(11, 5, 1, torch.float32, batch=4)
    seen = torch.zeros(4, 11)
    for members, rows, views in blocks_of(case.G, case.M):
        seen[members, rows] += 1
        assert views[0].numel() * 4 <= max(size, blocks.FEWEST_ROWS * 5 * 4)
    assert (seen == 1).all()


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_each_thread_has_a_block_that_fits_its_cache_or_some_rows(threads: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    size = blocks.block_bytes(torch.device("cpu"))
    assert size == threads * blocks.BLOCK_BYTES["cpu"] <= threads << 20
    matrix = torch.empty(8192, 1024)
    sizes = [4 * block.numel() for _, _, (block,) in blocks_of([matrix], rank=4)]
    assert sum(sizes) == 4 * matrix.numel()
    assert size / 2 < max(sizes) <= size
    few, wide = blocks.FEWEST_ROWS, torch.empty(20, size // 4)
    rows = [block.shape[1] for _, _, (block,) in blocks_of([wide], rank=4)]
    assert rows == [few, few, 20 - 2 * few]
