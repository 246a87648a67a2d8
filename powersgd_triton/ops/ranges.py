"""Parts of a bucket's averages, for a worker that keeps only its shard of the gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.reference import may_overflow, note_overflow


def reconstruct_ranges(bucket: Bucket, out: Mapping[str, tuple[int, Tensor]], overflow: Tensor | None) -> None:
    """Elements [start, start + numel) of the flat Ĝ = L Rᵀ, or of a bypass tensor's mean, for some of the tensors.

    Args:
        bucket: after a step's exchange.
        out: {name: (start, flat tensor of any float dtype)}. Only the rows that meet a range are multiplied.
        overflow: scalar, set to 0 where an element that is written is not finite; None where no one asks. What other
            workers write may be finite or not.
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
                if overflow is not None and may_overflow(P, Q, target.dtype):
                    note_overflow(target, overflow)
    offset = 0
    for segment in bucket.layout.bypass:
        if segment.name in out:
            start, target = out[segment.name]
            target.copy_(bucket.bypass_means[offset + start : offset + start + target.numel()])
            if overflow is not None and target.dtype != bucket.bypass_means.dtype:
                note_overflow(target, overflow)
        offset += segment.numel
