"""The operations in plain torch against fp64 truth, and the orthonormal basis on every kind of input.

Bounds are forward errors (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5): a sum of k
products in arithmetic with unit roundoff u is off by at most γ_k = k u / (1 − k u) times the sum of absolute values,
whatever the order of summation.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from powersgd_triton.ops import reference
from powersgd_triton.ops.reference import (
    DEAD_COLUMN,
    backproject_reference,
    compensate_project_reference,
    orthogonalize_reference,
    random_directions,
    reconstruct_reference,
    rollback_reference,
    subtract_product_reference,
)

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [(1, 1, 1), (1, 9, 1), (9, 1, 1), (7, 5, 2), (16, 33, 4), (65, 12, 8)]
# What the design asks of the orthonormal basis: max |PᵀP − I|.
ORTHONORMAL = 1e-5


def rounding(terms: int, dtype: torch.dtype) -> float:
    """γ of so many operations in the arithmetic of a gradient's dtype: fp64 for fp64, else fp32."""
    u = torch.finfo(wide(dtype)).eps / 2
    return terms * u / (1 - terms * u)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Case:
    """B matrices of n × m with random factors, spaced in one storage with ``gap`` elements between them."""

    def __init__(self, n: int, m: int, r: int, dtype: torch.dtype, batch: int = 3, gap: int = 5) -> None:
        generator = torch.Generator().manual_seed(n * 1000 + m * 10 + r)
        self.dtype, self.gap = dtype, gap

        def new(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(wide(dtype))

        self.G = self.spaced(new(batch, n, m).to(dtype))
        self.M = self.spaced(new(batch, n, m))
        self.P, self.Q, self.basis = new(batch, n, r), new(batch, m, r), new(batch, m, r)

    def spaced(self, values: Tensor) -> list[Tensor]:
        batch, n, m = values.shape
        step = n * m + self.gap
        memory = torch.full((batch * step,), NAN, dtype=values.dtype)
        views = [memory[i * step : i * step + n * m].view(n, m) for i in range(batch)]
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
        return views


def stack(matrices: list[Tensor]) -> Tensor:
    """fp64 copy [B, n, m]."""
    return torch.stack(matrices).double()


def assert_within(actual: Tensor, truth: Tensor, bound: Tensor) -> None:
    difference = (actual.double() - truth).abs()
    assert actual.isfinite().all()
    assert (difference <= bound).all(), f"off by {difference.max():.3e}; {(difference / bound).max():.2f} × the bound"


def block_bytes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setitem(reference.BLOCK_BYTES, "cpu", size)


# The operations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [64, 1 << 20])
@pytest.mark.parametrize("applied", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m", "r"), SIZES)
def test_compensate_project(
    n: int, m: int, r: int, dtype: torch.dtype, applied: float | None, blocks: int, monkeypatch: pytest.MonkeyPatch
):
    block_bytes(monkeypatch, blocks)
    case = Case(n, m, r, dtype)
    G, M, P, Q, basis = stack(case.G), stack(case.M), case.P.double(), case.Q.double(), case.basis.double()
    out = torch.full_like(case.P, NAN)
    flag = None if applied is None else torch.tensor(applied)
    compensate_project_reference(case.G, case.M, case.P, case.Q, flag, case.basis, out=out)

    product = P @ Q.mT if applied else torch.zeros_like(M)
    # r products and their sum, one subtraction, one addition.
    size = (P.abs() @ Q.abs().mT if applied else 0) + M.abs() + G.abs()
    error = rounding(r + 2, dtype) * size
    assert_within(torch.stack(case.M), G + M - product, error)
    slack = rounding(m, dtype) * ((size + error) @ basis.abs())
    assert_within(out, (G + M - product) @ basis, error @ basis.abs() + slack)
    assert torch.equal(stack(case.G), G)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m", "r"), SIZES)
def test_project_without_error_feedback(n: int, m: int, r: int, dtype: torch.dtype):
    case = Case(n, m, r, dtype)
    out = torch.full_like(case.P, NAN)
    compensate_project_reference(case.G, None, case.P, case.Q, None, case.basis, out=out)
    G, basis = stack(case.G), case.basis.double()
    assert_within(out, G @ basis, rounding(m, dtype) * (G.abs() @ basis.abs()))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), NAN])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_elements_enter_P_but_not_M(dtype: torch.dtype, value: float):
    case = Case(7, 5, 2, dtype)
    case.G[1][3, 2] = value
    M = stack(case.M)
    out = torch.full_like(case.P, NAN)
    compensate_project_reference(case.G, case.M, case.P, case.Q, None, case.basis, out=out)
    expected = torch.ones(3, 7, dtype=torch.bool)
    expected[1, 3] = False
    assert torch.equal(out.isfinite().all(-1), expected)
    after = stack(case.M)
    assert after.isfinite().all()
    assert after[1, 3, 2] == M[1, 3, 2]


