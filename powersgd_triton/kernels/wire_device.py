"""Device functions of the wire's kernels: where a tile lies, and its codes and scales.

Rounding uses integers and additions only, so that every device, and the reference, computes the same bits. Compilers
may fuse the products of codes and scales with sums: products of at most 19 bits are exact either way (down to 2⁻¹⁴⁹).

A tile is worked on in two halves of its rows, since a byte of 4-bit codes holds a row of each.
"""

import triton
import triton.language as tl

from powersgd_triton.kernels.table_device import WireRow, indices, known_multiple
from powersgd_triton.layout import constants
from powersgd_triton.layout.wire_format import SCALE_BYTES

WIRE, WIRE_CHUNK, WIRE_ELEMENT, WIRE_ROWS, WIRE_COLUMNS, WIRE_RANK, WIRE_SCALES, WIRE_CODES = indices(WireRow)

EXACT_BYTES = tl.constexpr(4)
"""Bytes of an element of messages, which are fp32."""

SCALE = tl.constexpr(SCALE_BYTES)
BF16_NAN = tl.constexpr(constants.BF16_NAN)
INTEGERS = tl.constexpr(12582912.0)
"""1.5 · 2²³: a number of at most 2²² loses the bits behind its point when it is added, ties to even."""


@triton.jit
def views_of(content, BITS: tl.constexpr, LEVELS: tl.constexpr):
    """Bytes as exact elements, as bits of scales, and as codes."""
    if BITS == 16:
        codes = content.to(tl.pointer_type(tl.int16 if LEVELS == 0 else tl.float16))
    else:
        codes = content.to(tl.pointer_type(tl.int8))
    return content.to(tl.pointer_type(tl.float32)), content.to(tl.pointer_type(tl.int16)), codes


@triton.jit
def wire_entry(table, program, size):
    """(the program's row of the table, where its chunk starts in bytes, its first element of the message)."""
    entry = table + program * WIRE
    return entry, tl.load(entry + WIRE_CHUNK) * size, tl.load(entry + WIRE_ELEMENT)


@triton.jit
def exact_slice(entry, chunk, COPY: tl.constexpr):
    """(0 to COPY − 1, where these exact elements are in the bytes as fp32, which of them are in the slice)."""
    i = tl.arange(0, COPY)
    return i, (chunk + tl.load(entry + WIRE_CODES)) // EXACT_BYTES + i, i < tl.load(entry + WIRE_ROWS)


@triton.jit
def tile_is_aligned(entry, chunk, BITS: tl.constexpr):
    """Whether all rows of a tile start at multiples of 4 elements, if chunks do at multiples of ``chunk`` bytes."""
    elements = tl.load(entry + WIRE_ELEMENT) | tl.load(entry + WIRE_RANK) | tl.load(entry + WIRE_COLUMNS)
    return (elements % 4 == 0) & ((chunk | tl.load(entry + WIRE_CODES)) % (4 * bytes_of_code(BITS)) == 0)


