"""Differences between a flat tensor and a copy of it, in few bits an element: encoding and applying them.

A copy v follows its original w by v ← v + decode(encode(w − v)). The rounding error remains in w − v, and is part of
the next difference: the copy needs no error buffer and cannot drift away. Whole tensors are sent as their differences
from 0. What was encoded is then subtracted from them, so that they keep the rounding error.

128 adjacent elements are a block. They share a bf16 scale: in 8, 4 and 2 bits their largest difference divided by the
format's levels, in ternary codes the mean magnitude of the elements that are not 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from powersgd_triton.layout.constants import BF16_NAN
from powersgd_triton.layout.wire_format import BLOCK, LARGEST_BF16, SCALE_BYTES, TERNARY_ZERO, WireFormat

SPAN = 160 * 5 * BLOCK
"""Elements that a thread of the CPU works on at a time, so that they stay in its cache. Whole groups of blocks."""


def encode_reference(
    target: Tensor, base: Tensor | None, width: WireFormat, out: Tensor, subtract: bool = False, each: int | None = None
) -> None:
    """out ← scales and codes of target − base. With ``subtract``, target ← target − what these stand for.

    8 and 4 bits: round((target − base) / scale), ties to even. 2 bits: the nearest of −3, −1, 1 and 3 times the scale.
    Ternary: 0 for magnitudes up to 0.7 of the block's mean, and ±1 for others, whose mean magnitude is the scale.
    An element of ``base`` that is not finite counts as 0, so that it recovers. If a difference is not finite, the scale
    of its block is NaN.

    ``target`` [numel] is fp32 or narrower, ``base`` [numel] of any float dtype, or None for zeros, and ``out`` uint8
    [bytes], as many as ``width.difference_bytes`` says. With ``each``, it is uint8 [parts, bytes]: a message for every
    so many elements. The last one may have fewer, and its other bytes stay as they are.
    """
    if each is not None:
        copies = [None] * len(out) if base is None else base.split(each)
        for part, copy, content in zip(target.split(each), copies, out, strict=False):
            _encode_part(part, copy, width, content, subtract, each)
    elif len(target):
        _encode_part(target, base, width, out, subtract, len(target))


def _encode_part(
    target: Tensor, base: Tensor | None, width: WireFormat, out: Tensor, subtract: bool, each: int
) -> None:
    spans = _spans(target, out, width, each)
    copies = [None] * len(spans) if base is None else base.split([len(own) for own, _, _ in spans])
    for (own, scale, bytes_), copy in zip(spans, copies, strict=True):
        difference = own.float() if copy is None else own.float() - _finite(copy)
        numbers = _encode(difference, width, scale)
        # Byte j holds elements j, j + 32, j + 64 and j + 96 of a block in 2 bits, j and j + 64 in 4 bits, and in
        # ternary codes the elements j of five blocks. All values are below 256, so they are exact.
        *others, total = numbers.view(len(bytes_), width.together, bytes_.shape[1]).unbind(1)
        for digits in reversed(others):
            total = torch.add(digits, total, alpha=width.numbers)
        bytes_.copy_(total)
        if subtract:
            own.sub_(_values(numbers, width).mul_(scale.float()).view(-1)[: len(own)])


def apply_reference(
    content: Tensor, width: WireFormat, base: Tensor, weight: float = 1.0, each: int | None = None
) -> None:
    """base ← base + weight · (scales · codes), computed in fp32 and rounded once to the dtype of ``base``.

    Elements of ``base`` that are not finite count as 0. Messages of several workers are added to one tensor, in their
    order, if all rows of ``base`` are the same memory (``expand``).

    ``content`` is uint8 [copies, bytes], what ``encode_reference`` wrote for each contiguous row of ``base`` [copies,
    numel], of any float dtype. It was written for messages of ``each`` elements, of which the rows may have fewer.
    Weight −1 takes back what was encoded.
    """
    # One more than the codes in a byte, since a code is what is left of its quotient by the next one.
    shares = (float(width.numbers) ** -torch.arange(width.together + 1, device=base.device)).unsqueeze(1)
    for row, target in zip(content, base, strict=True):
        for own, scale, bytes_ in _spans(target, row, width, each or len(target)):
            # Halves keep the quotients away from whole numbers, where a rounding could change their floors.
            quotients = (bytes_.float().add_(0.5).unsqueeze(1) * shares).floor_()
            numbers = torch.sub(quotients[:, :-1], quotients[:, 1:], alpha=width.numbers).view(-1, BLOCK)
            added = _values(numbers, width).mul_(scale.float()).mul_(weight)
            own.copy_(_finite(own).add_(added.view(-1)[: len(own)]))


def _encode(difference: Tensor, width: WireFormat, scales: Tensor) -> Tensor:
    """Write the scales of some blocks [blocks, 1]. Return the numbers of the codes from 0 on [blocks, 128], in fp32.

    They are made in fp32, since torch on the CPU is slow with bools.
    """
    numel = len(difference)
    if padding := len(scales) * BLOCK - numel:
        difference = torch.nn.functional.pad(difference, (0, padding))
    difference = difference.view(-1, BLOCK)
    if width.ternary:
        size, numbers = _ternary(difference, numel)
    else:
        # Not by a number: torch on CUDA would multiply by its reciprocal, which has other bits.
        size = difference.abs().amax(1, keepdim=True)
        size = size / torch.full_like(size, width.levels)
    scales.copy_(size)
    # One of the many NaNs, so that all backends write the same bytes.
    scales.view(torch.int16).masked_fill_(~size.isfinite(), BF16_NAN)
    scale = scales.float()
    if width.bits == 2:
        numbers = difference.clone().ge_(-2 * scale)
        for border in (torch.zeros_like(scale), 2 * scale):
            numbers.add_(difference.clone().ge_(border))
    elif not width.ternary:
        # Differences in a block with scale 0, or with scale NaN, get the code 0.
        numbers = difference / torch.where(scale > 0, scale, torch.inf)
        numbers.nan_to_num_().round_().clamp_(-width.levels, width.levels).add_(width.numbers // 2)
    # All backends write the same bytes of a block whose scale is NaN.
    return numbers.mul_(scale.isfinite())


def _values(numbers: Tensor, width: WireFormat) -> Tensor:
    """Return what codes stand for, in units of their scales, in place of their numbers."""
    return numbers.mul_(2).sub_(3) if width.bits == 2 else numbers.sub_(width.numbers // 2)


def _ternary(difference: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the scale of each block [blocks, 1], and the numbers of its codes [blocks, 128]."""
    # Padding must not lower the mean.
    counts = torch.arange(numel, numel - difference.numel(), -BLOCK, device=difference.device).clamp_(1, BLOCK)
    kept = difference.abs()
    # Sums of 128ths cannot overflow.
    magnitude = kept * (1 / BLOCK)
    zero = _sum(magnitude) / counts.unsqueeze(1) * (TERNARY_ZERO * BLOCK)
    kept.gt_(zero)
    scale = _sum(magnitude.mul_(kept)) / kept.sum(1, keepdim=True).clamp_(min=1)
    # A larger mean would be infinite in bf16. NaN stays NaN.
    size = torch.where(zero.isfinite(), (scale * BLOCK).clamp_(max=LARGEST_BF16), zero)
    return size, kept.mul_(difference.sign()).add_(1)


