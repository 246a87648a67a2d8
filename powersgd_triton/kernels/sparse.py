"""The sparse format of whole tensors, as ``ops/sparse.py`` defines it. A program works on one chunk."""

import torch
import triton
import triton.language as tl

from powersgd_triton.kernels.configurations import NUMERICS
from powersgd_triton.kernels.rounding_device import both, finite_or_zero, round_to
from powersgd_triton.kernels.wire_device import BF16_NAN, bf16_bits, from_bf16_bits
from powersgd_triton.layout import sparse_format
from powersgd_triton.layout.codec import Decoding, Encoding

CHUNK = tl.constexpr(sparse_format.CHUNK)
WARPS = 8
LARGEST = tl.constexpr(0x7F7F)
INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _bytes(bits, number, out, COUNT: tl.constexpr):
    """Write the lowest bits of int16 numbers [COUNT] at ``bits`` >> ``number``, eight to a byte."""
    byte = tl.arange(0, triton.next_power_of_2(COUNT) // 8)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    found = tl.load(bits + place, place < COUNT, 0).to(tl.int32) >> number & 1
    tl.store(out + byte, tl.sum(found << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8), byte < COUNT // 8)


@triton.jit
def _encode_sparse_kernel(
    target, scales, codes, scratch, numel, each, size, SUBTRACT: tl.constexpr, KEPT: tl.constexpr, LOW: tl.constexpr,
    UNARY: tl.constexpr,
):  # fmt: skip
    """Scales and chunks of target; target −= what they stand for, if SUBTRACT. Grid: chunks × parts of ``each``.

    ``scratch`` is int16 [parts, chunks, KEPT + UNARY]: the places and signs that are sent, and the unary bits.
    """
    chunk, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    target += part * each + chunk * CHUNK
    scales += part * (size // 2) + chunk
    codes += part * size + chunk * (((LOW + 1) * KEPT + UNARY) // 8)
    scratch += (part * tl.num_programs(0) + chunk) * (KEPT + UNARY)
    count = tl.minimum(tl.minimum(numel - part * each, each) - chunk * CHUNK, CHUNK).to(tl.int32)
    if count > 0:
        place = tl.arange(0, CHUNK)
        x = tl.load(target + place, place < count, 0.0).to(tl.float32)
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        finite = tl.max(magnitude, axis=0) < INFINITE
        # The smallest magnitude that is sent, bit by bit, and as many of its size as have room. Zeros are not sent.
        most = (KEPT * count + CHUNK - 1) // CHUNK
        least = most * 0
        for k in range(31):
            larger = least | (1 << (30 - k))
            least = tl.where(tl.sum((magnitude >= larger).to(tl.int32), axis=0) >= most, larger, least)
        above, equal = magnitude > least, (magnitude == least) & (least > 0)
        room = most - tl.sum(above.to(tl.int32), axis=0)
        sent = both(above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room)), finite)
        number = tl.cumsum(sent.to(tl.int32), axis=0)
        # Divided first, so that sums do not overflow, and added in the reference's order.
        total = tl.where(sent, tl.abs(x) * (1 / CHUNK), 0.0)
        for k in tl.static_range(12):
            total = tl.sum(tl.reshape(total, [2, CHUNK // 2 ** (k + 1)]), axis=0)
        divisor = tl.maximum(tl.max(number, axis=0), 1).to(tl.float32)
        size_of_all = tl.div_rn(tl.sum(total, axis=0), divisor) * CHUNK
        bits = tl.where(finite, tl.minimum(bf16_bits(size_of_all), LARGEST), BF16_NAN).to(tl.int16)
        tl.store(scales, bits)
        negative = x < 0
        unary = scratch + KEPT
        slot = tl.arange(0, triton.next_power_of_2(KEPT))
        tl.store(scratch + slot, tl.zeros_like(slot).to(tl.int16), slot < KEPT)
        slot = tl.arange(0, triton.next_power_of_2(UNARY))
        tl.store(unary + slot, tl.zeros_like(slot).to(tl.int16), slot < UNARY)
        # Other threads write there, and then read.
        tl.debug_barrier()
        tl.store(scratch + number - 1, (place | negative.to(tl.int32) << 12).to(tl.int16), sent)
        tl.store(unary + (place >> LOW) + number - 1, tl.full([CHUNK], 1, tl.int16), sent)
        tl.debug_barrier()
        for bit in tl.static_range(LOW):
            _bytes(scratch, bit, codes + bit * (KEPT // 8), KEPT)
        _bytes(scratch, 12, codes + LOW * (KEPT // 8), KEPT)
        _bytes(unary, 0, codes + (LOW + 1) * (KEPT // 8), UNARY)
        if SUBTRACT:
            scale = from_bf16_bits(bits)
            left = tl.where(sent, x - tl.where(negative, -scale, scale), x)
            left = tl.where(finite, left, float("nan"))
            tl.store(target + place, round_to(left, target.dtype.element_ty), place < count)


@triton.jit(do_not_specialize=["fresh"])
def _apply_sparse_kernel(
    content, base, offset, numel, size, messages, distance, weight, fresh, KEPT: tl.constexpr, LOW: tl.constexpr,
    UNARY: tl.constexpr,
):  # fmt: skip
    """base += signs · (scales · weight), of all ``messages`` or of one a copy. Grid: chunks × copies.

    If ``fresh``, what base contains counts as 0.
    """
    chunk, copy = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    base += copy * distance + chunk * CHUNK
    dtype: tl.constexpr = base.dtype.element_ty
    place = tl.arange(0, CHUNK)
    ok = place < numel - chunk * CHUNK
    before = tl.where(fresh == 0, finite_or_zero(tl.load(base + place, both(ok, fresh == 0), 0.0)), 0.0)
    tl.store(base + place, round_to(before, dtype), ok)
    unary = tl.arange(0, triton.next_power_of_2(UNARY))
    for message in range(messages):
        own = content + (copy + message) * size
        scale = from_bf16_bits(tl.load(own.to(tl.pointer_type(tl.int16)) + chunk)) * weight
        codes = own + offset + chunk * (((LOW + 1) * KEPT + UNARY) // 8)
        byte = tl.load(codes + (LOW + 1) * (KEPT // 8) + unary // 8, unary < UNARY, 0).to(tl.int32)
        one = byte >> (unary % 8) & 1
        element = tl.cumsum(one, axis=0) - 1
        found = (unary - element) << LOW
        for bit in tl.static_range(LOW):
            plane = tl.load(codes + bit * (KEPT // 8) + element // 8, one > 0, 0).to(tl.int32)
            found |= (plane >> (element % 8) & 1) << bit
        sign = tl.load(codes + LOW * (KEPT // 8) + element // 8, one > 0, 0).to(tl.int32) >> (element % 8) & 1
        # A wrong message must not write elsewhere.
        sent = (one > 0) & (found < tl.minimum(numel - chunk * CHUNK, CHUNK))
        # Other threads have written there, for the message before.
        tl.debug_barrier()
        x = tl.load(base + found, sent, 0.0).to(tl.float32) + tl.where(sign > 0, -scale, scale)
        # Where few lanes are in use, several threads have read an element that one of them writes.
        tl.debug_barrier()
        tl.store(base + found, round_to(x, dtype), sent)
        if scale != scale:
            tl.store(base + place, round_to(tl.full([CHUNK], float("nan"), tl.float32), dtype), ok)


def encode_sparse_triton(task: Encoding) -> None:
    """out = scales, signs and places, with the bits of ``encode_sparse_reference``."""
    target, _, width, out, subtract, each, _, terms = task
    numel = target.numel()
    each = each or numel
    if terms is not None:
        torch.add(*terms, out=target)
    if numel:
        offset, size = width.difference_bytes(each)
        chunks, parts, flat = triton.cdiv(each, sparse_format.CHUNK), triton.cdiv(numel, each), out.view(-1)
        scratch = torch.empty(parts * chunks * (width.kept + width.unary), dtype=torch.int16, device=target.device)
        _encode_sparse_kernel[(chunks, parts)](
            target, flat.view(torch.int16), flat[offset:], scratch, numel, each, size, SUBTRACT=subtract,
            KEPT=width.kept, LOW=width.low, UNARY=width.unary, num_warps=WARPS, **NUMERICS,
        )  # fmt: skip


def apply_sparse_triton(task: Decoding) -> None:
    """base += signs · (scales · weight), with the bits of ``apply_sparse_reference``."""
    content, width, base, weight, each, fresh = task
    copies, numel = base.shape
    if numel:
        offset, size = width.difference_bytes(each or numel)
        # To rows that are the same memory, one program adds one message after the other.
        copies, messages = (copies, 1) if base.stride(0) else (1, copies)
        _apply_sparse_kernel[(triton.cdiv(numel, sparse_format.CHUNK), copies)](
            content, base, offset, numel, size, messages, base.stride(0), weight, int(fresh),
            KEPT=width.kept, LOW=width.low, UNARY=width.unary, num_warps=WARPS, **NUMERICS,
        )  # fmt: skip
