"""The kernels that multiply and pack against fp64 truth."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton.kernels.reconstruct import reconstruct_triton
from tests.support.bounds import assert_within
from tests.support.kernel_cases import (
    BYPASS,
    GRADIENTS,
    INF,
    NAN,
    RANKS,
    Bucket,
    Shapes,
    mixed,
    over_dtypes,
    rounding,
    stored,
    uniform,
)
from tests.support.kernel_checks import check_backproject, pack_and_average
from tests.support.thinned import thinned


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
        assert_within(got[i], truth, size + stored(truth.abs() + size, dtype, device))
    for tensor, mean in zip(bucket.G.cpu()[len(got) :], bucket.first.double()[len(got) :], strict=True):
        assert_within(tensor, mean, stored(mean.abs(), dtype, device))
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
