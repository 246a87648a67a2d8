"""The left half of the alternating algorithm against fp64 truth; the reference is held to the same bounds."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton.kernels.compensate_backproject import compensate_backproject_triton
from powersgd_triton.kernels.pack import pack_triton
from powersgd_triton.ops.reference import compensate_backproject_reference
from tests.support.bounds import assert_within
from tests.support.kernel_cases import (
    ERRORS,
    GRADIENTS,
    GROWTH,
    INF,
    NAN,
    RANKS,
    SHAPES,
    Bucket,
    Memory,
    Shapes,
    mixed,
    over_dtypes,
    rounding,
    small,
    stored,
)


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
    G, P_prev, Q_prev = bucket.matrices(bucket.G), bucket.row_factors(bucket.P_hat), bucket.column_factors(bucket.Q)
    M = [torch.zeros_like(x) for x in G] if bucket.M is None else bucket.matrices(bucket.M)
    P, inputs = bucket.row_factors(basis), [bucket.G, bucket.P_hat, bucket.Q, basis]
    before = [memory.cpu() for memory in inputs]
    Q = bucket.column_factors(compensate_backproject(bucket, basis, applied, GROWTH))
    applied = 0.0 if bucket.M is None else applied
    M_after = G if bucket.M is None else bucket.matrices(bucket.M)
    panel = bucket.launches.compensate_backproject.panel
    for i, (n, m, r) in enumerate(bucket.shapes):
        growth = 1.0 if bucket.M is None else GROWTH
        truth = G[i] + growth * (M[i] - applied * (P_prev[i] @ Q_prev[i].mT))
        # r products and their sum, one subtraction, one multiplication, one addition.
        size = G[i].abs() + growth * (M[i].abs() + applied * (P_prev[i].abs() @ Q_prev[i].abs().mT))
        error, lost = rounding(r + 3, bucket.device) * size, torch.zeros_like(size)
        if bucket.M is not None:
            lost = stored(truth.abs() + error, bucket.M.flat.dtype, bucket.device)
            assert_within(M_after[i], truth, error + lost)
        left = P[i].abs().mT
        slack = left @ error + rounding(n, bucket.device) * (left @ (size + error))
        # Further panels read M as it was stored.
        slack[panel:] += (left @ lost * (1 + rounding(n, bucket.device)))[panel:]
        assert_within(Q[i], truth.mT @ P[i], slack.mT)
        if bucket.M is not None and bucket.M.flat.dtype == torch.float32:
            out = torch.full((1, m, r), NAN)
            compensate_backproject_reference(
                [G[i].float()], [M[i].float()], P_prev[i][None].float(), Q_prev[i][None].float(),
                torch.tensor(applied), P[i][None].float(), growth=torch.tensor(GROWTH), out=out,
            )  # fmt: skip
            assert_within(out[0], truth.mT @ P[i], slack.mT)
    for memory, old in zip(inputs, before, strict=True):
        assert all(torch.equal(new, values) for new, values in zip(memory.cpu(), old, strict=True))
        assert memory.guarded()
    assert bucket.guarded()
    assert int(bucket.finite) == 1


@SHAPES
@pytest.mark.parametrize("rank", RANKS)
def test_compensate_backproject(rank: int, shapes: Shapes, device: torch.device):
    check(Bucket(shapes(rank), device, seed=rank), applied=1.0)


@over_dtypes("error", [*ERRORS, None])
@over_dtypes("gradient", GRADIENTS)
@pytest.mark.parametrize("rank", [1, 4, 17, 40])
def test_compensate_backproject_dtypes(
    rank: int, gradient: torch.dtype, error: torch.dtype | None, device: torch.device
):
    check(Bucket(small(rank), device, gradient=gradient, error=error, seed=rank), applied=1.0)


@pytest.mark.parametrize("rank", [2, 17, 40])
def test_product_that_was_not_applied_is_not_looked_at(rank: int, device: torch.device):
    bucket, plain = (Bucket(mixed(rank), device, seed=rank) for _ in range(2))
    P = bucket.rows().fill(bucket.random(bucket.row_sizes))
    for memory, value in ((bucket.P_hat, INF), (bucket.Q, NAN)):
        for view in memory.views:
            view.fill_(value)
    for memory in (plain.P_hat, plain.Q):
        for view in memory.views:
            view.zero_()
    Q, expected = compensate_backproject(bucket, P), compensate_backproject(plain, P, applied=1.0)
    assert all(torch.equal(x, y) for x, y in zip(Q.cpu(), expected.cpu(), strict=True))
    assert bucket.M is not None
    assert plain.M is not None
    assert all(torch.equal(x, y) for x, y in zip(bucket.M.cpu(), plain.M.cpu(), strict=True))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@over_dtypes("gradient", GRADIENTS)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("rank", [3, 40])
def test_non_finite_elements_enter_Q_but_not_M(rank: int, value: float, gradient: torch.dtype, device: torch.device):
    bucket = Bucket(small(rank), device, gradient=gradient)
    assert bucket.M is not None
    basis = bucket.rows().fill(bucket.random(bucket.row_sizes))
    n, m, r = bucket.shapes[0]
    row, column = n // 2, m - 1
    bucket.G.views[0][row * m + column] = value
    P_prev, Q_prev = bucket.row_factors(bucket.P_hat)[0][row], bucket.column_factors(bucket.Q)[0][column]
    M = bucket.matrices(bucket.M)[0][row, column]
    Q = bucket.column_factors(compensate_backproject(bucket, basis, applied=1.0))
    expected = torch.ones(m, dtype=torch.bool)
    expected[column] = False
    # The other panels need not show it: one column that is not finite is enough.
    panel = bucket.launches.compensate_backproject.panel
    assert torch.equal(Q[0][:, :panel].isfinite().all(dim=1), expected)
    assert Q[0][expected].isfinite().all()
    assert all(x.isfinite().all() for x in [*Q[1:], *bucket.M.cpu()])
    after = bucket.matrices(bucket.M)[0][row, column]
    assert_within(after, M - P_prev @ Q_prev, rounding(r + 1, device) * (M.abs() + P_prev.abs() @ Q_prev.abs()))
