"""A bucket's step in plain torch: the standard and the alternating algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.bucket import BucketState, Product
from powersgd_triton.ops.operations import Message, Step
from powersgd_triton.ops.reference import (
    backproject_reference,
    compensate_backproject_reference,
    compensate_project_reference,
    note_overflow,
    orthogonalize_reference,
    random_directions,
    reconstruct_reference,
    rollback_reference,
    subtract_product_reference,
)
from powersgd_triton.ops.wire import TorchWire, Wire


class TorchOperations:
    """The standard algorithm, group by group: P = M B, P̂ = orthogonalize(ΣP), Q = Mᵀ P̂ (Vogels et al. 2019)."""

    def __init__(self, bucket: BucketState) -> None:
        self._bucket = bucket
        self._finite: Tensor | None = None

    def exchange(self, gradients: Mapping[str, Tensor], step: Step, verdict: Tensor) -> Iterator[Message]:
        bucket = self._bucket
        product: Product = []
        average: Product = []
        for repetition in range(step.repetitions):
            last = repetition == step.repetitions - 1
            self.project(gradients, product, step)
            message = self._packed(gradients, bucket.message_P, bucket.layout.p_numel, repetition)
            yield Message(message, left=True, own=None)
            self._look_at(message, repetition)
            if repetition == 0:
                bucket.bypass_means.div_(step.workers)
            self.backproject(gradients, product, step)
            yield Message(bucket.message_Q, left=False, own=bucket.Q)
            bucket.message_Q.div_(step.workers)
            self._look_at(bucket.message_Q)
            _append(product, bucket.P_hat, bucket.Q, copy=not last)
            _append(average, bucket.P_hat, bucket.message_Q, copy=not last)
            if step.warm_start or not last:
                self._advance(bucket.right(bucket.message_Q), step, bucket.right(bucket.basis))
        self._finish(gradients, verdict, product, average, [mean for _, mean in average])

    def project(self, gradients: Mapping[str, Tensor], product: Product, step: Step) -> None:
        """P = (M − product) · basis; before the first product M is compensated."""
        bucket = self._bucket
        self._multiply(gradients, product, step, bucket.left(bucket.message_P), bucket.right(bucket.basis), left=False)

    def backproject(self, gradients: Mapping[str, Tensor], product: Product, step: Step) -> None:
        """P̂ = orthogonalize(P), Q = (M − product)ᵀ P̂."""
        bucket = self._bucket
        bases, out = bucket.left(bucket.P_hat), bucket.right(bucket.Q)
        self._orthogonalize(bucket.left(bucket.message_P), step, out=bases)
        for M, basis, result in zip(self._matrices(gradients), bases, out, strict=True):
            backproject_reference(M, basis, out=result)
        self._leave_out(product, bases, out, left=True)
        bucket.message_Q.copy_(bucket.Q)

    def reconstruct(self, out: Mapping[str, Tensor], verdict: Tensor) -> None:
        bucket = self._bucket
        for (P, Q), matrices in zip(bucket.joined(bucket.average), bucket.matrices(out), strict=True):
            reconstruct_reference(P, Q, out=matrices, verdict=verdict)
        for tensor, mean in zip(bucket.bypass(out), self._split_bypass(bucket.bypass_means), strict=True):
            tensor.copy_(mean)
            # Otherwise it is as finite as the sums were.
            if tensor.dtype != mean.dtype:
                note_overflow(tensor, verdict)

    def subtract_product(self) -> None:
        bucket = self._bucket
        for group, (P, Q) in zip(bucket.groups, bucket.joined(bucket.product), strict=True):
            if group.M is None or bucket.applied is None:
                continue
            subtract_product_reference(group.M, P, Q, bucket.applied)
            for M in group.M:
                # Next to the largest numbers the difference may be out of range, though M and the factors are not.
                M.nan_to_num_(nan=0.0)

    def redraw_bases(self, step: Step) -> None:
        for bases in self._bases():
            for group, basis in zip(self._bucket.groups, bases, strict=True):
                basis.copy_(random_directions(group.keys, step.iteration, *basis.shape[1:]))
        self.orthogonalize_bases(step)

    def orthogonalize_bases(self, step: Step) -> None:
        for bases in self._bases():
            self._orthogonalize(bases, step, out=bases)

    def wire(self, plan: WirePlan) -> Wire:
        return TorchWire(plan, self._bucket.message_P.dtype)

    def _bases(self) -> list[list[Tensor]]:
        """What steps start from."""
        return [self._bucket.right(self._bucket.basis)]

    def _matrices(self, gradients: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """M, which is G without error feedback."""
        bucket = self._bucket
        pairs = zip(bucket.groups, bucket.matrices(gradients), strict=True)
        return [G if group.M is None else group.M for group, G in pairs]

    def _multiply(
        self,
        gradients: Mapping[str, Tensor],
        product: Product,
        step: Step,
        out: Sequence[Tensor],
        bases: Sequence[Tensor],
        *,
        left: bool,
    ) -> None:
        """out = (M − product) · basis, or (M − product)ᵀ · basis; before the first product M is compensated."""
        bucket = self._bucket
        compensate: Callable[..., None] = compensate_backproject_reference if left else compensate_project_reference
        if product:
            # M is compensated already: it is what the first product of this step left there.
            for M, basis, result in zip(self._matrices(gradients), bases, out, strict=True):
                compensate(M, None, basis, basis, None, basis, out=result)
            self._leave_out(product, bases, out, left=left)
            return
        pending = bucket.joined(bucket.product) or [(basis, basis) for basis in bases]
        applied = bucket.applied if bucket.product else None
        parts = zip(bucket.groups, bucket.matrices(gradients), pending, bases, out, strict=True)
        for group, G, (P, Q), basis, result in parts:
            compensate(G, group.M, P, Q, applied, basis, growth=step.growth, out=result)
        bucket.applied = None

    def _leave_out(self, product: Product, bases: Sequence[Tensor], out: Sequence[Tensor], *, left: bool) -> None:
        """out −= product · basis, or productᵀ · basis."""
        for (P, Q), basis, result in zip(self._bucket.joined(product), bases, out, strict=False):
            first, second = (Q, P) if left else (P, Q)
            result.baddbmm_(first, second.mT @ basis, alpha=-1)

    def _packed(self, gradients: Mapping[str, Tensor], message: Tensor, numel: int, repetition: int) -> Tensor:
        """A message whose first ``numel`` elements are factors, with the bypass tensors behind them once a step."""
        bucket = self._bucket
        if repetition > 0:
            return message[:numel]
        bucket.bypass_means = message[numel:]
        for tensor, place in zip(bucket.bypass(gradients), self._split_bypass(bucket.bypass_means), strict=True):
            place.copy_(tensor)
        return message

    def _split_bypass(self, flat: Tensor) -> Sequence[Tensor]:
        pieces: Sequence[Tensor] = flat.split([segment.numel for segment in self._bucket.layout.bypass])
        return pieces

    def _look_at(self, message: Tensor, repetition: int = 1) -> None:
        """Note whether a summed message is finite; the first one of a step begins anew."""
        finite = _all_finite(message)
        self._finite = finite if repetition == 0 or self._finite is None else self._finite & finite

    def _advance(self, sources: Sequence[Tensor], step: Step, bases: Sequence[Tensor]) -> None:
        """bases ← orthonormal bases of the sources, where all was finite so far."""
        assert self._finite is not None
        on_host = self._finite.device.type == "cpu"
        if on_host and not self._finite:
            return
        following = bases if on_host else [torch.empty_like(basis) for basis in bases]
        self._orthogonalize(sources, step, out=following)
        if not on_host:
            for basis, new in zip(bases, following, strict=True):
                basis.copy_(torch.where(self._finite, new, basis))

    def _finish(
        self,
        gradients: Mapping[str, Tensor],
        verdict: Tensor,
        product: Product,
        average: Product,
        received: Sequence[Tensor],
    ) -> None:
        """Decide whether the step counts, and leave behind what the next one starts from."""
        bucket = self._bucket
        assert self._finite is not None
        verdict.mul_(self._finite)
        for group, G in zip(bucket.groups, bucket.matrices(gradients), strict=True):
            if group.M is not None:
                rollback_reference(G, group.M, self._finite)
        for mean in received:
            mean.masked_fill_(~self._finite, math.nan)
        bucket.product, bucket.average = product, average
        if any(group.M is not None for group in bucket.groups):
            bucket.applied = verdict

    def _orthogonalize(self, sources: Sequence[Tensor], step: Step, *, out: Sequence[Tensor]) -> None:
        for group, A, result in zip(self._bucket.groups, sources, out, strict=True):
            orthogonalize_reference(A, keys=group.keys, step=step.iteration, epsilon=step.epsilon, out=result)


class TorchAlternating(TorchOperations):
    """The alternating algorithm: Q = Mᵀ P̂ and P = M Q̂ by turns, with P̂ and Q̂ the last turn's orthonormal mean."""

    def exchange(self, gradients: Mapping[str, Tensor], step: Step, verdict: Tensor) -> Iterator[Message]:
        bucket = self._bucket
        product: Product = []
        average: Product = []
        received: list[Tensor] = []
        for repetition in range(step.repetitions):
            last = repetition == step.repetitions - 1
            left = step.multiplies_left(repetition)
            own, message = (bucket.Q, bucket.message_Q) if left else (bucket.P, bucket.message_P)
            lefts, rights = bucket.left(bucket.P_hat), bucket.right(bucket.basis)
            views = bucket.right if left else bucket.left
            self._multiply(gradients, product, step, views(own), lefts if left else rights, left=left)
            mean = message[: own.numel()]
            mean.copy_(own)
            sent = self._packed(gradients, message, own.numel(), repetition)
            yield Message(sent, left=not left, own=own)
            sent.div_(step.workers)
            self._look_at(sent, repetition)
            if left:
                _append(product, bucket.P_hat, own, copy=not last)
                _append(average, bucket.P_hat, mean, copy=not last)
            else:
                _append(product, own, bucket.basis, copy=not last)
                _append(average, mean, bucket.basis, copy=not last)
            received.append(average[-1][1 if left else 0])
            self._advance(views(mean), step, rights if left else lefts)
        self._finish(gradients, verdict, product, average, received)

    def _bases(self) -> list[list[Tensor]]:
        return [self._bucket.left(self._bucket.P_hat), self._bucket.right(self._bucket.basis)]


def _append(product: Product, P: Tensor, Q: Tensor, *, copy: bool) -> None:
    product.append((P.clone(), Q.clone()) if copy else (P, Q))


def _all_finite(message: Tensor) -> Tensor:
    """Scalar bool. A sum is the cheapest look; where it is not finite, every element is looked at."""
    if message.device.type == "cpu" and message.sum().isfinite():
        return torch.ones((), dtype=torch.bool)
    return message.isfinite().all()
