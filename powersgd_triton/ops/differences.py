"""Differences between a flat tensor and a copy of it, in 8, 4 or 2 bits an element: encoding and applying them.

A copy v follows its original w by v ← v + decode(encode(w − v)). The rounding error remains in w − v, and is part of
the next difference. So the copy needs no error buffer, and it cannot drift away from its original.

128 adjacent elements are a block. They share a bf16 scale: their largest difference divided by the format's levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import BLOCK, WireFormat

BF16_NAN = 0x7FC0


def encode_reference(target: Tensor, base: Tensor, width: WireFormat, out: Tensor) -> None:
    """out ← scales and codes of target − base.

    8 and 4 bits: round((target − base) / scale), ties to even. 2 bits: the nearest of −3, −1, 1 and 3 times the scale.
    An element of ``base`` that is not finite counts as 0, so that it recovers. If a difference is not finite, the scale
    of its block is NaN.

    Args:
        target: [numel], fp32 or narrower.
        base: [numel], in any float dtype.
        width: Format of the differences.
        out: uint8 [bytes], as ``width.difference_bytes`` says.
    """
    blocks = -(-target.numel() // BLOCK)
    difference = torch.zeros(blocks * BLOCK, device=target.device)
    torch.sub(target.float(), _finite(base), out=difference[: target.numel()])
    difference = difference.view(blocks, BLOCK)
    largest = difference.abs().amax(1, keepdim=True)
    scales, packed = _parts(out, width, blocks, target.numel())
    # Not by a number: torch on CUDA would multiply by its reciprocal, which has other bits.
    scales.copy_(largest / torch.full_like(largest, width.levels))
    # One of the many NaNs, so that all backends write the same bytes.
    scales.view(torch.int16).masked_fill_(~largest.isfinite(), BF16_NAN)
    scale = scales.float()
    if width.bits == 2:
        codes = (difference >= -2 * scale).to(torch.uint8) + (difference >= 0) + (difference >= 2 * scale)
    else:
        codes = torch.where(scale > 0, difference / scale, 0).round_().clamp_(-width.levels, width.levels)
        codes = codes.add_(2 ** (width.bits - 1)).to(torch.uint8)
    # Byte j holds elements j, j + 32, j + 64 and j + 96 of a block in 2 bits, j and j + 64 in 4 bits.
    parts = codes.view(blocks, 8 // width.bits, packed.shape[1]) << _shifts(width, target.device)
    torch.sum(parts, 1, dtype=torch.uint8, out=packed)
    # All backends write the same bytes of a block whose scale is NaN.
    packed.masked_fill_(scale.isnan(), 0)


def apply_reference(content: Tensor, width: WireFormat, base: Tensor) -> None:
    """base ← base + scales · codes, computed in fp32 and rounded once. Elements that are not finite count as 0.

    Args:
        content: uint8 [copies, bytes], what ``encode_reference`` wrote for each row of ``base``.
        width: Format of the differences.
        base: [copies, numel], in any float dtype. Rows are contiguous.
    """
    blocks = -(-base.shape[1] // BLOCK)
    for row, target in zip(content, base, strict=True):
        scales, packed = _parts(row, width, blocks, len(target))
        codes = (packed.unsqueeze(1) >> _shifts(width, base.device) & 2**width.bits - 1).flatten(1).float()
        codes = 2 * codes - 3 if width.bits == 2 else codes - 2 ** (width.bits - 1)
        target.copy_(_finite(target) + codes.mul_(scales.float()).view(-1)[: len(target)])


def _finite(base: Tensor) -> Tensor:
    return torch.where(base.isfinite(), base, 0).float()


def _shifts(width: WireFormat, device: torch.device) -> Tensor:
    return torch.arange(0, 8, width.bits, dtype=torch.uint8, device=device).unsqueeze(1)


def _parts(content: Tensor, width: WireFormat, blocks: int, numel: int) -> tuple[Tensor, Tensor]:
    """Return views of the bytes: scales [blocks, 1] and packed codes [blocks, bytes of a block]."""
    codes, _ = width.difference_bytes(numel)
    scales = content[: 2 * blocks].view(torch.bfloat16).view(blocks, 1)
    code_bytes = BLOCK * width.bits // 8
    return scales, content[codes : codes + blocks * code_bytes].view(blocks, code_bytes)
