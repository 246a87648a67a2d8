"""Device functions that round elements of flat tensors, to codes stochastically or not: the reference's bits."""

import triton
import triton.language as tl

from powersgd_triton.kernels.random_device import mix
from powersgd_triton.kernels.wire_device import BF16_NAN, bf16_bits, from_bf16_bits
from powersgd_triton.layout import constants
from powersgd_triton.layout.wire_format import LARGEST_BF16

LARGEST = tl.constexpr(LARGEST_BF16)
SHIFT = tl.constexpr(constants.E4M3_SHIFT)
EXPONENT = tl.constexpr(constants.E4M3_EXPONENT)
MULTIPLES = tl.constexpr(constants.E4M3_MULTIPLES)


@triton.jit
def both(block, scalar):
    """block & scalar, as a mask. Without the comparison, Triton 3.9's interpreter takes it for integers."""
    return (block & scalar) != 0


@triton.jit
def finite_or_zero(x):
    """x in fp32, and 0 instead of what is not finite."""
    x = x.to(tl.float32)
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 values in a dtype, rounded to nearest: Triton's interpreter truncates where GPUs round to bf16."""
    if dtype == tl.bfloat16:
        return bf16_bits(x).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def noise_of(place, span, part, seed):
    """The random numbers below 2¹⁶ of elements of a part at these places, which are in one span of PERIOD elements."""
    start = mix(mix((span + (part << 20)).to(tl.uint32)) ^ seed.to(tl.uint32))
    x = place.to(tl.uint32) + start
    # Lower bits of products do not depend on upper ones, so these need no mask before the end.
    x = (x ^ ((x >> 8) & 0xFF)) * 0x88B5
    x = (x ^ ((x >> 7) & 0x1FF)) * 0xDB2D
    return ((x ^ ((x >> 9) & 0x7F)) & 0xFFFF).to(tl.int32)


@triton.jit
def rounded_code(x, noise, LEVELS: tl.constexpr, NUMBERS: tl.constexpr, MANTISSA: tl.constexpr):
    """Codes of numbers: of the nearest ones, or with random numbers of one of both neighbours."""
    if MANTISSA == 7:
        rounded = from_bf16_bits(bf16_bits(x))
        if noise is not None:
            rounded = ((x.to(tl.int32, bitcast=True) + noise) & -65536).to(tl.float32, bitcast=True)
        rounded = tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST)
        code = tl.where(tl.abs(x) < float("inf"), rounded.to(tl.int32, bitcast=True) >> 16, BF16_NAN)
    else:
        # Scales below bf16's normal numbers are rounded coarsely: a quotient may exceed the levels.
        x = tl.minimum(tl.maximum(x, -LEVELS), LEVELS)
        if MANTISSA == 0:
            # 128 and 16 bits behind the point: the sum with a number is rounded to as many.
            code = (x + (noise | 0x43000000).to(tl.float32, bitcast=True)).to(tl.int32) + (NUMBERS // 2 - 128)
        else:
            if noise is None:
                # A number of 1.5 · 2²³ units in the last place of the format: only its multiples remain in the sum.
                unit = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, EXPONENT) + MULTIPLES
                x = (x + unit.to(tl.float32, bitcast=True)) - unit.to(tl.float32, bitcast=True)
            else:
                # 0 in the place of −0.
                x += 0.0
            bits = (x * SHIFT).to(tl.int32, bitcast=True)
            if noise is not None:
                bits += noise << 4
            code = ((bits >> 20) & 0x7F) | ((bits >> 24) & 0x80)
    return code


@triton.jit
def value_of(code, scale, NUMBERS: tl.constexpr, MANTISSA: tl.constexpr):
    """What codes stand for."""
    if MANTISSA == 7:
        number = (code << 16).to(tl.float32, bitcast=True)
    elif MANTISSA == 3:
        number = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * (1 / SHIFT)
    elif NUMBERS == 4:
        number = (2 * code - 3).to(tl.float32)
    else:
        number = (code - NUMBERS // 2).to(tl.float32)
    return number * scale
