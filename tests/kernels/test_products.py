"""The kernels that compensate, multiply, pack and commit, and their reference, against fp64 truth."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import product_device
from powersgd_triton.kernels.commit import commit_triton
from powersgd_triton.kernels.product_device import multiply
from powersgd_triton.kernels.reconstruct import reconstruct_triton
from powersgd_triton.ops.reference import rollback_reference
from tests.support.device import EMULATED
from tests.support.kernel_cases import (
    BYPASS,
    ERRORS,
    GRADIENTS,
    INF,
    NAN,
    RANKS,
    Bucket,
    Shape,
    Shapes,
    assert_within,
    mixed,
    over_dtypes,
    rounding,
    small,
    stored,
    uniform,
)
from tests.support.kernel_checks import check_backproject, check_compensate, compensate, pack_and_average
from tests.support.thinned import thinned

either_side = pytest.mark.parametrize("left", [False, True], ids=["right", "left"])


# The highest ranks, of several panels, are tried with errors.
DTYPES = [(gradient, error) for error in (torch.bfloat16, None, torch.float32) for gradient in GRADIENTS]


@either_side
@thinned("rank, shapes, dtypes", RANKS, (mixed, uniform), DTYPES, together=1)
def test_compensate(
    rank: int, shapes: Shapes, dtypes: tuple[torch.dtype, torch.dtype | None], left: bool, device: torch.device
):
    """At each rank, with gradients and errors of each dtype, or without errors."""
    gradient, error = dtypes
    bypass = [] if left else BYPASS
    check_compensate(Bucket(shapes(rank), device, bypass=bypass, gradient=gradient, error=error, seed=rank), left=left)


@either_side
@pytest.mark.parametrize("rank", [2, 17, 40])
def test_product_that_was_not_applied_is_not_looked_at(rank: int, left: bool, device: torch.device):
    """Not even where its factors are not finite."""
    results = []
    for P_hat, Q, applied in ((INF, NAN, 0.0), (0.0, 0.0, 1.0)):
        bucket = Bucket(small(rank), device, seed=rank)
        assert bucket.M is not None
        for memory, value in ((bucket.P_hat, P_hat), (bucket.Q, Q)):
            for view in memory.views:
                view.fill_(value)
        results.append([*compensate(bucket, left=left, applied=applied).cpu(), *bucket.M.cpu()])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@either_side
@thinned("rank, value, gradient", (3, 40), (INF, -INF, NAN), GRADIENTS, together=1)
def test_non_finite_elements_enter_the_product_but_not_M(
    rank: int, value: float, gradient: torch.dtype, left: bool, device: torch.device
):
    """Of the product's panels the first shows it; one column that is not finite is enough."""
    bucket = Bucket(small(rank), device, gradient=gradient)
    assert bucket.M is not None
    (n, m, r), row, column = bucket.shapes[0], rank + 2, rank
    P_hat, Q = bucket.row_factors(bucket.P_hat)[0][row], bucket.column_factors(bucket.Q)[0][column]
    M = bucket.matrices(bucket.M)[0][row, column]
    bucket.G.views[0][row * m + column] = value
    memory = compensate(bucket, left=left, applied=1.0)
    products = bucket.column_factors(memory) if left else bucket.row_factors(memory)
    finite = torch.ones(m if left else n, dtype=torch.bool)
    finite[column if left else row] = False
    launch = bucket.launches.compensate_backproject if left else bucket.launches.compensate_project
    assert torch.equal(products[0][:, : launch.panel].isfinite().all(dim=1), finite)
    assert products[0][finite].isfinite().all()
    assert all(x.isfinite().all() for x in [*products[1:], *bucket.M.cpu()])
    after = bucket.matrices(bucket.M)[0][row, column]
    assert_within(after, M - P_hat @ Q, rounding(r + 1, device) * (M.abs() + P_hat.abs() @ Q.abs()))


@over_dtypes("gradient", GRADIENTS)
def test_every_alignment(gradient: torch.dtype, device: torch.device):
    """Of matrices, and of rows, which start at multiples of 8, 4, 2 and 1 elements."""
    for gap, m in ((8, 64), (4, 68), (2, 70), (1, 71)):
        shapes = [(33, 40, 3), (9, m, 2)]
        check_compensate(Bucket(shapes, device, bypass=[8], gradient=gradient, error=torch.bfloat16, gap=gap))
        check_compensate(Bucket([(9, m, 2), (5, 128, 2)], device, gradient=gradient, gap=0))
    # Without matrices, and without elements.
    for bypass in ([5, 1025], [0]):
        check_compensate(Bucket([], device, bypass=bypass, gradient=gradient))


