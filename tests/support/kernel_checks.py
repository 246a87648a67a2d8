"""Run a kernel on a bucket, and compare what it and the reference compute with fp64 truth."""

from __future__ import annotations

import functools

import torch

from powersgd_triton.kernels.backproject import backproject_triton
from powersgd_triton.kernels.compensate_project import compensate_project_triton
from powersgd_triton.kernels.pack import pack_and_average_triton, pack_triton
from powersgd_triton.ops.reference import backproject_reference, compensate_project_reference
from tests.support.bounds import assert_within
from tests.support.compensation import check_compensation
from tests.support.kernel_cases import GROWTH, NAN, Bucket, Memory, rounding


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
    matrices, run = len(bucket.shapes), functools.partial(compensate_project, bucket, applied, GROWTH)
    check_compensation(bucket, run, compensate_project_reference, bucket.basis, applied, left=False)
    for got, tensor in zip(bucket.first.cpu()[matrices:], bucket.G.cpu()[matrices:], strict=True):
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
        bucket.pointers_G(),
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
