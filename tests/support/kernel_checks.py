"""Kernels on a bucket, and steps of a backend of kernels, against fp64 truth."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.kernels.backproject import backproject_triton, compensate_backproject_triton
from powersgd_triton.kernels.compensate_project import compensate_project_triton
from powersgd_triton.kernels.pack import pack_triton
from powersgd_triton.ops.wire import Wire
from tests.support.checks import step
from tests.support.kernel_cases import GROWTH, Bucket, Bytes, Memory, assert_within, rounding, stored


def compensate(bucket: Bucket, *, left: bool, applied: float = 0.0, growth: float = 1.0) -> Memory:
    """M ← G + growth · (M − applied · P_hat Qᵀ), and its product with a basis: Mᵀ P if ``left``, else M Q.

    Run the kernel and the packing behind it, into a message; Mᵀ P once more as this worker's own.
    """
    table, launches = bucket.table, bucket.launches
    parts = bucket.parts(table.q_parts_numel if left else table.p_parts_numel)
    entries, message = (table.pack_left, bucket.second) if left else (table.pack_P, bucket.first)
    operands = (
        table, bucket.pointers_G(), bucket.pointers_M(), (bucket.P_hat.flat, bucket.Q.flat, bucket.scalar(applied)),
        bucket.scalar(growth),
    )  # fmt: skip
    if left:
        compensate_backproject_triton(
            *operands, bucket.left_basis.flat, launches.compensate_backproject, launches.backproject, out=parts.flat
        )
    else:
        compensate_project_triton(*operands, bucket.basis.flat, launches.compensate_project, out=parts.flat)
    own = bucket.columns() if left else None
    bucket.finite.fill_(0 if len(entries) else 1)
    own_factors = None if own is None else own.flat
    pack_triton(entries, parts.flat, bucket.pointers_G(), bucket.finite, own=own_factors, message=message.flat)
    assert parts.guarded()
    if own is not None:
        assert own.guarded()
        for mine, sent in zip(own.views, message.views, strict=True):
            torch.testing.assert_close(mine, sent, rtol=0, atol=0, equal_nan=True)
    return message


def check_compensate(bucket: Bucket, applied: float = 1.0, *, left: bool = False) -> None:
    """Compare M and the product with fp64 truth, at a growing loss scale."""
    feedback, device = bucket.M is not None, bucket.device
    launch = bucket.launches.compensate_backproject if left else bucket.launches.compensate_project
    G, P_hat, Q = bucket.matrices(bucket.G), bucket.row_factors(bucket.P_hat), bucket.column_factors(bucket.Q)
    M = [torch.zeros_like(x) for x in G] if bucket.M is None else bucket.matrices(bucket.M)
    basis = bucket.left_basis if left else bucket.basis
    right = bucket.row_factors(basis) if left else bucket.column_factors(basis)
    inputs = [bucket.G, bucket.P_hat, bucket.Q, basis]
    before = [memory.cpu() for memory in inputs]
    memory = compensate(bucket, left=left, applied=applied, growth=GROWTH)
    products = bucket.column_factors(memory) if left else bucket.row_factors(memory)
    M_after = G if bucket.M is None else bucket.matrices(bucket.M)
    growth, pending = (GROWTH, applied) if feedback else (1.0, 0.0)
    for i, (_, _, r) in enumerate(bucket.shapes):
        truth = G[i] + growth * (M[i] - pending * (P_hat[i] @ Q[i].mT))
        # r products and their sum, one subtraction, one multiplication, one addition.
        size = G[i].abs() + growth * (M[i].abs() + pending * (P_hat[i].abs() @ Q[i].abs().mT))
        error, lost = rounding(r + 3, device) * size, torch.zeros_like(size)
        if bucket.M is not None:
            lost = stored(truth.abs() + error, bucket.M.flat.dtype)
            assert_within(M_after[i], truth, error + lost)
        if left:
            truth, size, error, lost = truth.mT, size.mT, error.mT, lost.mT
        terms = rounding(truth.shape[1], device)
        slack = error @ right[i].abs() + terms * ((size + error) @ right[i].abs())
        # Further panels read M as it was stored.
        slack[:, launch.panel :] += (lost @ right[i].abs() * (1 + terms))[:, launch.panel :]
        assert_within(products[i], truth @ right[i], slack)
    if not left:
        # Bypass tensors travel with P.
        for got, tensor in zip(bucket.first.cpu()[len(M) :], bucket.G.cpu()[len(M) :], strict=True):
            assert torch.equal(got, tensor.float())
    for memory, old in zip(inputs, before, strict=True):
        assert all(torch.equal(new, values) for new, values in zip(memory.cpu(), old, strict=True))
        assert memory.guarded()
    assert bucket.guarded()
    assert int(bucket.finite) == 1


def pack_and_average(bucket: Bucket, parts: Tensor, workers: int) -> None:
    pack_triton(
        bucket.table.pack_Q, parts, bucket.pointers_G(), bucket.finite, own=bucket.Q.flat, message=bucket.second.flat,
        bypass=bucket.first.flat, workers=workers,
    )  # fmt: skip


def check_backproject(bucket: Bucket) -> None:
    memory = bucket.G if bucket.M is None else bucket.M
    pointers = bucket.pointers_M() or bucket.pointers_G()
    M, P_hat, before = bucket.matrices(memory), bucket.row_factors(bucket.P_hat), memory.cpu()
    bucket.first.fill(bucket.random(bucket.row_sizes))
    message = bucket.first.cpu()
    parts = bucket.parts(bucket.table.q_parts_numel)
    bucket.Q.poison()
    backproject_triton(bucket.table, pointers, bucket.P_hat.flat, bucket.launches.backproject, out=parts.flat)
    assert parts.guarded()
    pack_and_average(bucket, parts.flat, 3)
    Q = bucket.column_factors(bucket.Q)
    for i, (n, _, _) in enumerate(bucket.shapes):
        bound = rounding(n, bucket.device) * (M[i].abs().mT @ P_hat[i].abs())
        assert_within(Q[i], M[i].mT @ P_hat[i], bound)
    assert all(torch.equal(x, y) for x, y in zip(bucket.Q.cpu(), bucket.second.cpu(), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(memory.cpu(), before, strict=True))
    for i, (got, old) in enumerate(zip(bucket.first.cpu(), message, strict=True)):
        assert torch.equal(got, old if i < len(M) else old / 3)
    assert bucket.guarded()
    assert int(bucket.finite) == 1


class Exchanged(NamedTuple):
    """What went over the wire, on the CPU: [workers, owners, size], [workers, numel], [workers, size], [numel]."""

    sent: Tensor
    own: Tensor
    sums: Tensor
    out: Tensor


def exchange(wire: Wire, messages: Sequence[Tensor], numel: int, device: torch.device, own: bool = True) -> Exchanged:
    """All workers' messages through a wire, in guarded memory; of each message the first ``numel`` are factors.

    If several workers have one chunk, what they send is added up as it is, and is in the place of sums.
    """
    workers, size, dtype = len(messages), wire.plan.size, messages[0].dtype
    memory = [Memory([len(message)], dtype, device).fill([message]) for message in messages]
    owns = [Memory([numel], dtype, device) for _ in messages]
    owners = len(wire.plan.chunks)
    sent = [Bytes((owners, size), device) for _ in messages]
    for given, mine, content in zip(memory, owns, sent, strict=True):
        wire.encode(given.views[0], mine.views[0] if own else None, out=content.view)
    sums = Bytes((workers, size), device)
    for worker, mine in enumerate(owns):
        if owners < workers:
            sums.view[worker] = sent[worker].view[0]
            continue
        received = torch.stack([content.view[worker] for content in sent])
        wire.reduce(received, mine.views[0] if own else None, worker, out=sums.view[worker])
    out = Memory([len(messages[0])], dtype, device)
    wire.decode(sums.view, out=out.views[0])
    assert all(x.guarded() for x in (*memory, *owns, out, *sent, sums))
    stacked = torch.stack([content.view for content in sent])
    return Exchanged(*(x.cpu() for x in (stacked, torch.stack([x.views[0] for x in owns]), sums.view, out.views[0])))


U = 2.0**-24
Values = dict[str, Tensor]


class Truth:
    """fp64 compressors: one with the gradients as they are, four with what rounding may make of them.

    The kernels may be twice as far from the truth as these are, since four are not all. Where errors are kept in bf16,
    M is rounded to it, and M may be a few times as large as G.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], config: PowerSGDConfig, device: torch.device) -> None:
        coarse = 4 * torch.finfo(torch.bfloat16).eps if config.error_dtype == "bfloat16" else 0.0
        config = PowerSGDConfig.from_dict({**config.to_dict(), "backend": "torch", "error_dtype": None})
        self.compressors = [Compressor(config, shapes) for _ in range(5)]
        segments = self.compressors[0].layout.segments
        self._share = {s.name: rounding(s.n + s.m + 2 * s.rank, device) + coarse for s in segments}
        self._steps = 0

    def step(self, given: Mapping[str, Tensor]) -> tuple[Values, dict[str, float]]:
        """Ĝ and how far from it, in the Frobenius norm, one may be."""
        self._steps += 1
        exact, *others = self.compressors
        expected = step(exact, {name: tensor.double() for name, tensor in given.items()}, torch.float64)
        bounds = {name: U * float(tensor.norm()) for name, tensor in expected.items()}
        for index, other in enumerate(others):
            generator = torch.Generator().manual_seed(10 * self._steps + index)
            inputs = {
                name: G.double() * (1 + self._share[name] * (2 * torch.rand(G.shape, generator=generator).double() - 1))
                for name, G in given.items()
            }
            for name, tensor in step(other, inputs, torch.float64).items():
                bounds[name] = max(bounds[name], 2 * float((tensor - expected[name]).norm()))
        return expected, bounds


def assert_close(got: Values, expected: Values, bounds: Mapping[str, float]) -> None:
    for name, tensor in expected.items():
        assert float((got[name].double() - tensor).norm()) <= bounds[name], name
