"""Differences between a flat tensor and its copies, in few bits an element, as ``ops/differences.py`` defines.

A program works on groups of 128-element blocks that share bytes: one block, or five in ternary codes. It takes a block
of each at a time, [groups, parts, elements]. Byte j of a group holds element j of each part of each block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import NUMERICS
from powersgd_triton.kernels.rounding_device import both, finite_or_zero, noise_of, round_to, rounded_code, value_of
from powersgd_triton.kernels.wire_device import BF16_NAN, bf16_bits, from_bf16_bits, nearest_code, quotient
from powersgd_triton.layout import constants
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.wire_format import BLOCK, LARGEST_BF16, TERNARY_ZERO, WireFormat

GROUPS = 16
WARPS = 4
NUMBERS = 1024
"""Numbers that a program looks at."""
LARGEST = tl.constexpr(LARGEST_BF16)
ZERO = tl.constexpr(TERNARY_ZERO * BLOCK)
PERIOD = tl.constexpr(constants.PERIOD)
INFINITE = tl.constexpr(constants.INFINITE_BF16)


@triton.jit
def _groups(numel, BLOCKS: tl.constexpr, GROUPS: tl.constexpr):
    """Numbers of this program's groups [GROUPS], and which of them exist."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    return group, group * (128 * BLOCKS) < numel


