"""The end of a step: what it takes over, and what it takes back where the step is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from powersgd_triton.kernels.commit import commit_triton
from powersgd_triton.ops.reference import largest_error, rollback_reference
from tests.support.bounds import assert_within
from tests.support.kernel_cases import ERRORS, GRADIENTS, INF, NAN, Bucket, Shape, over_dtypes, stored


def commit(bucket: Bucket, finite: bool, workers: int = 3, advance: bool = True) -> tuple[list[Tensor], float]:
    """Run the kernel; the bases that it was to take over, and the verdict."""
    following = bucket.columns().fill(bucket.random(bucket.column_sizes))
    verdict = bucket.scalar(1.0)
    bucket.finite.fill_(int(finite))
    commit_triton(
        bucket.table, bucket.pointers_G(), bucket.pointers_M(), following.flat if advance else None, workers,
        bucket.finite, largest=largest_error(torch.float32), basis=bucket.basis.flat, message=bucket.second.flat,
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
        assert_within(got, expected[0].double(), stored(expected[0].double().abs(), got.dtype, device))
    assert bucket.M.guarded()
