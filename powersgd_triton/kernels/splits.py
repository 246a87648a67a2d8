"""How the sums behind blocks of P or Q are split into parts, so that a GPU's multiprocessors finish together."""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

BUSY = 0.92
"""Parts are as long as they can be while this share of the GPU's time is used. Shorter ones would only add traffic."""

RESIDENT = 2
"""Programs that run on a multiprocessor at the same time, so that one computes while the other waits for memory."""

FEW_PART = 256
"""Shortest part if there is not enough work to keep all multiprocessors busy, whatever the parts."""

SHRINK = 0.94
"""Ratio of one length that is tried to the one before it."""


class Sums(NamedTuple):
    """The sums of one matrix: ``tiles`` sums of ``size`` blocks, each of which may have ``most`` parts."""

    tiles: int
    size: int
    most: int


def part_lengths(sums: Sequence[tuple[int, int, int]], block: int, multiprocessors: int) -> list[int]:
    """Return for each matrix the length of its parts, a multiple of ``block``, the terms that a program adds at a time.

    ``sums`` are (number of sums, terms of each, rank) of each matrix. For each ``length`` elements of M, a part has
    ``rank`` elements, which are written once and read once. With at least 16 · rank elements of M, that is at most an
    eighth of what is read of M.
    """
    matrices = [Sums(tiles, -(-size // block), max(1, size // max(block, 16 * rank))) for tiles, size, rank in sums]
    wished, even = _wished(Counter(matrices), -(-FEW_PART // block), multiprocessors)
    return [block * _length(matrix, wished, even) for matrix in matrices]


def _length(matrix: Sums, wished: int, even: bool) -> int:
    """Return the length of a matrix's parts in blocks, of which the last may be shorter."""
    count = min(matrix.most, -(-matrix.size // wished))
    return -(-matrix.size // count) if even or count == matrix.most else wished


def _wished(matrices: Mapping[Sums, int], few: int, multiprocessors: int) -> tuple[int, bool]:
    """Return the longest parts that keep all multiprocessors busy, in blocks, or else the best ones.

    A program that is left alone on a multiprocessor runs up to ``RESIDENT`` times as fast. If it does, multiprocessors
    count. If it runs as fast as before, slots do. Parts should be good in both cases. With ``even``, all parts of a sum
    are about as long as each other. Otherwise the last is short, and fills what other programs leave of the time.
    """

    def programs(wished: int, even: bool) -> Counter[int]:
        """Return {length: number of programs}."""
        found: Counter[int] = Counter()
        for matrix, count in matrices.items():
            length = _length(matrix, wished, even)
            whole, rest = divmod(matrix.size, length)
            found[length] += whole * matrix.tiles * count
            found[rest] += matrix.tiles * count if rest else 0
        return found

    wished = max((matrix.size for matrix in matrices), default=1)
    shortest = min((matrix.size // matrix.most for matrix in matrices), default=1)
    if sum(programs(shortest, False).values()) < RESIDENT * multiprocessors:
        shortest = min(wished, max(shortest, few))
    best = (0.0, wished, False)
    while wished >= shortest:
        for even in (False, True):
            count = programs(wished, even)
            shares = [busy_share(count, slots) for slots in (multiprocessors, RESIDENT * multiprocessors)]
            if min(shares) >= BUSY:
                return wished, even
            # What is alone on a multiprocessor is nearer to the former: it has the bandwidth for itself.
            best = max(best, (2 * shares[0] + shares[1], wished, even))
        wished = min(wished - 1, int(wished * SHRINK))
    return best[1:]


def busy_share(programs: Mapping[int, int], slots: int) -> float:
    """Return the share of the time of ``slots`` in which they run {length: number of programs}, the longest first."""
    # Slots that end at the same time: (time, number of slots).
    ends = [(0, slots)]
    for length in sorted(programs, reverse=True):
        left = programs[length]
        while left:
            end, count = heapq.heappop(ends)
            taken = min(left, count)
            left -= taken
            heapq.heappush(ends, (end + length, taken))
            if count > taken:
                heapq.heappush(ends, (end, count - taken))
    work = sum(length * count for length, count in programs.items())
    return work / (slots * max(max(ends)[0], 1))


def parts(size: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, number) of each part."""
    for number, start in enumerate(range(0, size, length)):
        yield start, min(size, start + length), number
