"""The stages of a bucket's step in plain torch, for the standard and the alternating algorithm."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.backend import Message
from powersgd_triton.ops.bases import orthogonalize
from powersgd_triton.ops.blocks import Matrices, add_product, multiply, product
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.explore import explore, explores
from powersgd_triton.ops.orthogonalize import random_directions
from powersgd_triton.ops.products import backproject, compensate_backproject, compensate_project, reconstruct
from powersgd_triton.ops.reference import Pending, may_overflow, note_overflow, on_host, rollback_reference
from powersgd_triton.ops.step import Step
from powersgd_triton.ops.wire import TorchWire, Wire


class TorchBackend:
    """The stages of ``ops.backend.Backend`` on one bucket, group by group.

    The standard algorithm is P = M Q, P̂ = orthogonalize(ΣP), Q = Mᵀ P̂ (Vogels et al. 2019, Algorithm 1). The
    alternating algorithm computes one product in each repetition, Q = Mᵀ P̂ and P = M Q̂ by turns, with the
    orthonormalized means of the turn before.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._alternating = bucket.config.algorithm == "alternating"
        # Whether the sums of the open step are finite: a bool on the host, or a scalar on a device.
        self._finite: bool | Tensor = True
        # The factors that this worker has sent in the repetitions of the open step, their averages, and the means.
        self._product: list[tuple[Tensor, Tensor]] = []
        self._average: list[tuple[Tensor, Tensor]] = []
        self._means: list[Tensor] = []
        self._bypass = bucket.bypass_means
        # The last message of this repetition.
        self._sent: Message | None = None

    def project(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> Message:
        bucket, first = self.bucket, repetition == 0
        # In the standard algorithm only the span of the sum is used, so this worker's own P need not be kept.
        own = bucket.P if self._alternating else None
        factors = bucket.message_P[: bucket.layout.p_numel] if own is None else own
        if bucket.shared:
            # The rows of other workers.
            factors.zero_()
        bases, out = bucket.right(bucket.basis, bucket.own), bucket.left(factors, bucket.own)
        G, M, pending, growth = self._operands(gradients, step, first=first)
        compensate_project(G, M, pending, bases, growth=growth, out=out)
        self._subtract_sent(bases, out, left=False)
        return self._send(gradients, own, left=True, first=first)

    def backproject(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> Message:
        bucket, sent, first = self.bucket, self._sent, self._alternating and repetition == 0
        if not self._alternating:
            assert sent is not None
            self._look_at(sent.content, first=repetition == 0)
            if repetition == 0:
                self._bypass.div_(step.workers)
            _orthogonalize(bucket, bucket.message_P, step, left=True, out=bucket.P_hat)
        if bucket.shared:
            bucket.Q.zero_()
        bases, out = bucket.left(bucket.P_hat, bucket.own), bucket.right(bucket.Q, bucket.own)
        G, M, pending, growth = self._operands(gradients, step, first=first)
        if first:
            compensate_backproject(G, M, pending, bases, growth=growth, out=out)
        else:
            backproject(G, bases, out=out)
        self._subtract_sent(bases, out, left=True)
        return self._send(gradients, bucket.Q, left=False, first=first)

    def commit(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> None:
        bucket, sent = self.bucket, self._sent
        assert sent is not None
        assert sent.own is not None
        last = repetition == bucket.config.iterations - 1
        sent.content.div_(step.workers)
        self._look_at(sent.content, first=self._alternating and repetition == 0)
        mean = sent.content[: sent.own.numel()]
        for factors, pairs in ((sent.own, self._product), (mean, self._average)):
            pair = (factors, bucket.basis) if sent.left else (bucket.P_hat, factors)
            # A later repetition of the step overwrites them.
            pairs.append(pair if last else (pair[0].clone(), pair[1].clone()))
        self._means.append(self._average[-1][0 if sent.left else 1])
        # Without warm start the next step draws a new basis, so the last repetition needs none.
        if bucket.config.warm_start or not last:
            basis = bucket.P_hat if sent.left else bucket.basis
            _orthogonalize(bucket, mean, step, left=sent.left, out=basis, where=self._finite)
            if explores(bucket.config, repetition) and self._finite is not False:
                explore(bucket, _number(bucket, step), where=self._finite)
        if last:
            self._finish(gradients, step)

    def reconstruct(self, out: Mapping[str, Tensor], overflow: Tensor | None) -> None:
        bucket = self.bucket
        reconstruct(bucket.joined(bucket.average), out=bucket.matrices(out), verdict=overflow)
        tensors, means = bucket.bypass(out), bucket.split_bypass(bucket.bypass_means)
        if tensors:
            # One call, since the calls would take longer than the copies.
            torch._foreach_copy_(tensors, means)
        for tensor, mean in zip(tensors, means, strict=True):
            # In the same dtype, the copy is finite if the sums were, which the verdict already covers.
            if overflow is not None and tensor.dtype != mean.dtype:
                note_overflow(tensor, overflow)

    def reconstruct_ranges(self, out: Mapping[str, tuple[int, Tensor]], overflow: Tensor | None) -> None:
        bucket = self.bucket
        for group, (left, right) in zip(bucket.layout.groups, bucket.joined(bucket.average), strict=True):
            lefts, rights = left.split(group.counts), right.split(group.counts)
            for segment, P, Q in zip(group.segments, lefts, rights, strict=True):
                if segment.name in out:
                    _write_range(P, Q, *out[segment.name], overflow)
        for segment, mean in zip(bucket.layout.bypass, bucket.split_bypass(bucket.bypass_means), strict=True):
            if segment.name in out:
                start, target = out[segment.name]
                target.copy_(mean[start : start + target.numel()])
                if overflow is not None and target.dtype != mean.dtype:
                    note_overflow(target, overflow)

    def orthogonalize_bases(self, step: Step, *, redraw: bool = False) -> None:
        bucket = self.bucket
        for left in (True, False) if self._alternating else (False,):
            bases = bucket.P_hat if left else bucket.basis
            if redraw:
                views = bucket.left(bases) if left else bucket.right(bases)
                for keys, basis in zip(bucket.keys, views, strict=True):
                    basis.copy_(random_directions(keys, _number(bucket, step), *basis.shape[1:]))
            _orthogonalize(bucket, bases, step, left=left, out=bases)

    def wire(self, plan: WirePlan) -> Wire:
        return TorchWire(plan, self.bucket.message_P.dtype, self.bucket.message_P.device)

    def _operands(
        self, gradients: Mapping[str, Tensor], step: Step, *, first: bool
    ) -> tuple[Sequence[Matrices], Sequence[Matrices | None], Sequence[Pending | None], Tensor | None]:
        """Return (G, M, pending products, growth) of this worker's rows. M is G without error feedback.

        Only the ``first`` product of a step compensates M. Later ones multiply M in the place of G, and change none.
        """
        bucket, own = self.bucket, self.bucket.own
        nothing = [None] * len(own)
        if not first:
            return bucket.M or bucket.matrices(gradients, own), nothing, nothing, None
        self._product, self._average, self._means = [], [], []
        growth, applied, pending = bucket.rescale(step), bucket.applied, list[Pending]()
        if applied is not None and bucket.product:
            pending = [(P, Q, applied) for P, Q in bucket.joined(bucket.product, own)]
        return bucket.matrices(gradients, own), bucket.M or nothing, pending or nothing, growth

    def _subtract_sent(self, bases: Sequence[Tensor], out: Sequence[Tensor], *, left: bool) -> None:
        """Take what this step has already sent out of a product. M has lost what the last step has sent."""
        self.bucket.applied = None
        sent = self.bucket.joined(self._product, self.bucket.own)
        for (P, Q), basis, result in zip(sent, bases, out, strict=False):
            add_product(result, Q if left else P, product((P if left else Q).mT, basis), alpha=-1)

    def _send(self, gradients: Mapping[str, Tensor], own: Tensor | None, *, left: bool, first: bool) -> Message:
        """Return a message with factors. A step's first message has the bypass tensors too."""
        bucket, layout = self.bucket, self.bucket.layout
        memory, numel = (bucket.message_P, layout.p_numel) if left else (bucket.message_Q, layout.q_numel)
        if own is not None:
            memory[:numel].copy_(own)
        if first:
            self._bypass = memory[numel:]
            if layout.bypass:
                torch.cat(bucket.bypass(gradients), out=self._bypass)
        self._sent = Message(memory if first else memory[:numel], left, own)
        return self._sent

    def _look_at(self, message: Tensor, *, first: bool) -> None:
        """Note whether a summed message is finite. The first message of a step resets the result."""
        if on_host(message):
            # A sum is the cheapest check. All elements decide if it is not finite.
            finite: bool | Tensor = math.isfinite(message.sum().item()) or bool(message.isfinite().all())
        else:
            finite = message.isfinite().all()
        self._finite = finite if first else self._finite & finite

    def _finish(self, gradients: Mapping[str, Tensor], step: Step) -> None:
        """Update the verdict, undo the changes to M if a sum was not finite, and give the bucket the product."""
        bucket, verdict = self.bucket, step.verdict(self.bucket.message_P.device)
        if self._finite is not True:
            finite = torch.as_tensor(self._finite, device=verdict.device)
            verdict.mul_(finite)
            if bucket.M is not None:
                for G, M in zip(bucket.matrices(gradients, bucket.own), bucket.M, strict=True):
                    rollback_reference(G, M, finite)
            for mean in self._means:
                mean.masked_fill_(~finite, math.nan)
        bucket.commit(self._product, self._average, self._bypass, verdict)


def _write_range(P: Tensor, Q: Tensor, start: int, target: Tensor, overflow: Tensor | None) -> None:
    """Write elements of the matrices P Qᵀ, [B, n, r] and [B, m, r], from ``start`` on to ``target``."""
    n, m = P.shape[1], Q.shape[1]
    for index in range(start // (n * m), -(-(start + target.numel()) // (n * m))):
        low, high = max(start, index * n * m), min(start + target.numel(), (index + 1) * n * m)
        piece, skipped = target[low - start : high - start], low - index * n * m
        first, behind = skipped // m, -(-(skipped + len(piece)) // m)
        left, right = P[index : index + 1, first:behind], Q[index : index + 1]
        if len(piece) == (behind - first) * m and piece.dtype == P.dtype:
            multiply(left, right.mT, out=piece.view(1, behind - first, m))
        else:
            piece.copy_(product(left, right.mT).view(-1)[skipped - first * m :][: len(piece)])
        if overflow is not None and may_overflow(left, right, piece.dtype):
            note_overflow(piece, overflow)


def _orthogonalize(
    bucket: Bucket, factors: Tensor, step: Step, *, left: bool, out: Tensor, where: bool | Tensor = True
) -> None:
    """Write orthonormal bases of flat factors to ``out``, which may be the same.

    If ``where`` is False, ``out`` stays as it is. On a device it may be a scalar there.
    """
    if where is False or not bucket.layout.groups:
        return
    views, numel = (bucket.left, bucket.layout.p_numel) if left else (bucket.right, bucket.layout.q_numel)
    sources = views(factors[:numel].clone() if out is factors else factors)
    # On a device the host would have to wait to read the flag: compute the bases, and select there.
    found = views(out) if where is True else [torch.empty_like(basis) for basis in sources]
    number, epsilon = _number(bucket, step), bucket.config.orthogonalization_epsilon
    bucket.zeroed[0] += orthogonalize(sources, keys=bucket.keys, step=number, epsilon=epsilon, out=found)
    if where is not True:
        for basis, new in zip(views(out), found, strict=True):
            basis.copy_(torch.where(where, new, basis))


def _number(bucket: Bucket, step: Step) -> int | Tensor:
    """Return the step's number. On a device it is a scalar there, since a captured step is replayed."""
    device = bucket.message_P.device
    return step.iteration if device.type == "cpu" else step.number(device)
