"""The left half of the alternating algorithm against fp64 truth; the reference is held to the same bounds."""

from __future__ import annotations

import functools

import pytest
import torch

from powersgd_triton.kernels.compensate_backproject import compensate_backproject_triton
from powersgd_triton.kernels.pack import pack_triton
from powersgd_triton.ops.reference import compensate_backproject_reference
from tests.support.compensation import (
    assert_equal_errors,
    check_compensation,
    check_non_finite_element,
    never_applied,
)
from tests.support.kernel_cases import (
    ERRORS,
    GRADIENTS,
    GROWTH,
    INF,
    NAN,
    RANKS,
    Bucket,
    Memory,
    Shapes,
    mixed,
    small,
    uniform,
)
from tests.support.thinned import thinned


def compensate_backproject(bucket: Bucket, P: Memory, applied: float = 0.0, growth: float = 1.0) -> Memory:
    """Run the kernel and the packing behind it; Q in the second message, and once more as this worker's own."""
    parts, own = bucket.parts(bucket.table.q_parts_numel), bucket.columns()
    compensate_backproject_triton(
        bucket.table,
        bucket.pointers_G(),
        bucket.pointers_M(),
        bucket.P_hat.flat,
        bucket.Q.flat,
        bucket.scalar(applied),
        bucket.scalar(growth),
        P.flat,
        bucket.launches.compensate_backproject,
        bucket.launches.backproject,
        out=parts.flat,
    )
    bucket.finite.fill_(0)
    pack_triton(
        bucket.table.pack_left, parts.flat, bucket.pointers_G(), bucket.finite, own=own.flat, message=bucket.second.flat
    )
    assert parts.guarded()
    assert own.guarded()
    pairs = zip(own.views, bucket.second.views, strict=True)
    assert all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in pairs)
    return bucket.second


def check(bucket: Bucket, applied: float) -> None:
    basis = bucket.rows().fill(bucket.random(bucket.row_sizes))
    run = functools.partial(compensate_backproject, bucket, basis, applied, GROWTH)
    check_compensation(bucket, run, compensate_backproject_reference, basis, applied, left=True)


@thinned("rank, shapes", RANKS, (mixed, uniform), together=1)
def test_compensate_backproject(rank: int, shapes: Shapes, device: torch.device):
    check(Bucket(shapes(rank), device, seed=rank), applied=1.0)


@thinned("rank, gradient, error", (1, 4, 17, 40), GRADIENTS, [*ERRORS, None])
def test_compensate_backproject_dtypes(
    rank: int, gradient: torch.dtype, error: torch.dtype | None, device: torch.device
):
    check(Bucket(small(rank), device, gradient=gradient, error=error, seed=rank), applied=1.0)


@pytest.mark.parametrize("rank", [2, 17, 40])
def test_product_that_was_not_applied_is_not_looked_at(rank: int, device: torch.device):
    bucket, plain = never_applied(rank, device)
    P = bucket.rows().fill(bucket.random(bucket.row_sizes))
    Q, expected = compensate_backproject(bucket, P), compensate_backproject(plain, P, applied=1.0)
    assert all(torch.equal(x, y) for x, y in zip(Q.cpu(), expected.cpu(), strict=True))
    assert_equal_errors(bucket, plain)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@thinned("rank, value, gradient", (3, 40), (INF, -INF, NAN), GRADIENTS)
def test_non_finite_elements_enter_Q_but_not_M(rank: int, value: float, gradient: torch.dtype, device: torch.device):
    bucket = Bucket(small(rank), device, gradient=gradient)
    basis = bucket.rows().fill(bucket.random(bucket.row_sizes))
    n, m, _ = bucket.shapes[0]

    def run() -> list[torch.Tensor]:
        return bucket.column_factors(compensate_backproject(bucket, basis, applied=1.0))

    check_non_finite_element(bucket, n // 2, m - 1, value, run, left=True)
