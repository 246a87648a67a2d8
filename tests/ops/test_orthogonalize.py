"""The orthonormal basis on every kind of input, and the random directions that replace what is dead."""

import contextlib
import ctypes
import itertools
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.ops import bases, host
from powersgd_triton.ops.orthogonalize import orthogonalize_reference, random_directions
from powersgd_triton.ops.products import FEW, most_columns
from tests.support.checks import on_threads, random_states, step
from tests.support.orthonormal import ORTHONORMAL, assert_basis_of, departure, hard_inputs, nearly_dependent
from tests.support.thinned import thinned

NAN = float("nan")


@pytest.fixture(params=["reference", "C", "torch"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests of this file are run with the specification, and with what the CPU does with and without C."""
    global by_bases
    by_bases = request.param != "reference"
    if request.param == "torch":
        monkeypatch.setattr(bases, "library", lambda: None)
    elif request.param == "C" and host.library() is None:
        pytest.skip("the library was not built")


by_bases = False


def orthogonalize(A: Tensor, key: int = 1, step: int = 0, epsilon: float = 0.0) -> Tensor:
    out = torch.full_like(A, NAN)
    assert orthogonalize_into(out, A, key, step, epsilon) == 0
    return out


def test_no_groups():
    assert bases.orthogonalize([], keys=[], step=0, out=[]) == 0


def orthogonalize_into(out: Tensor, A: Tensor, key: int = 1, step: int = 0, epsilon: float = 0.0) -> int:
    keys = torch.arange(A.shape[0]) + key
    if by_bases:
        groups = [A.clone() if A is out else A]
        return int(bases.orthogonalize(groups, keys=[keys], step=step, epsilon=epsilon, out=[out]))
    return int(orthogonalize_reference(A, keys=keys, step=step, epsilon=epsilon, out=out))


@thinned("r, dtype", [1, 2, 3, 4, 8, 16, 17, 32, 64, 128], [torch.float32, torch.float64], together=1)
def test_hard_inputs(r: int, dtype: torch.dtype):
    for name, A in hard_inputs(r, heights=(r, r + 1, 300)).items():
        assert_basis_of(orthogonalize(A[None].to(dtype)), A[None].to(dtype), name)


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


def test_real_directions_that_look_like_rounding_errors_are_kept():
    """Little is left of a column after one that is nearly parallel, but it is no rounding error."""
    matrices = sorted(nearly_dependent(120, 2500), key=lambda A: A.shape)
    for _, alike in itertools.groupby(matrices, key=lambda A: A.shape):
        A = torch.stack([*alike])
        assert_basis_of(orthogonalize(A), A)
    # Key 385972 draws two directions for n = r = 2 that are parallel to 5 digits; they are directions all the same.
    assert departure(orthogonalize(torch.zeros(1, 2, 2), key=385972)) <= ORTHONORMAL


@pytest.mark.parametrize("scale", [1.0, torch.finfo(torch.float64).max, 1e-320])
def test_huge_and_tiny_values_of_fp64(scale: float):
    A = torch.rand(2, 30, 4, generator=torch.Generator().manual_seed(0)).double() * 0.9 + 0.05
    A *= torch.tensor([scale, scale, 1.0, scale], dtype=torch.float64)
    assert_basis_of(orthogonalize(A), A)


@pytest.mark.parametrize("where", ["element", "row", "column", "all"])
def test_non_finite_input_gives_finite_output(where: str):
    for (n, r), value in itertools.product([(1, 1), (5, 3), (16, 8), (64, 16)], [NAN, float("inf"), float("-inf")]):
        A = torch.randn(2, n, r, generator=torch.Generator().manual_seed(0))
        index: Any = {"element": (n // 2, r // 2), "row": (n // 2,), "column": (slice(None), r // 2), "all": ()}[where]
        A[0][index] = value
        P = orthogonalize(A)
        assert P.isfinite().all(), (n, r, value)
        # The matrix beside it is none the worse.
        assert_basis_of(P[1:], A[1:])


def test_epsilon_decides_what_is_dead():
    A = torch.zeros(1, 10, 2)
    A[0, 0], A[0, 1, 1] = 1.0, 1e-3
    assert_basis_of(orthogonalize(A, epsilon=1e-4), A)
    # The second direction is e_1 only where 1e-3 is enough to be alive.
    for epsilon, alive in ((1e-4, True), (1e-2, False)):
        P = orthogonalize(A, epsilon=epsilon)
        assert departure(P) <= ORTHONORMAL
        assert (abs(float(P[0, 1, 1])) > 0.99) == alive


def test_same_input_same_bits_also_in_place():
    """What replaces dead columns depends on the key and the step only."""
    A = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(0))
    A[1, :, 3] = 0
    before = random_states()
    first, zero = orthogonalize(A), torch.zeros(2, 30, 2)
    assert torch.equal(first, orthogonalize(A.clone()))
    orthogonalize_into(A, A)
    assert torch.equal(first, A)
    one = orthogonalize(zero, key=5, step=3)
    assert torch.equal(one[1], orthogonalize(zero, key=6, step=3)[0])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, orthogonalize(zero, key=5, step=4))
    assert random_states() == before


@pytest.mark.parametrize("number", [-1, 0, 1, 10**6])
def test_random_directions_are_uniform(number: int):
    keys = torch.tensor([zlib.crc32(f"layer{i}.weight".encode()) for i in range(50)])
    draws = random_directions(keys, number, 100, 4)
    assert draws.min() >= -1
    assert draws.max() < 1
    # Five standard deviations of the mean, and of the variance, of 20 000 uniform numbers on [−1, 1).
    assert abs(float(draws.mean())) < 5 * (1 / 3 / draws.numel()) ** 0.5
    assert abs(float(draws.square().mean()) - 1 / 3) < 5 * (4 / 45 / draws.numel()) ** 0.5
    assert draws.unique().numel() > 0.99 * draws.numel()


@pytest.mark.parametrize("implementation", ["C", "torch"], indirect=True)
def test_matrices_do_not_disturb_each_other():
    """Some matrices of a batch need more than one decomposition, or are left to the reference."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(7, 40, 12, generator=generator)
    A[1] = 0
    A[2, :, 1] = A[2, :, 0] * (1 + 1e-5 * torch.randn(40, generator=generator))
    A[3, :, 1] = A[3, :, 0]
    A[5, 3, 2] = torch.nan
    found, finite = orthogonalize(A), [0, 1, 2, 3, 4, 6]
    assert_basis_of(found[finite], A[finite])
    assert departure(found) <= ORTHONORMAL
    for i in range(len(A)):
        alone = orthogonalize(A[i : i + 1], key=1 + i)[0]
        # LAPACK's bits may depend on where a matrix lies.
        assert torch.allclose(found[i], alone, rtol=0, atol=1e-6) if i in (1, 3, 5) else torch.equal(found[i], alone)


@pytest.mark.parametrize("implementation", ["C"], indirect=True)
@pytest.mark.parametrize("r", [16, 130])
def test_a_second_decomposition_replaces_the_reference(r: int):
    """As for a gradient of low rank with a little noise."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(2, 300, 8, generator=generator) @ torch.randn(2, 8, r, generator=generator)
    A += 1e-4 * torch.randn(A.shape, generator=generator)
    with mock.patch("powersgd_triton.ops.bases.orthogonalize_reference", side_effect=AssertionError):
        assert_basis_of(orthogonalize(A), A)


@pytest.mark.parametrize("implementation", ["C"], indirect=True)
@thinned("n, r, count", [3, 64, 65, 700], [1, 3, 7, 8, 9, 20, 64, 130], [1, 2, 5], together=1)
def test_same_bits_on_any_number_of_threads(n: int, r: int, count: int):
    A = torch.randn(count, max(n, r), r, generator=torch.Generator().manual_seed(0))
    found = [orthogonalize(A) for _ in on_threads(1, 2, 3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert_basis_of(found[0], A)


@pytest.mark.skipif(most_columns() <= FEW, reason="needs AVX2")
@pytest.mark.parametrize("implementation", ["C"], indirect=True)
@pytest.mark.parametrize("r", [8, 17, 64, 130])
def test_same_bits_with_vectors_of_any_width(r: int):
    """A job's processors may differ, and all workers need the same basis."""
    A, code = torch.randn(1, 300, r, generator=torch.Generator().manual_seed(0)), host.library()
    assert code is not None
    found, narrow, exact = torch.empty_like(A), torch.full_like(A, NAN), torch.zeros(1, dtype=torch.bool)
    assert bases.cholesky_qr([A], 0.0, out=[found]).all()
    places = (x.data_ptr() for x in (A, narrow, exact))
    code.powersgd_basis(
        ctypes.byref(bases._Factors(*places, *A.shape, 1e4, 2**18)), *(ctypes.c_int64(i) for i in (0, 1))
    )
    assert exact
    assert torch.equal(narrow, found)


@pytest.mark.parametrize("implementation", ["C"], indirect=True)
def test_groups_in_one_call_have_the_bits_of_each_alone():
    """Also one that is left to the reference, and one with more work than all others."""
    shapes = [(2, 40, 3), (1, 2000, 64), (3, 9, 9), (4, 300, 17)]
    A = [torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
    A[0][1, :, 2] = A[0][1, :, 1]
    keys, out = [torch.arange(len(x)) + 1 for x in A], [torch.full_like(x, NAN) for x in A]
    alone = [orthogonalize(x) for x in A]
    for _ in on_threads(1, 2, 3, 8):
        bases.orthogonalize(A, keys=keys, step=0, out=out)
        assert all(map(torch.equal, out, alone))


@contextlib.contextmanager
def spoiled(value: float) -> Iterator[None]:
    """Let decompositions have two equal columns at the end, and ``value`` in the first. CholeskyQR is never exact."""
    qr = torch.linalg.qr

    def spoiled_qr(A: Tensor, mode: str = "reduced") -> Any:
        found = qr(A, mode)
        if mode == "reduced":
            found.Q[..., -1] = found.Q[..., -2]
            found.Q[..., 0] *= value
        return found

    never = mock.patch.object(bases, "LARGEST_GROWTH", 0.0)
    with mock.patch.object(torch.linalg, "qr", spoiled_qr), never:
        yield


def test_columns_that_are_not_orthonormal_are_zero_and_counted():
    A, out = torch.randn(2, 20, 6, generator=torch.Generator().manual_seed(0)), torch.empty(2, 20, 6)
    A[0, :, 3] = A[0, :, 1]
    with spoiled(1.1):
        assert orthogonalize_into(out, A) == 2 * 3
    assert not out[..., [0, 4, 5]].any()
    assert departure(out[..., 1:4]) <= ORTHONORMAL
    with spoiled(NAN):
        assert orthogonalize_into(out, A) == 2 * 6
    assert not out.any(), "what is not a number is not orthogonal to anything"


@pytest.mark.parametrize("implementation", ["C", "torch"], indirect=True)
def test_what_is_not_orthonormal_is_not_sent_and_reported():
    """The average lacks directions. The error keeps them, so nothing is lost."""
    G = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    compressor = Compressor(PowerSGDConfig(rank=4, min_compression_rate=0), {"G": G.shape})
    assert "orthonormal" not in str(compressor.report())
    M = G.clone()
    with spoiled(3.0):
        for _ in range(3):
            average = step(compressor, {"G": G})["G"]
            assert average.norm() <= (1 + 1e-5) * M.norm()
            assert torch.allclose(compressor.error()["G"], M - average, rtol=0, atol=1e-4)
            M += G - average
    report = compressor.report()
    assert report.zeroed > 0
    assert f"{report.zeroed} columns of bases were not orthonormal" in str(report)
