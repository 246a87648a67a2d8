"""The kernels that multiply and pack against fp64 truth; the reference is held to the same bounds."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton.kernels.pack import pack_and_average_triton, pack_triton
from powersgd_triton.kernels.reconstruct import reconstruct_triton
from powersgd_triton.ops.reference import reconstruct_reference
from tests.support.bounds import assert_within
from tests.support.compensation import assert_equal_errors, check_non_finite_element, never_applied
from tests.support.kernel_cases import (
    ERRORS,
    GRADIENTS,
    INF,
    NAN,
    RANKS,
    Bucket,
    Shapes,
    mixed,
    over_dtypes,
    rounding,
    small,
    stored,
    uniform,
)
from tests.support.kernel_checks import check_backproject, check_compensate_project, compensate_project
from tests.support.thinned import thinned

BYPASS = [1, 0, 1500, 3]


# Compensate, project, pack ------------------------------------------------------------------------------------------


@thinned("rank, error, shapes", RANKS, ERRORS, (mixed, uniform))
def test_compensate_project(rank: int, error: torch.dtype, shapes: Shapes, device: torch.device):
    bucket = Bucket(shapes(rank), device, bypass=BYPASS, gradient=error, error=error, seed=rank)
    check_compensate_project(bucket, applied=1.0)


@thinned("rank, gradient, error", RANKS, GRADIENTS, [*ERRORS, None])
def test_compensate_project_dtypes(rank: int, gradient: torch.dtype, error: torch.dtype | None, device: torch.device):
    bucket = Bucket(small(rank), device, bypass=[3], gradient=gradient, error=error, seed=rank)
    check_compensate_project(bucket, applied=1.0)


@pytest.mark.parametrize("rank", [2, 17, 40])
def test_product_that_was_not_applied_is_not_looked_at(rank: int, device: torch.device):
    bucket, plain = never_applied(rank, device)
    P, expected = compensate_project(bucket, applied=0.0), compensate_project(plain, applied=1.0)
    assert all(torch.equal(x, y) for x, y in zip(P.cpu(), expected.cpu(), strict=True))
    assert_equal_errors(bucket, plain)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@thinned("rank, value, gradient", (3, 40), (INF, -INF, NAN), GRADIENTS)
def test_non_finite_elements_enter_P_but_not_M(rank: int, value: float, gradient: torch.dtype, device: torch.device):
    bucket = Bucket(small(rank), device, bypass=[4], gradient=gradient)
    n, m, _ = bucket.shapes[0]
    check_non_finite_element(
        bucket, n - 1, m // 2, value, lambda: bucket.row_factors(compensate_project(bucket, applied=1.0)), left=False
    )


@pytest.mark.parametrize("gap", [8, 4, 2, 1])
@over_dtypes("gradient", GRADIENTS)
def test_every_alignment(gradient: torch.dtype, gap: int, device: torch.device):
    bucket = Bucket([(33, 40, 3), (17, 16, 3)], device, bypass=[8], gradient=gradient, error=torch.bfloat16, gap=gap)
    check_compensate_project(bucket, applied=1.0)


@pytest.mark.parametrize("m", [64, 68, 70, 71])
def test_every_width(m: int, device: torch.device):
    """Rows start at multiples of 8, 4, 2 and 1 elements."""
    bucket = Bucket([(9, m, 2), (5, 128, 2)], device, gap=0)
    check_compensate_project(bucket, applied=1.0)


def test_bucket_without_matrices_or_without_elements(device: torch.device):
    for bypass in ([5, 1025], [0]):
        bucket = Bucket([], device, bypass=bypass)
        check_compensate_project(bucket, applied=1.0)


def test_sums_of_parts_are_exact_for_integers(device: torch.device):
    """Every part of every factor is added once, and none of a neighbour's."""
    bucket = Bucket([(3, 1000, 3), (700, 2, 2), (40, 300, 1), (1000, 5, 5)], device, bypass=[2])
    table = bucket.table
    for records, numel, sizes, first in (
        (table.records[:, 5].tolist(), table.p_parts_numel, bucket.row_sizes, True),
        (table.records[:, 6].tolist(), table.q_parts_numel, bucket.column_sizes, False),
    ):
        parts = torch.randint(-1000, 1000, (numel,), generator=bucket.generator).float().to(device)
        if first:
            pack_triton(table.pack_P, parts, bucket.pointers_G(), bucket.finite, own=None, message=bucket.first.flat)
            results = [bucket.first]
        else:
            results = [bucket.second, bucket.Q]
            pack_and_average_triton(
                table, parts, bucket.pointers_G(), bucket.first.flat, 1, bucket.finite, own=bucket.Q.flat,
                message=bucket.second.flat,
            )  # fmt: skip
        ends = [*records[1:], numel]
        assert max((end - start) // size for start, end, size in zip(records, ends, sizes, strict=False)) > 1
        for memory in results:
            for start, end, size, got in zip(records, ends, sizes, memory.cpu(), strict=False):
                assert torch.equal(got, parts[start:end].cpu().view(-1, size).sum(dim=0))
    assert bucket.guarded()


# Backproject --------------------------------------------------------------------------------------------------------


@thinned("rank, shapes", RANKS, (mixed, uniform), together=1)
def test_backproject(rank: int, shapes: Shapes, device: torch.device):
    check_backproject(Bucket(shapes(rank), device, bypass=BYPASS, seed=rank))


@thinned("rank, dtype", RANKS, GRADIENTS, together=1)
def test_backproject_dtypes(rank: int, dtype: torch.dtype, device: torch.device):
    """Of gradients without error feedback, which are all that kernels take; error buffers are among them."""
    check_backproject(Bucket(small(rank), device, bypass=[3], gradient=dtype, error=None, seed=rank))


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("tensor", [0, 2, 3])
def test_bypass_sum_that_is_not_finite_is_noticed(tensor: int, value: float, device: torch.device):
    bucket = Bucket([(5, 4, 2)], device, bypass=BYPASS)
    bucket.first.fill(bucket.random(bucket.row_sizes))
    bucket.first.views[1 + tensor][-1] = value
    parts = torch.zeros(bucket.table.q_parts_numel, device=device)
    pack_and_average_triton(
        bucket.table, parts, bucket.pointers_G(), bucket.first.flat, 2, bucket.finite, own=bucket.Q.flat,
        message=bucket.second.flat,
    )  # fmt: skip
    assert int(bucket.finite) == 0
    assert not bucket.first.cpu()[1 + tensor][-1].isfinite()


# Reconstruct --------------------------------------------------------------------------------------------------------


def check_reconstruct(bucket: Bucket) -> None:
    dtype = bucket.G.flat.dtype
    bucket.first.fill(bucket.random(bucket.row_sizes))
    P_hat, Q = bucket.row_factors(bucket.P_hat), bucket.column_factors(bucket.Q)
    bucket.G.poison()
    verdict = torch.ones((), device=bucket.device)
    reconstruct_triton(
        bucket.table, bucket.P_hat.flat, bucket.Q.flat, bucket.first.flat, bucket.table.pack_P,
        bucket.launches.reconstruct, out=bucket.pointers_G(), verdict=verdict,
    )  # fmt: skip
    got = bucket.matrices(bucket.G)
    for i, (n, m, r) in enumerate(bucket.shapes):
        truth, size = P_hat[i] @ Q[i].mT, rounding(r, bucket.device) * (P_hat[i].abs() @ Q[i].abs().mT)
        bound = size + stored(truth.abs() + size, dtype, bucket.device)
        assert_within(got[i], truth, bound)
        out = torch.full((n, m), NAN, dtype=dtype)
        reconstruct_reference(P_hat[i][None].float(), Q[i][None].float(), out=[out])
        assert_within(out, truth, bound)
    for tensor, mean in zip(bucket.G.cpu()[len(got) :], bucket.first.double()[len(got) :], strict=True):
        assert_within(tensor, mean, stored(mean.abs(), dtype, bucket.device))
    assert bucket.guarded()
    assert verdict == 1


@thinned("rank, shapes", RANKS, (mixed, uniform), together=1)
def test_reconstruct(rank: int, shapes: Shapes, device: torch.device):
    check_reconstruct(Bucket(shapes(rank), device, bypass=BYPASS, seed=rank))


@thinned("rank, dtype", RANKS, GRADIENTS, together=1)
def test_reconstruct_dtypes(rank: int, dtype: torch.dtype, device: torch.device):
    check_reconstruct(Bucket(small(rank), device, bypass=[3], gradient=dtype, seed=rank))


def test_reconstruct_hands_NaN_on(device: torch.device):
    bucket = Bucket(mixed(3), device, bypass=[2])
    bucket.first.fill(bucket.random(bucket.row_sizes))
    bucket.Q.poison()
    verdict = torch.ones((), device=device)
    reconstruct_triton(
        bucket.table, bucket.P_hat.flat, bucket.Q.flat, bucket.first.flat, bucket.table.pack_P,
        bucket.launches.reconstruct, out=bucket.pointers_G(), verdict=verdict,
    )  # fmt: skip
    *matrices, bypass = bucket.G.cpu()
    assert all(x.isnan().all() for x in matrices)
    assert bypass.isfinite().all()
    assert verdict == 0


@pytest.mark.filterwarnings("ignore:overflow encountered in")
@over_dtypes("dtype", GRADIENTS)
@pytest.mark.parametrize("tensor", [0, 4, -1], ids=["first matrix", "last matrix", "bypass"])
def test_reconstruct_notes_what_does_not_fit(tensor: int, dtype: torch.dtype, device: torch.device):
    """One element out of the dtype's range, the last of its tensor, and as large as it may be."""
    for fits in (True, False):
        bucket = Bucket(mixed(3), device, bypass=[3000], gradient=dtype)
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
        verdict = torch.ones((), device=device)
        reconstruct_triton(
            bucket.table, bucket.P_hat.flat, bucket.Q.flat, bucket.first.flat, bucket.table.pack_P,
            bucket.launches.reconstruct, out=bucket.pointers_G(), verdict=verdict,
        )  # fmt: skip
        written = torch.cat([x.view(-1) for x in bucket.G.cpu()])
        assert int((~written.isfinite()).sum()) == (not fits)
        assert float(verdict) == fits


def test_same_input_same_bits(device: torch.device):
    results = []
    for _ in range(2):
        bucket = Bucket(mixed(17), device, bypass=BYPASS, seed=1)
        compensate_project(bucket, applied=1.0)
        check_backproject(bucket)
        assert bucket.M is not None
        results.append([*bucket.first.cpu(), *bucket.M.cpu(), *bucket.Q.cpu()])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
