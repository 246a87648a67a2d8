"""Device functions that turn addresses into pointers, and say what divides them.

The compiler knows nothing about integers that it loads. From ``x // V * V`` it learns that V divides x. The value is
the same, since the host only writes multiples. From this the compiler derives that accesses of 16 bytes are aligned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from powersgd_triton.layout.wire_format import ALIGNMENT

WIDEST = tl.constexpr(ALIGNMENT)
"""Bytes of the widest memory access."""


@triton.jit
def tensor_address(base, distances, tensor):
    """Address of the first element of a matrix or a bypass tensor from ``Pointers``, int64."""
    return base + tl.load(distances + tensor)


@triton.jit
def pointer_to(address, TYPE: tl.constexpr, VEC: tl.constexpr):
    """An address as a pointer to elements of a type. It is a multiple of 16 bytes if VEC is not 1."""
    pointer = address.to(tl.pointer_type(TYPE))
    if VEC > 1:
        # The compiler does not see through the cast what divides the address.
        pointer = tl.multiple_of(pointer, WIDEST)
    return pointer


@triton.jit
def rows_are_aligned(addresses, m, VEC: tl.constexpr):
    """Whether all rows of m elements start at multiples of 16 bytes and hold whole vectors of VEC elements.

    ``addresses`` are those of the matrices in question, combined by ``|``.
    """
    return (addresses % WIDEST == 0) & (m % VEC == 0)


@triton.jit
def known_multiple(x, VEC: tl.constexpr):
    """x, in a form from which the compiler sees that VEC divides it."""
    return x // VEC * VEC