@thinned("rank, shapes, dtype", RANKS, (mixed, uniform), GRADIENTS, together=1)
def test_backproject(rank: int, shapes: Shapes, dtype: torch.dtype, device: torch.device):
    """Of gradients without error feedback, which are all that kernels take; error buffers are among them."""
    check_backproject(Bucket(shapes(rank), device, bypass=BYPASS, gradient=dtype, error=None, seed=rank))


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_bypass_sum_that_is_not_finite_is_noticed(value: float, device: torch.device):
    for tensor in (0, 2, 3):
        bucket = Bucket([(5, 4, 2)], device, bypass=BYPASS)
        bucket.first.fill(bucket.random(bucket.row_sizes))
        bucket.first.views[1 + tensor][-1] = value
        pack_and_average(bucket, torch.zeros(bucket.table.q_parts_numel, device=device), 2)
        assert int(bucket.finite) == 0
        assert not bucket.first.cpu()[1 + tensor][-1].isfinite()


def reconstruct(bucket: Bucket) -> float:
    """Run the kernel; the verdict."""
    verdict = bucket.scalar(1.0)
    reconstruct_triton(
        bucket.table, bucket.P_hat.flat, bucket.Q.flat, bucket.first.flat, bucket.table.pack_P,
        bucket.launches.reconstruct, out=bucket.pointers_G(), verdict=verdict,
    )  # fmt: skip
    return float(verdict)


@thinned("rank, shapes, dtype", RANKS, (mixed, uniform), GRADIENTS, together=1)
def test_reconstruct(rank: int, shapes: Shapes, dtype: torch.dtype, device: torch.device):
    bucket = Bucket(shapes(rank), device, bypass=BYPASS, gradient=dtype, seed=rank)
    bucket.first.fill(bucket.random(bucket.row_sizes))
    P_hat, Q = bucket.row_factors(bucket.P_hat), bucket.column_factors(bucket.Q)
    bucket.G.poison()
    assert reconstruct(bucket) == 1
    got = bucket.matrices(bucket.G)
    for i, (_, _, r) in enumerate(bucket.shapes):
        truth, size = P_hat[i] @ Q[i].mT, rounding(r, device) * (P_hat[i].abs() @ Q[i].abs().mT)
        assert_within(got[i], truth, size + stored(truth.abs() + size, dtype))
    for tensor, mean in zip(bucket.G.cpu()[len(got) :], bucket.first.double()[len(got) :], strict=True):
        assert_within(tensor, mean, stored(mean.abs(), dtype))
    assert bucket.guarded()
    # NaN is handed on.
    bucket.Q.poison()
    assert reconstruct(bucket) == 0
    assert all(x.isnan().all() for x in bucket.matrices(bucket.G))


@pytest.mark.filterwarnings("ignore:overflow encountered in")
@over_dtypes("dtype", GRADIENTS)
@pytest.mark.parametrize("tensor", [0, 2, -1], ids=["first matrix", "last matrix", "bypass"])
def test_reconstruct_notes_what_does_not_fit(tensor: int, dtype: torch.dtype, device: torch.device):
    """One element out of the dtype's range, the last of its tensor, and as large as it may be."""
    for fits in (True, False):
        bucket = Bucket([(40, 35, 3), (3, 70, 2), (9, 1, 1)], device, bypass=[3000], gradient=dtype)
        bucket.first.fill(bucket.random(bucket.row_sizes))
        largest = torch.finfo(dtype).max
        if tensor == -1:
            # Of finite fp32 numbers only fp16 cannot hold all.
            beyond = 2 * largest if dtype == torch.float16 else INF
            bucket.first.views[-1][-1] = largest if fits else beyond
        else:
            P, Q, r = bucket.P_hat.views[tensor], bucket.Q.views[tensor], bucket.shapes[tensor][2]
            P.zero_()
            P[-r], Q[-r] = 2.0, largest / 2 if fits else largest * 0.75
        assert reconstruct(bucket) == fits
        written = torch.cat([x.view(-1) for x in bucket.G.cpu()])
        assert int((~written.isfinite()).sum()) == (not fits)


def commit(bucket: Bucket, finite: bool, workers: int = 3, advance: bool = True) -> tuple[list[Tensor], float]:
    """Run the kernel; the bases that it was to take over, and the verdict."""
    following = bucket.columns().fill(bucket.random(bucket.column_sizes))
    verdict = bucket.scalar(1.0)
    bucket.finite.fill_(int(finite))
    commit_triton(
        bucket.table, bucket.pointers_G(), bucket.pointers_M(), following.flat if advance else None, workers,
        bucket.finite, basis=bucket.basis.flat, message=bucket.second.flat,
        verdict=verdict,
    )  # fmt: skip
    assert all(memory.guarded() for memory in (bucket.G, bucket.second, bucket.basis, following))
    return following.cpu(), float(verdict)


