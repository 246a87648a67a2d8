"""The factors of a chunk of a message as runs of equal blocks, and the memory in which plain torch works on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import BLOCK, Chunk, WireFormat

ROW = 64
"""Entries of a row from which operations on rows take little longer than operations on flat tensors."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a part of a flat tensor lies, or the same part of each row of a matrix, in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """Return the part as a view, [*shape] or [rows, *shape]."""
        offset = flat.storage_offset() + self.offset
        return flat.as_strided((*flat.shape[:-1], *self.shape), (*flat.stride()[:-1], *self.strides), offset)


@dataclasses.dataclass(frozen=True)
class Run:
    """Blocks of equal height of matrices at equal distances, and their places in a chunk's entries, scales and codes.

    Operations on short rows are slow, so several rows of a block count as one long row, with repeated scales.

    Attributes:
        entries: [count, blocks, long rows, entries of a long row].
        low, high: Halves of each block's entries, [count, blocks, entries]. The second may be a row shorter.
        scales, repeated: [count, blocks, rank], and for a long row [count, blocks, rows in a long row, rank].
        low_codes, high_codes: 4-bit codes of the halves, of which each two share a byte.
    """

    entries: Place
    low: Place
    high: Place
    scales: Place
    repeated: Place
    low_codes: Place
    high_codes: Place


class Work:
    """Memory for the operations on a chunk of some messages, and views of it, of which lists have one for each run.

    Attributes:
        values: [messages, entries].
        blocks: Blocks of ``values``, [messages, count, blocks, long rows, entries of a long row].
        long: Scales repeated for a long row, [messages, count, blocks, 1, entries of a long row].
        codes: Number of a message's codes, or of the bytes with two codes.
    """

    def __init__(self, runs: Sequence[Run], values: Tensor, width: WireFormat) -> None:
        def new(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.empty(len(values), sum(sizes), dtype=dtype, device=values.device)

        self.values = values
        self.blocks = [run.entries.of(values) for run in runs]
        self._scales = new([math.prod(run.scales.shape) for run in runs], values.dtype)
        self._largest = [run.scales.of(self._scales) for run in runs]
        sizes = [math.prod(run.repeated.shape) for run in runs]
        self._repeated = new(sizes, values.dtype)
        parts = zip(self._repeated.split(sizes, 1), runs, strict=True)
        self._rows = [part.unflatten(1, run.repeated.shape) for part, run in parts]
        self.long = [rows.flatten(3).unsqueeze(3) for rows in self._rows]
        numbers = torch.arange(self._scales.shape[1], device=values.device)
        # Which scale each of the repeated ones is.
        self._index = torch.cat([run.repeated.of(numbers).reshape(-1) for run in runs])
        self.codes = values.shape[1]
        if width.bits == 4:
            self._low, self._high = [run.low.of(values) for run in runs], [run.high.of(values) for run in runs]
            codes = [math.prod(run.low_codes.shape) for run in runs]
            # A byte whose second code does not exist has a 0 there.
            low, high = self._low_codes, self._high_codes = new(codes, torch.int8), new(codes, torch.int8).zero_()
            self.codes = sum(codes)
            self._low_parts = [run.low_codes.of(low) for run in runs]
            self._high_parts = [run.high_codes.of(high) for run in runs]

    def largest(self) -> Tensor:
        """Return the largest of ``values`` in each block's columns, [messages, scales]."""
        for block, long, rows, largest in zip(self.blocks, self.long, self._rows, self._largest, strict=True):
            torch.amax(block, dim=3, keepdim=True, out=long)
            torch.amax(rows, dim=3, out=largest)
        return self._scales

    def repeat(self, scales: Tensor) -> None:
        """Write scales to ``long``."""
        torch.index_select(self._scales.copy_(scales), 1, self._index, out=self._repeated)

    def pack(self, *, out: Tensor) -> None:
        """Write ``values``, which are 4-bit codes, two in a byte, to ``out``."""
        torch._foreach_copy_(self._low_parts, self._low)
        torch._foreach_copy_(self._high_parts, self._high)
        torch.add(self._low_codes.bitwise_and_(15), self._high_codes, alpha=16, out=out)

    def unpack(self, codes: Tensor) -> None:
        """Write codes that ``pack`` has packed to ``values``."""
        # Shifts of signed integers restore the signs.
        torch.bitwise_right_shift(codes, 4, out=self._high_codes)
        torch.bitwise_left_shift(codes, 4, out=self._low_codes).bitwise_right_shift_(4)
        torch._foreach_copy_(self._low, self._low_parts)
        torch._foreach_copy_(self._high, self._high_parts)


def runs_of(chunk: Chunk, width: WireFormat) -> list[Run]:
    """Divide the pieces of a chunk into as few runs as possible."""

    def sizes(height: int, rank: int) -> list[int]:
        """Return the numbers of entries, scales and codes of a block."""
        codes = width.code_bytes(height, rank) if width.bits == 4 else height * rank
        return [height * rank, rank, codes] if height else [0, 0, 0]

    def behind(start: list[int], count: int, each: list[int]) -> list[int]:
        return [x + count * size for x, size in zip(start, each, strict=True)]

    # (count, blocks, height, rank, first entry, scale and code, distances between matrices in each of them)
    found: list[tuple[int, int, int, int, list[int], list[int]]] = []
    start = [0, 0, 0]
    for piece in chunk.pieces:
        whole, rest = divmod(piece.rows, BLOCK)
        full = sizes(BLOCK, piece.rank)
        matrix = behind(sizes(rest, piece.rank), whole, full)
        for first, blocks, height in ((0, whole, BLOCK), (whole, 1, rest)):
            if not (blocks and height):
                continue
            places, count = behind(start, first, full), piece.count
            if not (whole and rest):
                # The blocks of all matrices are adjacent.
                count, blocks = 1, count * blocks
            if found and count == found[-1][0] == 1 and found[-1][2:4] == (height, piece.rank):
                _, before, _, _, begin, _ = found[-1]
                if places == behind(begin, before, sizes(height, piece.rank)):
                    found[-1] = (1, before + blocks, height, piece.rank, begin, matrix)
                    continue
            found.append((count, blocks, height, piece.rank, places, matrix))
        start = behind(start, piece.count, matrix)
    runs = []
    for count, blocks, height, rank, places, matrix in found:
        joined = 1
        while joined * rank < ROW and height % (2 * joined) == 0:
            joined *= 2
        (entry, scale, code), (next_entry, next_scale, next_code) = places, matrix
        size, _, codes = sizes(height, rank)
        half = -(-height // 2) * rank
        run = Run(
            Place(entry, (count, blocks, height // joined, joined * rank), (next_entry, size, joined * rank, 1)),
            Place(entry, (count, blocks, half), (next_entry, size, 1)),
            Place(entry + half, (count, blocks, size - half), (next_entry, size, 1)),
            Place(scale, (count, blocks, rank), (next_scale, rank, 1)),
            Place(scale, (count, blocks, joined, rank), (next_scale, rank, 0, 1)),
            Place(code, (count, blocks, half), (next_code, codes, 1)),
            Place(code, (count, blocks, size - half), (next_code, codes, 1)),
        )
        runs.append(run)
    return runs
