"""How the sum behind one block of P or Q is split into parts, so that neither too few nor too uneven programs run.

Each part is a program's, which writes its sum to a place of its own in a workspace. A later kernel adds the parts in
their order. (Atomic additions would save that, but their order differs from run to run, and with it the last bits: the
workers would no longer hold equal factors.)
"""

from __future__ import annotations

from collections.abc import Iterator

PROGRAMS = 1024
"""About as many programs as keep the largest GPUs busy. Splitting sums further would only add traffic."""

MIN_PART = 256
"""A sum is not split into parts of fewer elements."""


def part_length(size: int, wished: int, block: int, rank: int) -> int:
    """Length of the parts, a multiple of ``block``, into which a sum over ``size`` elements is split.

    For each ``length`` elements of M a part has ``rank`` elements, which are written once and read once. With at least
    16 · rank elements of M that is at most an eighth of what is read of M.
    """
    length = max(MIN_PART, 16 * rank, wished)
    return min(-(-size // block), -(-length // block)) * block


def parts(size: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, number) of each part."""
    for number, start in enumerate(range(0, size, length)):
        yield start, min(size, start + length), number
