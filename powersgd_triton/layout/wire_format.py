"""The formats of factors and of differences in messages, and which worker sums which part. Integers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

BLOCK = 128
"""Number of consecutive entries of a factor's column that share a scale."""

SCALE_BYTES = 2
ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """A width of factors, or of differences, in messages.

    Attributes:
        name: Name of a torch dtype, int4 or int2.
        bits: Bits of an entry.
        scaled: Whether each 128 entries of a column share a bf16 scale.
            The scale is not fp16, in which scales of columns below 1e-6 would have few bits or be zero.
        levels: Largest magnitude of a block in units of its scale.
    """

    name: str
    bits: int
    scaled: bool
    levels: int = 1

    def code_bytes(self, rows: int, rank: int) -> int:
        """Return the bytes of the codes of at most 128 rows. Two 4-bit codes of a column share a byte."""
        return -(-rows // 2) * rank if self.bits == 4 else rows * rank * self.bits // 8

    def factor_bytes(self, rows: int, rank: int) -> int:
        """Return the bytes of a factor [rows, rank] with its scales."""
        whole, rest = divmod(rows, BLOCK)
        codes = whole * self.code_bytes(BLOCK, rank) + self.code_bytes(rest, rank)
        return codes + (SCALE_BYTES * rank * -(-rows // BLOCK) if self.scaled else 0)

    def difference_bytes(self, numel: int) -> tuple[int, int]:
        """Return (offset of the codes, bytes) of a flat tensor's differences: [scales | codes], in whole blocks."""
        blocks = -(-numel // BLOCK)
        codes = -(-SCALE_BYTES * blocks // ALIGNMENT) * ALIGNMENT
        return codes, codes + -(-blocks * BLOCK * self.bits // 8 // ALIGNMENT) * ALIGNMENT


FORMATS = {
    "float32": WireFormat("float32", 32, False),
    "bfloat16": WireFormat("bfloat16", 16, False),
    # 2 levels: with 1, the scale of the largest fp32 value would round to infinity in bf16.
    "float16": WireFormat("float16", 16, True, 2),
    "int8": WireFormat("int8", 8, True, 127),
    "int4": WireFormat("int4", 4, True, 7),
}
"""Formats of factors."""

DIFFERENCES = {
    "int8": FORMATS["int8"],
    "int4": FORMATS["int4"],
    # Codes −3, −1, 1 and 3, which with 4 levels are the middles of four equal parts of [−largest, largest]. There is no
    # code 0: −1, 0 and 1 follow a parameter worse.
    "int2": WireFormat("int2", 2, True, 4),
}
"""Formats of differences. Factors need more than 2 bits."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Adjacent rows of matrices of equal shape, in the message and in a worker's chunk.

    A piece holds either whole matrices, or rows of one matrix that begin at a multiple of 128.

    Attributes:
        count: Number of matrices.
        rows: Rows of each matrix in this piece.
        rank: Columns of the factor.
        element: Offset of the piece [count, rows, rank] in the message, in elements.
        scale: Offset of its bf16 scales [count, ⌈rows / 128⌉, rank] in the chunk, in bytes.
        code: Offset of its codes in the chunk, in bytes.
    """

    count: int
    rows: int
    rank: int
    element: int
    scale: int
    code: int

    @property
    def numel(self) -> int:
        return self.count * self.rows * self.rank


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The part of a message that one worker sums: elements [bypass, bypass + bypass_numel) and pieces of factors.

    Its bytes are [exact elements | scales | codes].
    """

    bypass: int
    bypass_numel: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class WirePlan:
    """The bytes of a message: one chunk per worker, each of ``size`` bytes."""

    width: WireFormat
    chunks: tuple[Chunk, ...]
    size: int

    @classmethod
    def build(
        cls, width: WireFormat, factors: Sequence[tuple[int, int, int]], bypass_numel: int, itemsize: int, workers: int
    ) -> WirePlan:  # fmt: skip
        """Divide a message [factors | exact elements] among the workers, in chunks of about equal size.

        Args:
            width: Format of the factors.
            factors: (count, rows, rank) of adjacent matrices.
            bypass_numel: Number of exact elements after the factors.
            itemsize: Bytes of an exact element.
            workers: Number of workers.
        """
        shares = _shares(factors, workers)
        start, each = sum(count * rows * rank for count, rows, rank in factors), -(-bypass_numel // workers)
        chunks: list[Chunk] = []
        size = 0
        for worker in range(workers):
            first = min(worker * each, bypass_numel)
            numel = min(each, bypass_numel - first)
            scale = numel * itemsize
            scales = [piece.count * -(-piece.rows // BLOCK) * piece.rank for piece in shares[worker]]
            code = scale + (SCALE_BYTES * sum(scales) if width.scaled else 0)
            pieces: list[Piece] = []
            for piece, own_scales in zip(shares[worker], scales, strict=True):
                pieces.append(dataclasses.replace(piece, scale=scale, code=code))
                scale += SCALE_BYTES * own_scales
                whole, rest = divmod(piece.rows, BLOCK)
                codes = whole * width.code_bytes(BLOCK, piece.rank) + width.code_bytes(rest, piece.rank)
                code += piece.count * codes
            chunks.append(Chunk(start + first, numel, tuple(pieces)))
            size = max(size, code)
        return cls(width, tuple(chunks), -(-size // ALIGNMENT) * ALIGNMENT)


def _shares(factors: Sequence[tuple[int, int, int]], workers: int) -> list[list[Piece]]:
    """Return each worker's pieces: consecutive blocks of rows, divided so that shares have about equal elements."""
    total = sum(count * rows * rank for count, rows, rank in factors)
    shares: list[list[Piece]] = [[] for _ in range(workers)]
    element = 0
    for count, rows, rank in factors:
        # The worker whose last piece consists of whole matrices of this shape, so that the piece can grow.
        open_piece: int | None = None
        for _ in range(count):
            for worker, height in _cuts(rows, rank, element, total, workers):
                mine = shares[worker]
                if height == rows and open_piece == worker:
                    mine[-1] = dataclasses.replace(mine[-1], count=mine[-1].count + 1)
                else:
                    mine.append(Piece(1, height, rank, element, 0, 0))
                open_piece = worker if height == rows else None
                element += height * rank
    return shares


def _cuts(rows: int, rank: int, element: int, total: int, workers: int) -> list[tuple[int, int]]:
    """Return (worker, rows) pairs, in row order, for a matrix that begins at ``element``."""
    cuts: list[tuple[int, int]] = []
    for row in range(0, rows, BLOCK):
        height = min(BLOCK, rows - row)
        # The worker whose share contains the middle of the block.
        middle = 2 * (element + row * rank) + height * rank
        worker = middle * workers // (2 * total)
        if cuts and cuts[-1][0] == worker:
            cuts[-1] = (worker, cuts[-1][1] + height)
        else:
            cuts.append((worker, height))
    return cuts
