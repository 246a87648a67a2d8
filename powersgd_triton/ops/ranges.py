"""Parts of a bucket's averages, for a worker that keeps only its shard of the gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from powersgd_triton.ops.bucket import BucketState
from powersgd_triton.ops.reference import may_overflow, note_overflow


def reconstruct_ranges(bucket: BucketState, out: Mapping[str, tuple[int, Tensor]], verdict: Tensor) -> None:
    """Elements [start, start + numel) of the flat Ĝ = L Rᵀ, or of a bypass tensor's mean, for some of the tensors.

    Args:
        bucket: after a step's exchange.
        out: {name: (start, flat tensor of any float dtype)}. Only the rows that meet a range are multiplied.
        verdict: scalar, set to 0 where an element that is written is not finite. Other ranges may have others.
    """
    for group, (left, right) in zip(bucket.layout.groups, bucket.joined(bucket.average), strict=True):
        for index, segment in enumerate(group.segments):
            if segment.name in out:
                start, target = out[segment.name]
                first, behind = start // group.m, -(-(start + target.numel()) // group.m)
                P, Q = left[index, first:behind], right[index]
                if target.numel() == (behind - first) * group.m and target.dtype == P.dtype:
                    torch.mm(P, Q.mT, out=target.view(behind - first, group.m))
                else:
                    skipped = start - first * group.m
                    target.copy_((P @ Q.mT).view(-1)[skipped : skipped + target.numel()])
                if may_overflow(P, Q, target.dtype):
                    note_overflow(target, verdict)
    offset = 0
    for segment in bucket.layout.bypass:
        if segment.name in out:
            start, target = out[segment.name]
            target.copy_(bucket.bypass_means[offset + start : offset + start + target.numel()])
            if target.dtype != bucket.bypass_means.dtype:
                note_overflow(target, verdict)
        offset += segment.numel
