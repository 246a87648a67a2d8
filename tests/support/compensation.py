"""Set-up and checks that the two kernels share which compensate: M ← G + growth · (M − applied · P_hat Qᵀ)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.bounds import assert_within
from tests.support.kernel_cases import GROWTH, INF, NAN, Bucket, Memory, mixed, rounding, stored


def check_compensation(
    bucket: Bucket,
    run: Callable[[], Memory],
    reference: Callable[..., None],
    factors: Memory,
    applied: float,
    *,
    left: bool,
) -> None:
    """Run a kernel with ``GROWTH`` and compare M and the product with fp64 truth; so too the reference.

    Args:
        bucket: its M, P_hat and Q are compensated with.
        run: launches the kernel and returns the product's memory.
        reference: of the kernel.
        factors: what M is multiplied by.
        applied: whether P_hat Qᵀ is subtracted, 1 or 0.
        left: the product is Mᵀ · factors, in place of M · factors.
    """
    feedback = bucket.M is not None
    kernel_launch = bucket.launches.compensate_backproject if left else bucket.launches.compensate_project
    panel, device = kernel_launch.panel, bucket.device
    factors_of, products_of = bucket.column_factors, bucket.row_factors
    if left:
        factors_of, products_of = products_of, factors_of
    G, P_hat, Q = bucket.matrices(bucket.G), bucket.row_factors(bucket.P_hat), bucket.column_factors(bucket.Q)
    M = [torch.zeros_like(x) for x in G] if bucket.M is None else bucket.matrices(bucket.M)
    right = factors_of(factors)
    inputs = [bucket.G, bucket.P_hat, bucket.Q, factors]
    before = [memory.cpu() for memory in inputs]
    products = products_of(run())
    M_after = G if bucket.M is None else bucket.matrices(bucket.M)
    growth, pending = (GROWTH, applied) if feedback else (1.0, 0.0)
    for i, (_, _, r) in enumerate(bucket.shapes):
        truth = G[i] + growth * (M[i] - pending * (P_hat[i] @ Q[i].mT))
        # r products and their sum, one subtraction, one multiplication, one addition.
        size = G[i].abs() + growth * (M[i].abs() + pending * (P_hat[i].abs() @ Q[i].abs().mT))
        error, lost = rounding(r + 3, device) * size, torch.zeros_like(size)
        if bucket.M is not None:
            lost = stored(truth.abs() + error, bucket.M.flat.dtype, device)
            assert_within(M_after[i], truth, error + lost)
        if left:
            truth, size, error, lost = truth.mT, size.mT, error.mT, lost.mT
        terms = rounding(truth.shape[1], device)
        slack = error @ right[i].abs() + terms * ((size + error) @ right[i].abs())
        # Further panels read M as it was stored.
        slack[:, panel:] += (lost @ right[i].abs() * (1 + terms))[:, panel:]
        assert_within(products[i], truth @ right[i], slack)
        if bucket.M is not None and bucket.M.flat.dtype == torch.float32:
            out = torch.full((1, *products[i].shape), NAN)
            reference(
                [G[i].float()], [M[i].float()], P_hat[i][None].float(), Q[i][None].float(), torch.tensor(pending),
                right[i][None].float(), growth=torch.tensor(growth), out=out,
            )  # fmt: skip
            assert_within(out[0], truth @ right[i], slack)
    for memory, old in zip(inputs, before, strict=True):
        assert all(torch.equal(new, values) for new, values in zip(memory.cpu(), old, strict=True))
        assert memory.guarded()
    assert bucket.guarded()
    assert int(bucket.finite) == 1


def never_applied(rank: int, device: torch.device) -> tuple[Bucket, Bucket]:
    """The same bucket twice: with a product of factors that are not finite, and with one of zeros."""
    bucket, plain = (Bucket(mixed(rank), device, seed=rank) for _ in range(2))
    for one, P_hat, Q in ((bucket, INF, NAN), (plain, 0.0, 0.0)):
        for memory, value in ((one.P_hat, P_hat), (one.Q, Q)):
            for view in memory.views:
                view.fill_(value)
    return bucket, plain


def assert_equal_errors(bucket: Bucket, other: Bucket) -> None:
    assert bucket.M is not None
    assert other.M is not None
    assert all(torch.equal(x, y) for x, y in zip(bucket.M.cpu(), other.M.cpu(), strict=True))


def check_non_finite_element(
    bucket: Bucket, row: int, column: int, value: float, run: Callable[[], list[Tensor]], *, left: bool
) -> None:
    """One element of the first gradient is not finite: the product shows it where it must, and M stays finite.

    Args:
        bucket: with error buffers.
        row, column: the element.
        value: of it.
        run: launches the kernel on a product that was applied and returns the products, row by row.
        left: as for ``check_compensation``.
    """
    assert bucket.M is not None
    n, m, r = bucket.shapes[0]
    P_hat, Q = bucket.row_factors(bucket.P_hat)[0][row], bucket.column_factors(bucket.Q)[0][column]
    M = bucket.matrices(bucket.M)[0][row, column]
    bucket.G.views[0][row * m + column] = value
    products = run()
    finite = torch.ones(m if left else n, dtype=torch.bool)
    finite[column if left else row] = False
    # The other panels need not show it: one column that is not finite is enough.
    launch = bucket.launches.compensate_backproject if left else bucket.launches.compensate_project
    assert torch.equal(products[0][:, : launch.panel].isfinite().all(dim=1), finite)
    assert products[0][finite].isfinite().all()
    assert all(x.isfinite().all() for x in [*products[1:], *bucket.M.cpu()])
    after = bucket.matrices(bucket.M)[0][row, column]
    assert_within(after, M - P_hat @ Q, rounding(r + 1, bucket.device) * (M.abs() + P_hat.abs() @ Q.abs()))
