"""Device functions that draw random numbers: the same numbers as ``random_directions`` of the reference."""

import triton
import triton.language as tl

WINDOW = tl.constexpr(512)
"""Rows of a direction that replaces a column after the first pass. Elsewhere it is 0, so that only these rows have to
be multiplied with the other columns. Which rows they are is random."""


@triton.jit
def mix(x):
    """A bijection of uint32 in which every input bit changes about half of the output bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stream_of(key, step):
    """The stream of random values of a matrix's key, uint32, in a step: all workers draw the same."""
    return mix(mix(key) ^ (step * 0x9E3779B9 + 0x85EBCA6B).to(tl.uint32))


@triton.jit
def window_of(n, stream):
    """The first of the rows of n that such a direction has, int32."""
    return (stream % tl.maximum(n - (WINDOW - 1), 1).to(tl.uint32)).to(tl.int32)


@triton.jit
def random_values(within, stream):
    """fp32 values from [−1, 1), which depend only on an element's number ``within`` the factor and on the stream."""
    return (mix(mix(within.to(tl.uint32)) ^ stream) >> 8).to(tl.float32) * 2.0**-23 - 1.0