@triton.jit
def wire_tile(entry, chunk, VEC: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr):
    """(first element, place of its scales, of its codes, tile). Places are in the bytes, each in units of its own.

    A tile is (offsets of the lower half [HALF, C], distance of the upper half, masks of both, mask of columns).
    """
    rows = tl.load(entry + WIRE_ROWS).to(tl.int32)
    # The compiler is to see that VEC divides both: then rows are aligned, and masks do not cut through a vector.
    columns = known_multiple(tl.load(entry + WIRE_COLUMNS).to(tl.int32), VEC)
    rank = known_multiple(tl.load(entry + WIRE_RANK).to(tl.int32), VEC)
    half = (rows + 1) // 2
    k = tl.arange(0, HALF)
    cols = tl.arange(0, C)
    col_ok = cols < columns
    offsets = k[:, None] * rank + cols[None, :]
    low_ok = (k < half)[:, None] & col_ok[None, :]
    high_ok = (half + k < rows)[:, None] & col_ok[None, :]
    scale = (chunk + tl.load(entry + WIRE_SCALES)) // SCALE
    code = known_multiple((chunk + tl.load(entry + WIRE_CODES)) // bytes_of_code(BITS), VEC)
    tile = offsets, half * rank, low_ok, high_ok, col_ok
    return known_multiple(tl.load(entry + WIRE_ELEMENT), VEC), scale, code, tile


@triton.jit
def load_tile(pointer, tile):
    """Both halves of a tile of fp32 values."""
    offsets, distance, low_ok, high_ok, _ = tile
    return tl.load(pointer + offsets, low_ok, 0.0), tl.load(pointer + distance + offsets, high_ok, 0.0)


@triton.jit
def store_tile(pointer, low, high, tile):
    """Store both halves of a tile."""
    offsets, distance, low_ok, high_ok, _ = tile
    tl.store(pointer + offsets, low, low_ok)
    tl.store(pointer + distance + offsets, high, high_ok)


@triton.jit
def bytes_of_code(BITS: tl.constexpr):
    """Bytes of a code, or of two codes of 4 bits."""
    return 2 if BITS == 16 else 1


@triton.jit
def bf16_bits(x):
    """The 16 bits of x rounded to bf16, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding a NaN's bits could make an infinity of it.
    return tl.where(x == x, rounded, BF16_NAN).to(tl.int16)


@triton.jit
def from_bf16_bits(bits):
    """The fp32 value of bf16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """Largest |x| of each column. It is infinite if a value is not finite, NaN included."""
    size = tl.abs(x)
    return tl.max(tl.where(size < float("inf"), size, float("inf")), axis=0)


@triton.jit
def quotient(x, scale):
    """x / scale, rounded to nearest. It is 0 if the scale is 0 or NaN."""
    some = scale > 0
    # Plain division is an approximation on GPUs.
    return tl.where(some, tl.div_rn(x, tl.where(some, scale, 1.0) + tl.zeros_like(x)), 0.0)


@triton.jit
def nearest_code(x, scale, LEVELS: tl.constexpr):
    """round(x / scale), ties to even, at most ± LEVELS, in fp32. It is 0 if the scale is 0 or NaN."""
    code = quotient(x, scale)
    # Quotients are below 2²².
    code = (code + INTEGERS) - INTEGERS
    # Scales below bf16's normal numbers are rounded coarsely: a quotient may exceed the levels.
    return tl.minimum(tl.maximum(code, -LEVELS), LEVELS)


@triton.jit
def write_tile(low, high, scales, codes, tile, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr):
    """Write a tile's scales and codes. Return both halves as these represent them."""
    offsets, _, low_ok, _, col_ok = tile
    if LEVELS == 0:
        # bf16 itself, without scales.
        low_codes, high_codes = bf16_bits(low), bf16_bits(high)
        low, high = from_bf16_bits(low_codes), from_bf16_bits(high_codes)
    else:
        largest = tl.maximum(magnitude(low), magnitude(high))
        bits = bf16_bits(tl.div_rn(largest, tl.full([C], LEVELS, tl.float32)))
        # A column with an element that is not finite arrives as NaN, wherever it is read.
        bits = tl.where(largest < float("inf"), bits, BF16_NAN).to(tl.int16)
        tl.store(scales + tl.arange(0, C), bits, col_ok)
        # The divisor is the scale as it is stored, since that is what the codes are multiplied by.
        scale = from_bf16_bits(bits)[None, :]
        if BITS == 16:
            low_codes, high_codes = quotient(low, scale).to(tl.float16), quotient(high, scale).to(tl.float16)
        else:
            low_codes = nearest_code(low, scale, LEVELS).to(tl.int8)
            high_codes = nearest_code(high, scale, LEVELS).to(tl.int8)
        low, high = low_codes.to(tl.float32) * scale, high_codes.to(tl.float32) * scale
    if BITS == 4:
        # Where the number of rows is odd, the last upper row is one of zeros.
        both = (low_codes.to(tl.int32) & 15) | (high_codes.to(tl.int32) << 4)
        tl.store(codes + offsets, both.to(tl.int8), low_ok)
    else:
        store_tile(codes, low_codes, high_codes, tile)
    return low, high


@triton.jit
def read_tile(scales, codes, tile, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr):
    """Both halves of a tile, as its scales and codes represent them."""
    offsets, distance, low_ok, high_ok, col_ok = tile
    low_codes = tl.load(codes + offsets, low_ok, 0)
    if BITS == 4:
        both = low_codes.to(tl.int32)
        # Shifts of signed integers restore the signs.
        low_codes, high_codes = (both << 28) >> 28, both >> 4
    else:
        high_codes = tl.load(codes + distance + offsets, high_ok, 0)
    if LEVELS == 0:
        low, high = from_bf16_bits(low_codes), from_bf16_bits(high_codes)
    else:
        scale = from_bf16_bits(tl.load(scales + tl.arange(0, C), col_ok, 0))[None, :]
        low, high = low_codes.to(tl.float32) * scale, high_codes.to(tl.float32) * scale
    return low, high


@triton.jit
def add_tiles(
    content, stride, workers, scale, code, tile,
    VEC: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Both halves of the sum of a tile of several workers, whose bytes are ``stride`` apart."""
    low_sum = tl.zeros([HALF, C], tl.float32)
    high_sum = tl.zeros([HALF, C], tl.float32)
    stride = known_multiple(stride, VEC * bytes_of_code(BITS))
    # In the order of the workers, as in the reference: the same bits.
    for worker in range(workers):
        _, scales, codes = views_of(content + worker * stride, BITS, LEVELS)
        low, high = read_tile(scales + scale, codes + code, tile, BITS, LEVELS, C)
        low_sum += low
        high_sum += high
    return low_sum, high_sum
