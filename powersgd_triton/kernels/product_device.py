"""The product of two tiles: three products of tf32 values where tensor cores know these, nearly as exact as fp32."""

import os

import triton
import triton.language as tl

TENSOR_CORES = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""The interpreter multiplies in fp32."""

KEPT = tl.constexpr(-(1 << 13))
"""Masks the bits of an fp32 value that tf32 has."""

HALF = tl.constexpr(1 << 12)
"""Half of the last of these bits."""

UP = tl.constexpr(2.0**-11 / 1.5)
"""About half of that bit of a number between 1 and 2: its product with such a number is from 2/3 to 4/3 of it."""


@triton.jit
def _split(x):
    """x as the sum of a tf32 value and a rest. Tensor cores ignore the rest's other bits, as if it were rounded."""
    large = ((x.to(tl.int32, bitcast=True) + HALF) & KEPT).to(tl.float32, bitcast=True)
    rest = x - large
    # HALF would make 0 of NaN, whose bits are all 1 on a GPU. It has done so above, but not here.
    return large, tl.fma(rest, UP, rest)


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """a b in fp32. What depends on an element that is infinite, or that tf32 rounds to infinity, becomes NaN.

    Triton's own "tf32x3" keeps such infinities, for which it takes up to a fifth more instructions.
    """
    if PRECISION == "tf32x3" and TENSOR_CORES:
        a_large, a_rest = _split(a)
        b_large, b_rest = _split(b)
        product = tl.dot(a_rest, b_large, input_precision="tf32")
        product = tl.dot(a_large, b_rest, product, input_precision="tf32")
        product = tl.dot(a_large, b_large, product, input_precision="tf32")
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product