@triton.jit
def _places(block, numel, PARTS: tl.constexpr):
    """Places of the blocks' elements [GROUPS, PARTS, 128 // PARTS], which of them exist, and how many [GROUPS]."""
    element = tl.arange(0, PARTS)[:, None] * (128 // PARTS) + tl.arange(0, 128 // PARTS)[None, :]
    # In 32 bits: masks of 64-bit places take many registers.
    counts = tl.minimum(numel - block * 128, 128).to(tl.int32)
    return block[:, None, None] * 128 + element[None, :, :], element[None, :, :] < counts[:, None, None], counts


@triton.jit
def _sum(x, GROUPS: tl.constexpr):
    """Sums of [GROUPS, 1, 128]: of neighbours, then of neighbours among these sums, and so on."""
    for k in tl.static_range(7):
        x = tl.sum(tl.reshape(x, [GROUPS, 64 // 2**k, 2]), axis=2)
    return tl.reshape(x, [GROUPS])


@triton.jit
def _ternary(x, counts, GROUPS: tl.constexpr):
    """The blocks' scales, and the magnitudes up to which elements are 0. A block has ``counts`` elements."""
    # Sums of 128ths cannot overflow.
    magnitude = tl.abs(x) * (1 / 128)
    zero = tl.div_rn(_sum(magnitude, GROUPS), counts) * ZERO
    kept = tl.abs(x) > zero[:, None, None]
    number = tl.maximum(tl.sum(tl.sum(kept.to(tl.int32), axis=2), axis=1), 1)
    scale = tl.div_rn(_sum(tl.where(kept, magnitude, 0.0), GROUPS), number.to(tl.float32)) * 128
    # A larger mean would be infinite in bf16.
    return tl.where(zero < float("inf"), tl.minimum(scale, LARGEST), float("inf")), zero[:, None, None]


@triton.jit(do_not_specialize=["seed"])
def _encode_difference_kernel(
    target, base, term, other, scales, codes, numel, each, distance, seed, SUBTRACT: tl.constexpr, LEVELS: tl.constexpr,
    LARGEST_SCALE: tl.constexpr, PARTS: tl.constexpr, NUMBERS: tl.constexpr, MANTISSA: tl.constexpr,
    BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Scales and codes of target − base; target −= what they stand for, if SUBTRACT. It is term + other, if given.

    Grid: sets of GROUPS groups × parts of ``each`` elements, of which the last may have fewer.
    """
    part = tl.program_id(1).to(tl.int64)
    target += part * each
    if base is not None:
        base += part * each
    if term is not None:
        term += part * each
        other += part * each
    scales += part * (distance // 2)
    codes += part * (distance // (2 if MANTISSA == 7 else 1))
    numel = tl.minimum(numel - part * each, each)
    group, some = _groups(numel, BLOCKS, GROUPS)
    shift = tl.arange(0, PARTS) * (8 // PARTS)
    both = tl.zeros([GROUPS, 128 // PARTS], tl.int32)
    digit = 1
    # Not unrolled: that takes up to three times as many registers.
    for k in range(BLOCKS):
        block = group * BLOCKS + k
        place, ok, counts = _places(block, numel, PARTS)
        own = tl.load((target if term is None else term) + place, ok, 0.0).to(tl.float32)
        if term is not None:
            own += tl.load(other + place, ok, 0.0).to(tl.float32)
            own = round_to(own, target.dtype.element_ty).to(tl.float32)
        x = own
        if base is not None:
            x -= finite_or_zero(tl.load(base + place, ok, 0.0))
        noise = seed
        if seed is not None:
            # Programs divide spans.
            noise = noise_of(place, tl.program_id(0) * (GROUPS * 128) // PERIOD, part, seed)
        scale = tl.full([GROUPS, 1, 1], 1.0, tl.float32)
        if MANTISSA != 7:
            if NUMBERS == 3:
                # Padding must not lower the mean.
                size, zero = _ternary(x, tl.maximum(counts, 1).to(tl.float32), GROUPS)
            else:
                size = tl.abs(x)
                size = tl.max(tl.max(tl.where(size < float("inf"), size, float("inf")), axis=2), axis=1)
                size = tl.div_rn(size, tl.full([GROUPS], LEVELS, tl.float32))
            bits = bf16_bits(size)
            if seed is not None:
                # Up, so that no quotient exceeds the levels.
                bits = (size.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
            # Not larger by rounding: what a code stands for must be finite.
            bits = tl.where(size < float("inf"), tl.minimum(bits, LARGEST_SCALE), BF16_NAN).to(tl.int16)
            tl.store(scales + block, bits, some)
            # The scale as it is stored, since that is what the codes are multiplied by.
            scale = from_bf16_bits(bits)[:, None, None]
        if NUMBERS == 3:
            code = (x >= -zero).to(tl.int32) + (x > zero).to(tl.int32)
        elif NUMBERS == 4:
            code = (x >= -2 * scale).to(tl.int32) + (x >= 0).to(tl.int32) + (x >= 2 * scale).to(tl.int32)
        elif MANTISSA == 7:
            code = rounded_code(x, noise, LEVELS, NUMBERS, MANTISSA)
        elif MANTISSA == 3 or seed is not None:
            code = rounded_code(quotient(x, scale), noise, LEVELS, NUMBERS, MANTISSA)
        else:
            code = nearest_code(x, scale, LEVELS).to(tl.int32) + NUMBERS // 2
        code = tl.where(scale == scale, code, 0)
        both += tl.sum(code << shift[None, :, None], axis=1) * digit
        digit *= NUMBERS
        if SUBTRACT:
            left = own - value_of(code, scale, NUMBERS, MANTISSA)
            tl.store(target + place, round_to(left, target.dtype.element_ty), ok)
    byte = group[:, None] * (128 // PARTS) + tl.arange(0, 128 // PARTS)[None, :]
    tl.store(codes + byte, both.to(codes.dtype.element_ty), some[:, None])


@triton.jit(do_not_specialize=["fresh"])
def _apply_difference_kernel(
    scales, codes, base, numel, size, messages, distance, weight, fresh,
    PARTS: tl.constexpr, NUMBERS: tl.constexpr, MANTISSA: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """base += codes · (scales · weight), of all ``messages`` or of one a copy. Grid: sets of GROUPS groups × copies.

    If ``fresh``, what base contains counts as 0.
    """
    group, some = _groups(numel, BLOCKS, GROUPS)
    copy = tl.program_id(1).to(tl.int64)
    # Elements of codes.
    length = size // (2 if MANTISSA == 7 else 1)
    base += copy * distance
    scales += copy * (size // 2)
    codes += copy * length
    byte = group[:, None] * (128 // PARTS) + tl.arange(0, 128 // PARTS)[None, :]
    shift = tl.arange(0, PARTS) * (8 // PARTS)
    digit = 1
    for k in range(BLOCKS):
        block = group * BLOCKS + k
        place, ok, _ = _places(block, numel, PARTS)
        # Loaded in any case, so that what is added has the layout of base. −0 changes no number that is added.
        x = finite_or_zero(tl.load(base + place, both(ok, fresh == 0), -0.0))
        message_scales, message_codes = scales, codes
        for _ in range(messages):
            scale = tl.full([GROUPS, 1, 1], 1.0, tl.float32)
            if MANTISSA != 7:
                scale = from_bf16_bits(tl.load(message_scales + block, some, 0))[:, None, None]
            code = tl.load(message_codes + byte, some[:, None], 0).to(tl.int32)[:, None, :]
            if NUMBERS == 3:
                # Divided by the digit: exact below 2¹⁶ / digit.
                code = ((code * (65536 // digit + 1)) >> 16) % NUMBERS
            elif MANTISSA == 0:
                code = (code >> shift[None, :, None]) % NUMBERS
            message_scales += size // 2
            message_codes += length
            x = round_to(x + value_of(code, scale * weight, NUMBERS, MANTISSA), base.dtype.element_ty).to(tl.float32)
        tl.store(base + place, x.to(base.dtype.element_ty), ok)
        digit *= NUMBERS


@triton.jit
def _note_infinite_kernel(bits, verdict, numel, distance, SIZE: tl.constexpr):
    """verdict = 0 if bits of a bf16 number are those of BF16_NAN or of an infinity. Grid: parts of rows × rows."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    own = tl.load(bits + tl.program_id(1).to(tl.int64) * distance + place, place < numel, 0).to(tl.int32)
    if tl.max(own, axis=0) >= INFINITE:
        tl.store(verdict, 0)


def _launch(kernel: Any, copies: int, numel: int, width: WireFormat, *arguments: Any, **constants: Any) -> None:
    """Launch one of the kernels for copies of so many elements."""
    programs = triton.cdiv(width.difference_blocks(numel), width.blocks * GROUPS)
    constants |= {"PARTS": max(1, 8 // width.bits), "NUMBERS": width.numbers, "MANTISSA": width.mantissa}
    kernel[(programs, copies)](
        *arguments, **constants, BLOCKS=width.blocks, GROUPS=GROUPS, num_warps=WARPS, **NUMERICS
    )  # fmt: skip


def _views(content: Tensor, width: WireFormat, offset: int) -> tuple[Tensor, Tensor]:
    """Messages as bits of scales, and as codes from an offset in bytes on."""
    flat = content.view(-1)
    codes = flat[offset:]
    return flat.view(torch.int16), codes if width.bits <= 8 else codes.view(torch.int16)


def note_infinite_triton(bits: Tensor, verdict: Tensor) -> None:
    """Set the verdict to 0 as ``note_infinite_reference`` does, if rows of numbers are contiguous."""
    rows, numel = bits.shape
    if bits.numel():
        _note_infinite_kernel[(triton.cdiv(numel, NUMBERS), rows)](
            bits, verdict, numel, bits.stride(0), SIZE=NUMBERS, num_warps=WARPS, **NUMERICS
        )


def encode_triton(task: Encoding) -> None:
    """out = scales and codes of target − base, with the bits of ``encode_reference``."""
    target, base, width, out, subtract, each, seed, terms = task
    numel = target.numel()
    each = each or numel
    codes, size = width.difference_bytes(each)
    if terms is not None and not subtract:
        torch.add(*terms, out=target)
        terms = None
    if numel:
        if seed is not None:
            # As an int32, which has the same bits.
            seed = (seed ^ 1 << 31) - (1 << 31) if width.stochastic else None
        arguments = target, base, *(terms or (None, None)), *_views(out, width, codes), numel, each, size, seed
        largest = int(torch.tensor(width.largest_scale, dtype=torch.bfloat16, device="cpu").view(torch.int16))
        constants = {"SUBTRACT": subtract, "LEVELS": width.levels, "LARGEST_SCALE": largest}
        _launch(_encode_difference_kernel, triton.cdiv(numel, each), each, width, *arguments, **constants)


def apply_triton(task: Decoding) -> None:
    """base += codes · (scales · weight), with the bits of ``apply_reference``."""
    content, width, base, weight, each, fresh = task
    copies, numel = base.shape
    codes, size = width.difference_bytes(each or numel)
    if numel:
        # To rows that are the same memory, one program adds one message after the other.
        copies, messages = (copies, 1) if base.stride(0) else (1, copies)
        arguments = *_views(content, width, codes), base, numel, size, messages, base.stride(0), weight, int(fresh)
        _launch(_apply_difference_kernel, copies, numel, width, *arguments)
