"""Parts of a bucket's averages, for a worker that keeps only its shard of the gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from powersgd_triton.ops.bucket import BucketState


def reconstruct_ranges(bucket: BucketState, out: Mapping[str, tuple[int, Tensor]]) -> None:
    """Elements [start, start + numel) of the flat Ĝ = P̂ Q̄ᵀ, or of a bypass tensor's mean, for some of the tensors.

    Args:
        bucket: after ``commit``.
        out: {name: (start, flat tensor of any float dtype)}. Only the rows that meet a range are multiplied.
    """
    for group, tensors in zip(bucket.layout.groups, bucket.groups, strict=True):
        for index, segment in enumerate(group.segments):
            if segment.name in out:
                start, target = out[segment.name]
                first, behind = start // group.m, -(-(start + target.numel()) // group.m)
                P, Q = tensors.P_hat[index, first:behind], tensors.Q_mean[index]
                if target.numel() == (behind - first) * group.m and target.dtype == P.dtype:
                    torch.mm(P, Q.mT, out=target.view(behind - first, group.m))
                else:
                    skipped = start - first * group.m
                    target.copy_((P @ Q.mT).view(-1)[skipped : skipped + target.numel()])
    for segment, mean in zip(bucket.layout.bypass, bucket.bypass, strict=True):
        if segment.name in out:
            start, target = out[segment.name]
            target.copy_(mean[start : start + target.numel()])