@pytest.mark.parametrize("blocks", [64, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m", "r"), SIZES)
def test_backproject(n: int, m: int, r: int, dtype: torch.dtype, blocks: int, monkeypatch: pytest.MonkeyPatch):
    block_bytes(monkeypatch, blocks)
    case = Case(n, m, r, dtype)
    P = case.P.double()
    for matrices in (case.M, case.G):
        out = torch.full_like(case.Q, NAN)
        backproject_reference(matrices, case.P, out=out)
        M = stack(matrices)
        assert_within(out, M.mT @ P, rounding(n, dtype) * (M.abs().mT @ P.abs()))


@pytest.mark.parametrize("blocks", [64, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m", "r"), SIZES)
def test_reconstruct(n: int, m: int, r: int, dtype: torch.dtype, blocks: int, monkeypatch: pytest.MonkeyPatch):
    block_bytes(monkeypatch, blocks)
    case = Case(n, m, r, dtype)
    out = case.spaced(torch.full((3, n, m), NAN, dtype=dtype))
    reconstruct_reference(case.P, case.Q, out=out)
    P, Q = case.P.double(), case.Q.double()
    size = rounding(r, dtype) * (P.abs() @ Q.abs().mT)
    # Narrow dtypes are rounded to once: half a unit in the last place, at least half the smallest denormal.
    info = torch.finfo(dtype)
    once = 0 if dtype == wide(dtype) else info.eps / 2 * ((P @ Q.mT).abs() + size) + info.smallest_normal * info.eps / 2
    assert_within(torch.stack(out), P @ Q.mT, size + once)


@pytest.mark.parametrize("applied", [0.0, 1.0])
@pytest.mark.parametrize(("n", "m", "r"), SIZES)
def test_subtract_product(n: int, m: int, r: int, applied: float):
    case = Case(n, m, r, torch.float32)
    M, P, Q = stack(case.M), case.P.double(), case.Q.double()
    subtract_product_reference(case.M, case.P, case.Q, torch.tensor(applied))
    bound = applied * rounding(r + 1, torch.float32) * (M.abs() + P.abs() @ Q.abs().mT)
    assert_within(torch.stack(case.M), M - applied * (P @ Q.mT), bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rollback_takes_back_finite_elements(dtype: torch.dtype):
    case = Case(7, 5, 2, dtype)
    case.G[0][0, 0], case.G[1][2, 3] = float("inf"), NAN
    M, G = stack(case.M), stack(case.G)
    rollback_reference(case.G, case.M, torch.tensor(True))
    assert torch.equal(stack(case.M), M)
    rollback_reference(case.G, case.M, torch.tensor(False))
    G = torch.where(G.isfinite(), G, 0)
    assert_within(torch.stack(case.M), M - G, rounding(1, dtype) * (M - G).abs())


# Blocks -------------------------------------------------------------------------------------------------------------


def blocks_of(*lists: list[Tensor], rank: int = 2) -> list[tuple[slice, slice, list[Tensor]]]:
    return list(reference._blocks(rank, *lists))


def test_equal_distances_are_one_block_without_copies():
    case = Case(4, 3, 1, torch.float32, batch=6)
    blocks = blocks_of(case.G, case.M)
    assert [members for members, _, _ in blocks] == [slice(0, 6)]
    for view, matrices in zip(blocks[0][2], (case.G, case.M), strict=True):
        assert view.shape == (6, 4, 3)
        assert view.untyped_storage().data_ptr() == matrices[0].untyped_storage().data_ptr()
        assert all(torch.equal(view[i], matrix) for i, matrix in enumerate(matrices))


def test_rank_one_is_not_batched():
    case = Case(4, 3, 1, torch.float32, batch=3)
    members = [members for members, _, _ in blocks_of(case.G, case.M, rank=1)]
    assert members == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_runs_end_where_distances_change_or_storage_does():
    memory = torch.arange(100.0)
    starts = [0, 12, 24, 40, 52]
    matrices = [memory[start : start + 12].view(4, 3) for start in starts] + [torch.zeros(4, 3)]
    covered: list[int] = []
    for members, rows, (view,) in blocks_of(matrices):
        assert rows == slice(0, 4)
        covered += range(members.start, members.stop)
        for index, matrix in zip(range(members.start, members.stop), view, strict=True):
            assert matrix.data_ptr() == matrices[index].data_ptr()
            assert torch.equal(matrix, matrices[index])
    assert covered == list(range(6))


def test_overlapping_or_descending_matrices_are_not_batched():
    memory = torch.arange(60.0)
    for starts in ([0, 6, 12], [24, 12, 0]):
        blocks = blocks_of([memory[start : start + 12].view(4, 3) for start in starts])
        assert [members for members, _, _ in blocks] == [slice(0, 1), slice(1, 2), slice(2, 3)]


@pytest.mark.parametrize("size", [4, 16, 100, 400, 1 << 20])
def test_blocks_cover_every_row_once_and_stay_small(size: int, monkeypatch: pytest.MonkeyPatch):
    block_bytes(monkeypatch, size)
    case = Case(11, 5, 1, torch.float32, batch=4)
    seen = torch.zeros(4, 11)
    for members, rows, views in blocks_of(case.G, case.M):
        seen[members, rows] += 1
        assert views[0].numel() * 4 <= max(size, 5 * 4)
    assert (seen == 1).all()


# Orthonormal bases --------------------------------------------------------------------------------------------------


def orthogonalize(A: Tensor, key: int = 1, step: int = 0, epsilon: float = 0.0) -> Tensor:
    out = torch.full_like(A, NAN)
    keys = torch.arange(A.shape[0]) + key
    orthogonalize_reference(A, keys=keys, step=step, epsilon=epsilon, out=out)
    return out


def departure(P: Tensor) -> float:
    """max |PᵀP − I|, NaN where P is not finite."""
    P = P.double()
    return float((P.mT @ P - torch.eye(P.shape[-1], dtype=torch.float64)).abs().max())


def assert_basis_of(P: Tensor, A: Tensor) -> None:
    """P is orthonormal, and its span holds A's columns up to the share that counts as dead.

    A column that is replaced keeps at most DEAD_COLUMN of its norm outside the span; rounding P to its dtype moves
    its columns by u each, hence the span by 2 u √r. Twice DEAD_COLUMN, since what is left is itself rounded.
    """
    assert P.shape == A.shape
    assert P.isfinite().all()
    assert departure(P) <= ORTHONORMAL
    r = A.shape[-1]
    X = A.double()
    X = X / X.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    outside = (X - P.double() @ (P.double().mT @ X)).norm(dim=1)
    u = torch.finfo(P.dtype).eps / 2
    assert (outside <= (2 * DEAD_COLUMN + 2 * u * r**0.5) * X.norm(dim=1)).all(), float(outside.max())


def conditioned(n: int, r: int, kappa: float, seed: int) -> Tensor:
    """Two random n × r matrices with singular values from 1 down to 1 / kappa."""
    generator = torch.Generator().manual_seed(seed)
    U = torch.linalg.qr(torch.randn(2, n, r, dtype=torch.float64, generator=generator))[0]
    V = torch.linalg.qr(torch.randn(2, r, r, dtype=torch.float64, generator=generator))[0]
    A: Tensor = U * torch.logspace(0, -math.log10(kappa), r, dtype=torch.float64) @ V
    return A


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kappa", [1.0, 1e2, 1e4, 1e6, 1e7])
@pytest.mark.parametrize("r", [1, 2, 3, 4, 8, 16, 17, 32, 64, 128])
def test_orthonormal_at_every_rank_and_condition(r: int, kappa: float, dtype: torch.dtype):
    for n in (r, r + 1, 3 * r + 5, 300):
        A = conditioned(n, r, kappa, seed=n).to(dtype)
        assert_basis_of(orthogonalize(A), A)


@pytest.mark.parametrize("r", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_zero_matrix_gives_random_basis(r: int, rows: int):
    P = orthogonalize(torch.zeros(2, r + rows, r))
    assert departure(P) <= ORTHONORMAL
    if rows:
        assert not torch.equal(P[0], P[1])


@pytest.mark.parametrize("dead", [[0], [2], [0, 1], [1, 3], [0, 1, 2]])
def test_zero_columns_are_replaced(dead: list[int]):
    A = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0))
    A[1, :, dead] = 0
    assert_basis_of(orthogonalize(A), A)


def test_columns_before_a_dead_one_keep_their_direction():
    A = torch.randn(1, 20, 3, generator=torch.Generator().manual_seed(0))
    A[..., 2] = 0
    assert torch.allclose(orthogonalize(A)[..., :2], orthogonalize(A[..., :2].contiguous()), rtol=0, atol=2.0**-22)


@pytest.mark.parametrize("factor", [1.0, -1.0, 3.0, 1e-30, 1e30])
def test_duplicate_columns(factor: float):
    A = torch.randn(2, 20, 4, generator=torch.Generator().manual_seed(0))
    A[..., 2] = A[..., 0] * factor
    assert_basis_of(orthogonalize(A), A)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "k", "r"), [(3, 1, 2), (20, 1, 4), (20, 3, 4), (64, 5, 16), (16, 4, 16), (200, 20, 64)])
def test_rank_deficient(n: int, k: int, r: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(3, n, k, generator=generator) @ torch.randn(3, k, r, generator=generator)
    assert_basis_of(orthogonalize(A), A)


def test_exactly_dependent_columns_that_are_nearly_parallel():
    """Small integers, scaled by powers of two and combined: dependencies hold to the last bit, conditions are bad."""
    generator = torch.Generator().manual_seed(1)
    for n, r in [(3, 3), (4, 3), (6, 4), (8, 8), (16, 8)]:
        integers = torch.randint(-3, 4, (2000, n, r), generator=generator).float()
        scales = torch.exp2(-torch.randint(0, 23, (2000, 1, r), generator=generator).float())
        mixing = torch.randint(-1, 2, (2000, r, r), generator=generator).float()
        P = orthogonalize(integers * scales @ mixing)
        assert P.isfinite().all()
        assert departure(P) <= ORTHONORMAL, (n, r)


def test_column_that_dies_only_in_the_second_pass():
    """c = b − a in fp32 with b = a + 2⁻¹⁸ d: rounding in the first pass leaves something of c, which is in the span."""
    for exponent in range(1, 24):
        generator = torch.Generator().manual_seed(exponent)
        a, d = torch.randn(1, 50, 1, generator=generator), torch.randn(1, 50, 1, generator=generator)
        b = a + 2.0**-exponent * d
        A = torch.cat([a, b, b - a], dim=2)
        assert_basis_of(orthogonalize(A), A)


def test_fresh_directions_that_are_nearly_parallel():
    """Key 385972 draws two directions for n = r = 2 that are parallel to 5 digits; they are directions all the same."""
    assert departure(orthogonalize(torch.zeros(1, 2, 2), key=385972)) <= ORTHONORMAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["1e30", "largest", "denormal", "mixed"])
def test_huge_and_tiny_values(name: str, dtype: torch.dtype):
    A = torch.rand(2, 30, 4, generator=torch.Generator().manual_seed(0)).to(dtype) * 0.9 + 0.05
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    scale = {"1e30": 1e30, "largest": info.max, "denormal": smallest * 1000, "mixed": 1.0}[name]
    A = A * scale
    if name == "mixed":
        A = A * torch.tensor([info.max, 1.0, smallest * 1000, 1e-30], dtype=dtype)
    assert_basis_of(orthogonalize(A), A)


@pytest.mark.parametrize("where", ["element", "row", "column", "all"])
@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize(("n", "r"), [(1, 1), (5, 3), (16, 8), (64, 16)])
def test_non_finite_input_gives_finite_output(n: int, r: int, value: float, where: str):
    A = torch.randn(2, n, r, generator=torch.Generator().manual_seed(0))
    index: Any = {"element": (n // 2, r // 2), "row": (n // 2,), "column": (slice(None), r // 2), "all": ()}[where]
    A[0][index] = value
    P = orthogonalize(A)
    assert P.isfinite().all()
    # The matrix beside it is none the worse.
    assert_basis_of(P[1:], A[1:])


def test_epsilon_decides_what_is_dead():
    A = torch.zeros(1, 10, 2)
    A[0, 0] = 1.0
    A[0, 1, 1] = 1e-3
    assert_basis_of(orthogonalize(A, epsilon=1e-4), A)
    # The second direction is e_1 only where 1e-3 is enough to be alive.
    assert abs(float(orthogonalize(A, epsilon=1e-4)[0, 1, 1])) > 0.99
    replaced = orthogonalize(A, epsilon=1e-2)
    assert departure(replaced) <= ORTHONORMAL
    assert abs(float(replaced[0, 1, 1])) < 0.99


def test_same_input_same_bits_also_in_place():
    A = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(0))
    A[1, :, 3] = 0
    first = orthogonalize(A)
    assert torch.equal(first, orthogonalize(A.clone()))
    orthogonalize_reference(A, keys=torch.arange(3) + 1, step=0, out=A)
    assert torch.equal(first, A)


def test_replacement_depends_on_key_and_step_only():
    zero = torch.zeros(1, 30, 2)
    one = orthogonalize(zero, key=5, step=3)
    assert torch.equal(one, orthogonalize(zero, key=5, step=3))
    assert not torch.equal(one, orthogonalize(zero, key=6, step=3))
    assert not torch.equal(one, orthogonalize(zero, key=5, step=4))


# Random directions --------------------------------------------------------------------------------------------------


def global_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002


def test_random_directions_are_a_function_of_key_step_and_place():
    before = global_states()
    one = random_directions(torch.tensor([3, 8]), 5, 20, 4)
    assert global_states() == before
    assert one.shape == (2, 20, 4)
    assert torch.equal(one, random_directions(torch.tensor([3, 8]), 5, 20, 4))
    assert torch.equal(one[1:], random_directions(torch.tensor([8]), 5, 20, 4))
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, random_directions(torch.tensor([3, 8]), 6, 20, 4))


@pytest.mark.parametrize("step", [-1, 0, 1, 10**6])
def test_random_directions_are_uniform(step: int):
    keys = torch.tensor([zlib.crc32(f"layer{i}.weight".encode()) for i in range(50)])
    draws = random_directions(keys, step, 100, 4)
    assert draws.min() >= -1
    assert draws.max() < 1
    # Five standard deviations of the mean, and of the variance, of 20 000 uniform numbers on [−1, 1).
    assert abs(float(draws.mean())) < 5 * (1 / 3 / draws.numel()) ** 0.5
    assert abs(float(draws.square().mean()) - 1 / 3) < 5 * (4 / 45 / draws.numel()) ** 0.5
    assert draws.unique().numel() > 0.99 * draws.numel()


@pytest.mark.parametrize("operation", [backproject_reference, reconstruct_reference])
def test_repeated_calls_give_the_same_bits(operation: Callable[..., None]):
    case = Case(16, 33, 4, torch.float32)
    results = []
    for _ in range(2):
        if operation is backproject_reference:
            out: Any = torch.full_like(case.Q, NAN)
            operation(case.M, case.P, out=out)
            results.append(out)
        else:
            out = case.spaced(torch.full((3, 16, 33), NAN))
            operation(case.P, case.Q, out=out)
            results.append(torch.stack(out))
    assert torch.equal(results[0], results[1])
