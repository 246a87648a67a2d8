"""The stages of a step in plain torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from powersgd_triton.ops.bucket import BucketState
from powersgd_triton.ops.operations import Step
from powersgd_triton.ops.reference import (
    backproject_reference,
    compensate_project_reference,
    orthogonalize_reference,
    random_directions,
    reconstruct_reference,
    rollback_reference,
    subtract_product_reference,
)


class TorchOperations:
    """The reference, group by group: ``Operations`` on one bucket."""

    def __init__(self, bucket: BucketState) -> None:
        self._bucket = bucket
        self._finite: Tensor | None = None

    def compensate_project(self, gradients: Mapping[str, Tensor]) -> None:
        bucket = self._bucket
        for group, G in zip(bucket.groups, bucket.matrices(gradients), strict=True):
            compensate_project_reference(G, group.M, group.P_hat, group.Q, bucket.applied, group.basis, out=group.P)
        for tensor, target in zip(bucket.bypass_tensors(gradients), bucket.bypass, strict=True):
            target.copy_(tensor)

    def backproject(self, gradients: Mapping[str, Tensor], step: Step) -> None:
        bucket = self._bucket
        self._finite = _all_finite(bucket.message_P)
        bucket.message_P[bucket.layout.p_numel :].div_(step.workers)
        self._orthogonalize([group.P for group in bucket.groups], step, out=[group.P_hat for group in bucket.groups])
        for group, G in zip(bucket.groups, bucket.matrices(gradients), strict=True):
            backproject_reference(G if group.M is None else group.M, group.P_hat, out=group.Q)
        bucket.message_Q.copy_(bucket.Q)

    def commit(self, gradients: Mapping[str, Tensor], step: Step, verdict: Tensor) -> None:
        bucket = self._bucket
        bucket.message_Q.div_(step.workers)
        assert self._finite is not None
        finite = self._finite & _all_finite(bucket.message_Q)
        verdict.mul_(finite)
        for group, G in zip(bucket.groups, bucket.matrices(gradients), strict=True):
            if group.M is not None:
                rollback_reference(G, group.M, finite)
        if step.warm_start:
            self._advance_bases(step, finite)
        bucket.message_Q.masked_fill_(~finite, math.nan)

    def reconstruct(self, out: Mapping[str, Tensor]) -> None:
        bucket = self._bucket
        for group, matrices in zip(bucket.groups, bucket.matrices(out), strict=True):
            reconstruct_reference(group.P_hat, group.Q_mean, out=matrices)
        for tensor, mean in zip(bucket.bypass_tensors(out), bucket.bypass, strict=True):
            tensor.copy_(mean)

    def subtract_product(self) -> None:
        bucket = self._bucket
        for group in bucket.groups:
            if group.M is not None and bucket.applied is not None:
                subtract_product_reference(group.M, group.P_hat, group.Q, bucket.applied)

    def redraw_bases(self, step: Step) -> None:
        for group in self._bucket.groups:
            group.basis.copy_(random_directions(group.keys, step.iteration, *group.basis.shape[1:]))
        self.orthogonalize_bases(step)

    def orthogonalize_bases(self, step: Step) -> None:
        bases = [group.basis for group in self._bucket.groups]
        self._orthogonalize(bases, step, out=bases)

    def _advance_bases(self, step: Step, finite: Tensor) -> None:
        """The next basis spans Q̄ where the step was ``finite``; else the old one stays."""
        on_host = finite.device.type == "cpu"
        if on_host and not finite:
            return
        bases = [group.basis for group in self._bucket.groups]
        following = bases if on_host else [torch.empty_like(basis) for basis in bases]
        self._orthogonalize([group.Q_mean for group in self._bucket.groups], step, out=following)
        if not on_host:
            for basis, new in zip(bases, following, strict=True):
                basis.copy_(torch.where(finite, new, basis))

    def _orthogonalize(self, sources: Sequence[Tensor], step: Step, *, out: Sequence[Tensor]) -> None:
        for group, A, result in zip(self._bucket.groups, sources, out, strict=True):
            orthogonalize_reference(A, keys=group.keys, step=step.iteration, epsilon=step.epsilon, out=result)


def _all_finite(message: Tensor) -> Tensor:
    """Scalar bool. A sum is the cheapest look; where it is not finite, every element is looked at."""
    if message.device.type == "cpu" and message.sum().isfinite():
        return torch.ones((), dtype=torch.bool)
    return message.isfinite().all()
