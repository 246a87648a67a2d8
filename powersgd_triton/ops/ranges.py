"""Reconstruction of parts of a bucket's averages, for workers that keep only a shard of the gradients."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from powersgd_triton.ops.blocks import multiply, product
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.reference import may_overflow, note_overflow


def reconstruct_ranges(bucket: Bucket, out: Mapping[str, tuple[int, Tensor]], overflow: Tensor | None) -> None:
    """Write elements [start, start + numel) of the flat Ĝ = L Rᵀ, or of a bypass tensor's mean.

    ``out`` is {name: (start, flat tensor of any float dtype)} for some of the tensors. Only rows that overlap with a
    range are computed. ``overflow`` is a scalar that becomes 0 if an element written by this worker is not finite.
    """
    for group, (left, right) in zip(bucket.layout.groups, bucket.joined(bucket.average), strict=True):
        for index, segment in enumerate(group.segments):
            if segment.name in out:
                start, target = out[segment.name]
                first, behind = start // group.m, -(-(start + target.numel()) // group.m)
                P, Q = left[index : index + 1, first:behind], right[index : index + 1]
                if target.numel() == (behind - first) * group.m and target.dtype == P.dtype:
                    multiply(P, Q.mT, out=target.view(1, behind - first, group.m))
                else:
                    skipped = start - first * group.m
                    target.copy_(product(P, Q.mT).view(-1)[skipped : skipped + target.numel()])
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
