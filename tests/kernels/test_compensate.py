"""The kernels that compensate and multiply, M Q and Mᵀ P, and their reference, against fp64 truth."""

from __future__ import annotations

import pytest
import torch

from tests.support.bounds import assert_within
from tests.support.kernel_cases import (
    BYPASS,
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
    uniform,
)
from tests.support.kernel_checks import check_compensate, compensate
from tests.support.thinned import thinned

either_side = pytest.mark.parametrize("left", [False, True], ids=["right", "left"])


@either_side
@thinned("rank, shapes, error", RANKS, (mixed, uniform), ERRORS, together=1)
def test_compensate(rank: int, shapes: Shapes, error: torch.dtype, left: bool, device: torch.device):
    bypass = [] if left else BYPASS
    check_compensate(Bucket(shapes(rank), device, bypass=bypass, gradient=error, error=error, seed=rank), left=left)


@either_side
@thinned("gradient, error, rank", GRADIENTS, [*ERRORS, None], (1, 4, 17, 40))
def test_dtypes(rank: int, gradient: torch.dtype, error: torch.dtype | None, left: bool, device: torch.device):
    check_compensate(Bucket(small(rank), device, gradient=gradient, error=error, seed=rank), left=left)


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
