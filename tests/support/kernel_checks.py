"""Run a kernel on a bucket, and compare what it and the reference compute with fp64 truth."""

from __future__ import annotations

import torch

from powersgd_triton.kernels.backproject import backproject_triton
from powersgd_triton.kernels.compensate_project import compensate_project_triton
from powersgd_triton.kernels.pack import pack_and_average_triton, pack_triton
from powersgd_triton.ops.reference import backproject_reference, compensate_project_reference
from tests.support.bounds import assert_within
from tests.support.kernel_cases import GROWTH, NAN, Bucket, Memory, rounding, stored


def compensate_project(bucket: Bucket, applied: float = 0.0, growth: float = 1.0) -> Memory:
    """Run the kernel and the packing behind it; P in the first message."""
    parts = bucket.parts(bucket.table.p_parts_numel)
    compensate_project_triton(
        bucket.table,
        bucket.pointers_G(),
        bucket.pointers_M(),
        bucket.P_hat.flat,
        bucket.Q.flat,
        bucket.scalar(applied),
        bucket.scalar(growth),
        bucket.basis.flat,
        bucket.launches.compensate_project,
        out=parts.flat,
    )
    assert parts.guarded()
    bucket.finite.fill_(0 if len(bucket.table.pack_P) else 1)
    G, entries = bucket.pointers_G(), bucket.table.pack_P
    pack_triton(entries, parts.flat, G, bucket.finite, own=None, message=bucket.first.flat)
    return bucket.first


def check_compensate_project(bucket: Bucket, applied: float) -> None:
    G, P_hat, Q = bucket.matrices(bucket.G), bucket.row_factors(bucket.P_hat), bucket.column_factors(bucket.Q)
    M = [torch.zeros_like(x) for x in G] if bucket.M is None else bucket.matrices(bucket.M)
    basis, inputs = bucket.column_factors(bucket.basis), [bucket.G, bucket.P_hat, bucket.Q, bucket.basis]
    before = [memory.cpu() for memory in inputs]
    P = bucket.row_factors(compensate_project(bucket, applied, GROWTH))
    if bucket.M is None:
        applied = 0.0
    M_after = G if bucket.M is None else bucket.matrices(bucket.M)
    panel = bucket.launches.compensate_project.panel
    for i, (n, m, r) in enumerate(bucket.shapes):
        growth = 1.0 if bucket.M is None else GROWTH
        truth = G[i] + growth * (M[i] - applied * (P_hat[i] @ Q[i].mT))
        # r products and their sum, one subtraction, one multiplication, one addition.
        size = G[i].abs() + growth * (M[i].abs() + applied * (P_hat[i].abs() @ Q[i].abs().mT))
        error = rounding(r + 3, bucket.device) * size
        lost = torch.zeros_like(size)
        if bucket.M is not None:
            lost = stored(truth.abs() + error, bucket.M.flat.dtype, bucket.device)
            assert_within(M_after[i], truth, error + lost)
        slack = error @ basis[i].abs() + rounding(m, bucket.device) * ((size + error) @ basis[i].abs())
        # Further panels read M as it was stored.
        slack[:, panel:] += (lost @ basis[i].abs() * (1 + rounding(m, bucket.device)))[:, panel:]
        assert_within(P[i], truth @ basis[i], slack)
        if bucket.M is not None and bucket.M.flat.dtype == torch.float32:
            out = torch.full((1, n, r), NAN)
            compensate_project_reference(
                [G[i].float()], [M[i].float()], P_hat[i][None].float(), Q[i][None].float(), torch.tensor(applied),
                basis[i][None].float(), growth=torch.tensor(GROWTH), out=out,
            )  # fmt: skip
            assert_within(out[0], truth @ basis[i], slack)
    for memory, old in zip(inputs, before, strict=True):
        assert all(torch.equal(new, values) for new, values in zip(memory.cpu(), old, strict=True))
    assert bucket.guarded()
    assert int(bucket.finite) == 1
    for got, tensor in zip(bucket.first.cpu()[len(G) :], bucket.G.cpu()[len(G) :], strict=True):
        assert torch.equal(got, tensor.float())


def check_backproject(bucket: Bucket, workers: int = 3) -> None:
    memory = bucket.G if bucket.M is None else bucket.M
    pointers = bucket.pointers_M() or bucket.pointers_G()
    M, P_hat, before = bucket.matrices(memory), bucket.row_factors(bucket.P_hat), memory.cpu()
    bucket.first.fill(bucket.random(bucket.row_sizes))
    message = bucket.first.cpu()
    parts = bucket.parts(bucket.table.q_parts_numel)
    bucket.Q.poison()
    backproject_triton(bucket.table, pointers, bucket.P_hat.flat, bucket.launches.backproject, out=parts.flat)
    assert parts.guarded()
    pack_and_average_triton(
        bucket.table,
        parts.flat,
        bucket.first.flat,
        workers,
        bucket.finite,
        own=bucket.Q.flat,
        message=bucket.second.flat,
    )
    Q = bucket.column_factors(bucket.Q)
    for i, (n, m, r) in enumerate(bucket.shapes):
        bound = rounding(n, bucket.device) * (M[i].abs().mT @ P_hat[i].abs())
        assert_within(Q[i], M[i].mT @ P_hat[i], bound)
        out = torch.full((1, m, r), NAN)
        backproject_reference([M[i].float()], P_hat[i][None].float(), out=out)
        assert_within(out[0], M[i].mT @ P_hat[i], bound)
    assert all(torch.equal(x, y) for x, y in zip(bucket.Q.cpu(), bucket.second.cpu(), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(memory.cpu(), before, strict=True))
    for i, (got, old) in enumerate(zip(bucket.first.cpu(), message, strict=True)):
        assert torch.equal(got, old if i < len(M) else old / workers)
    assert bucket.guarded()
    assert int(bucket.finite) == 1