def _sum(x: Tensor) -> Tensor:
    """Return the sums of rows: of neighbours, then of neighbours among these sums, and so on, as all backends do."""
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x


def _finite(base: Tensor) -> Tensor:
    """Return fp32 values, a copy, with 0 instead of what is not finite."""
    return base.float().nan_to_num(0.0, 0.0, 0.0)


def _spans(flat: Tensor, content: Tensor, width: WireFormat, each: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return views of elements, their scales [blocks, 1] and packed codes [blocks that share bytes, their bytes]."""
    numel = len(flat)
    if not numel:
        # A row of no bytes may begin anywhere, also where no scale can be.
        return []
    blocks, (codes, _) = width.difference_blocks(numel), width.difference_bytes(each)
    scales = content[: SCALE_BYTES * blocks].view(torch.bfloat16).view(blocks, 1)
    code_bytes = BLOCK * width.bits // 8
    groups = blocks // width.blocks
    packed = content[codes : codes + groups * code_bytes].view(groups, code_bytes)
    span = SPAN * torch.get_num_threads() if flat.device.type == "cpu" else max(1, groups) * width.blocks * BLOCK
    parts = flat.split(span), scales.split(span // BLOCK), packed.split(span // (width.blocks * BLOCK))
    return list(zip(*parts, strict=True))
