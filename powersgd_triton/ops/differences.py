"""Differences between a flat tensor and a copy of it, in few bits an element: encoding and applying them.

A copy v follows its original w by v ← v + decode(encode(w − v)). The rounding error remains in w − v, and is part of
the next difference. So the copy needs no error buffer, and it cannot drift away from its original. Whole tensors are
sent as their differences from 0. What was encoded is then subtracted from them, so that they keep the rounding error.

128 adjacent elements are a block. They share a bf16 scale: in 8, 4 and 2 bits their largest difference divided by the
format's levels, in ternary codes the mean magnitude of the elements that are not 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import BLOCK, LARGEST_BF16, SCALE_BYTES, TERNARY_ZERO, WireFormat

BF16_NAN = 0x7FC0


def encode_reference(
    target: Tensor, base: Tensor | None, width: WireFormat, out: Tensor, subtract: bool = False
) -> None:
    """out ← scales and codes of target − base.

    8 and 4 bits: round((target − base) / scale), ties to even. 2 bits: the nearest of −3, −1, 1 and 3 times the scale.
    Ternary: 0 for magnitudes up to 0.7 of the block's mean, and ±1 for others, whose mean magnitude is the scale.
    An element of ``base`` that is not finite counts as 0, so that it recovers. If a difference is not finite, the scale
    of its block is NaN.

    Args:
        target: [numel], fp32 or narrower.
        base: [numel], in any float dtype. None stands for zeros.
        width: Format of the differences.
        out: uint8 [bytes], as ``width.difference_bytes`` says.
        subtract: Also subtract from ``target`` what ``out`` stands for, as ``apply_reference`` does with weight −1.
    """
    numel = target.numel()
    blocks = width.difference_blocks(numel)
    difference = torch.zeros(blocks * BLOCK, device=target.device)
    if base is None:
        difference[:numel].copy_(target)
    else:
        torch.sub(target.float(), _finite(base), out=difference[:numel])
    difference = difference.view(blocks, BLOCK)
    scales, packed = _parts(out, width, numel)
    if width.blocks > 1:
        size, zero = _ternary(difference, numel)
    else:
        # Not by a number: torch on CUDA would multiply by its reciprocal, which has other bits.
        size = difference.abs().amax(1, keepdim=True)
        size = size / torch.full_like(size, width.levels)
    scales.copy_(size)
    # One of the many NaNs, so that all backends write the same bytes.
    scales.view(torch.int16).masked_fill_(~size.isfinite(), BF16_NAN)
    scale = scales.float()
    if width.blocks > 1:
        codes = (difference >= -zero).to(torch.uint8) + (difference > zero)
    elif width.bits == 2:
        codes = (difference >= -2 * scale).to(torch.uint8) + (difference >= 0) + (difference >= 2 * scale)
    else:
        codes = torch.where(scale > 0, difference / scale, 0).round_().clamp_(-width.levels, width.levels)
        codes = codes.add_(width.numbers // 2).to(torch.uint8)
    # All backends write the same bytes of a block whose scale is NaN.
    codes.masked_fill_(scale.isnan(), 0)
    # Byte j holds elements j, j + 32, j + 64 and j + 96 of a block in 2 bits, j and j + 64 in 4 bits, and in ternary
    # codes the elements j of five blocks.
    factors = width.numbers ** torch.arange(width.together, dtype=torch.uint8, device=target.device)
    parts = codes.view(len(packed), width.together, packed.shape[1]) * factors.unsqueeze(1)
    torch.sum(parts, 1, dtype=torch.uint8, out=packed)
    if subtract:
        apply_reference(out.unsqueeze(0), width, target.unsqueeze(0), -1.0)


def apply_reference(content: Tensor, width: WireFormat, base: Tensor, weight: float = 1.0) -> None:
    """base ← base + weight · (scales · codes), computed in fp32 and rounded once to the dtype of ``base``.

    Elements of ``base`` that are not finite count as 0. To add the messages of several workers to one tensor, call this
    once for each, in the same order on all workers.

    Args:
        content: uint8 [copies, bytes], what ``encode_reference`` wrote for each row of ``base``.
        width: Format of the differences.
        base: [copies, numel], in any float dtype. Rows are contiguous.
        weight: Factor of what is added. −1 takes back what was encoded.
    """
    bytes_ = torch.arange(256, device=base.device)
    numbers = bytes_ // width.numbers ** torch.arange(width.together, device=base.device).unsqueeze(1) % width.numbers
    values = (2 * numbers - 3 if width.bits == 2 else numbers - width.numbers // 2).float()
    for row, target in zip(content, base, strict=True):
        scales, packed = _parts(row, width, len(target))
        codes = values.index_select(1, packed.flatten().int()).view(width.together, *packed.shape)
        added = codes.transpose(0, 1).reshape(-1, BLOCK).mul_(scales.float()).mul_(weight)
        target.copy_(_finite(target) + added.view(-1)[: len(target)])


def _ternary(difference: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the scale of each block [blocks, 1], and the magnitude up to which its elements count as 0."""
    # Padding must not lower the mean.
    counts = torch.arange(numel, numel - difference.numel(), -BLOCK, device=difference.device).clamp_(1, BLOCK)
    # Sums of 128ths cannot overflow.
    magnitude = difference.abs().mul_(1 / BLOCK)
    zero = _sum(magnitude) / counts.unsqueeze(1) * (TERNARY_ZERO * BLOCK)
    kept = difference.abs() > zero
    scale = _sum(torch.where(kept, magnitude, 0)) / kept.sum(1, keepdim=True).clamp_(min=1)
    # A larger mean would be infinite in bf16. NaN stays NaN.
    return torch.where(zero.isfinite(), (scale * BLOCK).clamp_(max=LARGEST_BF16), zero), zero


def _sum(x: Tensor) -> Tensor:
    """Return the sums of rows: of neighbours, then of neighbours among these sums, and so on.

    All backends add in this order, since others give other bits.
    """
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x


def _finite(base: Tensor) -> Tensor:
    return torch.where(base.isfinite(), base, 0).float()


def _parts(content: Tensor, width: WireFormat, numel: int) -> tuple[Tensor, Tensor]:
    """Return views of the bytes: scales [blocks, 1] and packed codes [blocks that share bytes, their bytes]."""
    blocks, (codes, _) = width.difference_blocks(numel), width.difference_bytes(numel)
    scales = content[: SCALE_BYTES * blocks].view(torch.bfloat16).view(blocks, 1)
    code_bytes = BLOCK * width.bits // 8
    groups = blocks // width.blocks
    return scales, content[codes : codes + groups * code_bytes].view(groups, code_bytes)
