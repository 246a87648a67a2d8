"""How factors are written into messages, and which worker adds up which part of them. Integers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

BLOCK = 128
"""So many entries of a factor's column share a scale."""

SCALE_BYTES = 2
ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """A width of factors on the wire.

    Attributes:
        name: a torch dtype's name, or int4.
        bits: of an entry.
        scaled: whether each 128 entries of a column have a bf16 scale, the largest magnitude among them over
            ``levels``. (In fp16, columns below 1e-6 would have scales of few bits or none.)
        levels: the largest code's value.
    """

    name: str
    bits: int
    scaled: bool
    levels: int = 1

    def code_bytes(self, rows: int, rank: int) -> int:
        """Bytes of the codes of at most 128 rows; two 4-bit codes of a column make a byte."""
        return -(-rows // 2) * rank if self.bits == 4 else rows * rank * self.bits // 8

    def factor_bytes(self, rows: int, rank: int) -> int:
        """Bytes of a factor [rows, rank] with its scales."""
        whole, rest = divmod(rows, BLOCK)
        codes = whole * self.code_bytes(BLOCK, rank) + self.code_bytes(rest, rank)
        return codes + (SCALE_BYTES * rank * -(-rows // BLOCK) if self.scaled else 0)


FORMATS = {
    "float32": WireFormat("float32", 32, False),
    "bfloat16": WireFormat("bfloat16", 16, False),
    # 2, since the largest fp32 value itself would round to infinity in bf16.
    "float16": WireFormat("float16", 16, True, 2),
    "int8": WireFormat("int8", 8, True, 127),
    "int4": WireFormat("int4", 4, True, 7),
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of ``count`` matrices of one shape, one behind the other in a factor message, and in a worker's chunk.

    Either whole matrices, or one matrix's rows from a multiple of 128 on.

    Attributes:
        count, rows, rank: the piece is [count, rows, rank] at ``element``.
        element: offset in the message.
        scale: offset of its bf16 scales [count, ⌈rows / 128⌉, rank] in the chunk, in bytes.
        code: offset of its codes in the chunk, in bytes.
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
    """What one worker adds up: elements [bypass, bypass + bypass_numel) exactly, and pieces of the factors.

    Its bytes are [exact elements | scales | codes].
    """

    bypass: int
    bypass_numel: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class WirePlan:
    """A message's bytes: one chunk for each worker, all of ``size`` bytes."""

    width: WireFormat
    chunks: tuple[Chunk, ...]
    size: int

    @classmethod
    def build(
        cls, width: WireFormat, factors: Sequence[tuple[int, int, int]], bypass_numel: int, itemsize: int, workers: int
    ) -> WirePlan:  # fmt: skip
        """Deal a message [factors | exact elements] out to the workers, in parts of about equal size.

        Args:
            width: of the factors.
            factors: (count, rows, rank) of matrices one behind the other.
            bypass_numel: number of exact elements behind them.
            itemsize: their bytes.
            workers: number of workers.
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
    """Each worker's pieces: blocks of rows in their order, cut where a worker has its share of the elements."""
    total = sum(count * rows * rank for count, rows, rank in factors)
    shares: list[list[Piece]] = [[] for _ in range(workers)]
    element = 0
    for count, rows, rank in factors:
        # Whose last piece consists of whole matrices of this shape.
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
    """(worker, rows) for a matrix that begins at ``element``, in the order of its rows."""
    cuts: list[tuple[int, int]] = []
    for row in range(0, rows, BLOCK):
        height = min(BLOCK, rows - row)
        # Whoever's share the block's middle lies in.
        middle = 2 * (element + row * rank) + height * rank
        worker = middle * workers // (2 * total)
        if cuts and cuts[-1][0] == worker:
            cuts[-1] = (worker, cuts[-1][1] + height)
        else:
            cuts.append((worker, height))
    return cuts