LARGE: list[Shape] = [(260, 260, 3), (5, 7, 2), (1, 1, 1)]


@pytest.mark.parametrize("advance", [True, False])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_commit_of_a_finite_step(workers: int, advance: bool, device: torch.device):
    bucket = Bucket(LARGE, device, bypass=[3], factor_gap=0)
    assert bucket.M is not None
    bucket.second.fill(bucket.random(bucket.column_sizes))
    M, sums, basis = bucket.M.cpu(), bucket.second.cpu(), bucket.basis.cpu()
    following, verdict = commit(bucket, True, workers, advance)
    assert verdict == 1
    for got, expected in (
        (bucket.second, [x / workers for x in sums]),
        (bucket.basis, following if advance else basis),
        (bucket.M, M),
    ):
        assert all(torch.equal(x, y) for x, y in zip(got.cpu(), expected, strict=True))
    assert bucket.M.guarded()
    without = Bucket([], device, bypass=[5], factor_gap=0)
    assert [commit(without, finite)[1] for finite in (True, False)] == [1, 0]


@over_dtypes("error", [*ERRORS, None])
@over_dtypes("gradient", GRADIENTS)
def test_commit_takes_a_step_back(gradient: torch.dtype, error: torch.dtype | None, device: torch.device):
    bucket = Bucket(LARGE, device, bypass=[3], gradient=gradient, error=error, factor_gap=0)
    bucket.second.fill(bucket.random(bucket.column_sizes))
    for index, value in ((0, INF), (68, -INF), (260 * 260 - 1, NAN)):
        bucket.G.views[0][index] = value
    G, basis = bucket.G.cpu(), bucket.basis.cpu()
    if bucket.M is not None:
        # Beyond the range: what overflowed is given up.
        bucket.M.views[0][1], bucket.M.views[0][2] = INF, NAN
        # In range, but products with it would not be.
        bucket.M.views[0][3], bucket.M.views[0][4] = 3.3e38, -(2.0**111)
        M = bucket.M.cpu()
    _, verdict = commit(bucket, False)
    assert verdict == 0
    assert all(x.isnan().all() for x in bucket.second.cpu())
    assert all(torch.equal(x, y) for x, y in zip(bucket.basis.cpu(), basis, strict=True))
    if bucket.M is None:
        return
    for got, g, m in zip(bucket.M.cpu(), G, M, strict=False):
        expected = m.float().view(1, -1)
        rollback_reference([g.view(1, -1)], [expected], torch.tensor(False))
        # One subtraction in fp32 has one result.
        assert_within(got, expected[0].double(), stored(expected[0].double().abs(), got.dtype))
    assert bucket.M.guarded()


# Products of tiles as tensor cores compute them: three products of tf32 values --------------------------------------

SIZE = 32
# With the emulator, ``triton.jit`` still makes functions of the interpreter.
jit: Any = triton.JITFunction if EMULATED else triton.jit


@jit
def _product_kernel(A, B, out, N: tl.constexpr):
    """out = A B [N, N]."""
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, multiply(tl.load(A + at), tl.load(B + at), "tf32x3"))


def product(A: torch.Tensor, B: torch.Tensor, device: torch.device) -> torch.Tensor:
    out = torch.full((SIZE, SIZE), NAN, device=device)
    _product_kernel[(1,)](A.to(device), B.to(device), out, N=SIZE, enable_fp_fusion=False)
    return out.cpu()


@pytest.fixture
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter too, which does not truncate to tf32."""
    monkeypatch.setattr(product_device, "TENSOR_CORES", tl.constexpr(True))


def test_tiles_are_nearly_as_exact_as_in_fp32(on_tensor_cores: None, device: torch.device):
    generator = torch.Generator().manual_seed(0)
    for exponent in (0, 30, -30):
        A, B = torch.randn(2, SIZE, SIZE, generator=generator) * 2.0**exponent
        # One product each, which no others hide.
        for left in (A, torch.diag(A.diagonal())):
            truth, size = left.double() @ B.double(), left.abs().double() @ B.abs().double()
            assert_within(product(left, B, device), truth, rounding(SIZE, torch.device("cuda")) * size)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [INF, -INF, NAN, torch.finfo(torch.float32).max])
def test_what_is_not_finite_in_a_tile_stays_where_it_is(on_tensor_cores: None, value: float, device: torch.device):
    generator = torch.Generator().manual_seed(1)
    A, B = torch.randn(2, SIZE, SIZE, generator=generator)
    A[3, 5] = value
    found = product(A, B, device).isfinite()
    assert not found[3].any()
    assert found.sum() == SIZE * (SIZE - 1)
