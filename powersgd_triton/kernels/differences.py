"""Differences between a flat tensor and its copies, in 8, 4 or 2 bits an element, as ``ops/differences.py`` defines.

A program works on some blocks of 128 elements as [blocks, parts, elements of a part]. The parts share bytes: byte j of
a block holds element j of each part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import NUMERICS
from powersgd_triton.kernels.wire_device import BF16_NAN, bf16_bits, from_bf16_bits, nearest_code
from powersgd_triton.layout.wire_format import BLOCK, WireFormat

BLOCKS = 16
WARPS = 4


@triton.jit
def _places(BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """Numbers of this program's blocks [BLOCKS], and places of their elements [BLOCKS, PARTS, BLOCK // PARTS]."""
    PARTS: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = 16 * BITS
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    element = tl.arange(0, PARTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return block, block.to(tl.int64)[:, None, None] * (PARTS * WIDTH) + element[None, :, :]


@triton.jit
def _finite(x):
    """x in fp32, and 0 instead of what is not finite."""
    x = x.to(tl.float32)
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _encode_difference_kernel(
    target, base, scales, codes, numel, BITS: tl.constexpr, LEVELS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Scales and codes of target − base. Grid: groups of BLOCKS blocks."""
    block, place = _places(BITS, BLOCKS)
    ok = place < numel
    x = tl.load(target + place, ok, 0.0).to(tl.float32) - _finite(tl.load(base + place, ok, 0.0))
    size = tl.abs(x)
    largest = tl.max(tl.max(tl.where(size < float("inf"), size, float("inf")), axis=2), axis=1)
    bits = bf16_bits(tl.div_rn(largest, tl.full([BLOCKS], LEVELS, tl.float32)))
    bits = tl.where(largest < float("inf"), bits, BF16_NAN).to(tl.int16)
    ok = block * 128 < numel
    tl.store(scales + block, bits, ok)
    # The scale as it is stored, since that is what the codes are multiplied by.
    scale = from_bf16_bits(bits)[:, None, None]
    if BITS == 2:
        code = (x >= -2 * scale).to(tl.int32) + (x >= 0).to(tl.int32) + (x >= 2 * scale).to(tl.int32)
    else:
        code = nearest_code(x, scale, LEVELS).to(tl.int32) + 2 ** (BITS - 1)
    code = tl.where(scale == scale, code, 0)
    shift = tl.arange(0, 8 // BITS) * BITS
    both = tl.sum(code << shift[None, :, None], axis=1)
    byte = tl.arange(0, 16 * BITS)
    tl.store(codes + block.to(tl.int64)[:, None] * (16 * BITS) + byte[None, :], both.to(tl.uint8), ok[:, None])


@triton.jit
def _apply_difference_kernel(scales, codes, base, numel, size, distance, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """base += scales · codes. Grid: groups of BLOCKS blocks × copies."""
    block, place = _places(BITS, BLOCKS)
    copy = tl.program_id(1).to(tl.int64)
    some = block * 128 < numel
    scale = from_bf16_bits(tl.load(scales + copy * (size // 2) + block, some, 0))[:, None, None]
    byte = tl.arange(0, 16 * BITS)
    offsets = block.to(tl.int64)[:, None] * (16 * BITS) + byte[None, :]
    both = tl.load(codes + copy * size + offsets, some[:, None], 0).to(tl.int32)
    shift = tl.arange(0, 8 // BITS) * BITS
    code = (both[:, None, :] >> shift[None, :, None]) & (2**BITS - 1)
    if BITS == 2:
        code = 2 * code - 3
    else:
        code = code - 2 ** (BITS - 1)
    ok = place < numel
    base += copy * distance
    x = _finite(tl.load(base + place, ok, 0.0)) + code.to(tl.float32) * scale
    if base.dtype.element_ty == tl.bfloat16:
        # Triton's interpreter truncates where GPUs round.
        x = bf16_bits(x).to(tl.bfloat16, bitcast=True)
    tl.store(base + place, x.to(base.dtype.element_ty), ok)


def encode_triton(target: Tensor, base: Tensor, width: WireFormat, out: Tensor) -> None:
    """out = scales and codes of target − base, with the bits of ``encode_reference``, which describes the arguments."""
    numel = target.numel()
    codes, _ = width.difference_bytes(numel)
    if numel:
        _encode_difference_kernel[(triton.cdiv(numel, BLOCKS * BLOCK),)](
            target, base, out[:codes].view(torch.int16), out[codes:], numel,
            BITS=width.bits, LEVELS=width.levels, BLOCKS=BLOCKS, num_warps=WARPS, **NUMERICS,
        )  # fmt: skip


def apply_triton(content: Tensor, width: WireFormat, base: Tensor) -> None:
    """base += scales · codes, with the bits of ``apply_reference``, which describes the arguments."""
    copies, numel = base.shape
    codes, size = width.difference_bytes(numel)
    if numel:
        flat = content.view(-1)
        _apply_difference_kernel[(triton.cdiv(numel, BLOCKS * BLOCK), copies)](
            flat.view(torch.int16), flat[codes:], base, numel, size, base.stride(0),
            BITS=width.bits, BLOCKS=BLOCKS, num_warps=WARPS, **NUMERICS,
        )  # fmt: skip
