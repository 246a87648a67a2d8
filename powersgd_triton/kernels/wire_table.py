"""The table from which the programs of the wire's kernels learn which part of a message is theirs. Integers only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from powersgd_triton.kernels.table import COPY_BLOCK, integers
from powersgd_triton.layout.wire_format import BLOCK, SCALE_BYTES, Chunk, Piece, WireFormat, WirePlan

ITEMSIZE = 4
"""Of messages, which are fp32."""

VECTOR = 4
"""Elements of the widest access to a message, of 16 bytes."""


class WireTable:
    """What each program encodes, adds up or decodes: a tile of a block of at most 128 rows, or a slice of exact ones.

    Args:
        plan: the message's bytes.
        panel: columns of a tile where a factor has that many.
        device: where the table lives.

    Attributes:
        plan, device: as given.
        rows: int64 [programs, 7], chunk by chunk: chunk, element in the message, rows, columns, rank, and in the
            chunk, in bytes, scales and codes. Of exact elements: their number as rows, 0 columns, their place as codes.
        starts: the first program of each chunk, and the number of all.
        columns: of a tile, a power of two.
        vector: elements, at most ``VECTOR``, at multiples of which tiles and their rows start in the message.
        code_vector: the same in the chunks, where a byte with two 4-bit codes counts once; divides ``vector``.
    """

    def __init__(self, plan: WirePlan, panel: int, device: torch.device) -> None:
        self.plan, self.device = plan, device
        pieces = [piece for chunk in plan.chunks for piece in chunk.pieces]
        rank = max((piece.rank for piece in pieces), default=1)
        self.columns = min(panel, 1 << (rank - 1).bit_length())
        chunks = [list(_rows(number, chunk, plan.width, self.columns)) for number, chunk in enumerate(plan.chunks)]
        self.starts = [0, *itertools.accumulate(len(rows) for rows in chunks)]
        every = list(itertools.chain(*chunks))
        self.rows = integers(every, 7, torch.int64, device)
        factors = [row for row in every if row[3]]
        code_bytes = max(1, plan.width.bits // 8)
        self.vector = math.gcd(*(row[4] for row in factors), *(row[1] for row in factors), VECTOR)
        self.code_vector = math.gcd(self.vector, *(row[6] // code_bytes for row in factors))


def _rows(number: int, chunk: Chunk, width: WireFormat, columns: int) -> Iterator[list[int]]:
    """A chunk's rows of the table: tiles of its factors, then its exact elements, which begin its bytes."""
    for piece in chunk.pieces:
        yield from ([number, *row] for row in _tiles(piece, width, columns))
    for start in range(0, chunk.bypass_numel, COPY_BLOCK):
        numel = min(COPY_BLOCK, chunk.bypass_numel - start)
        yield [number, chunk.bypass + start, numel, 0, 0, 0, start * ITEMSIZE]


def _tiles(piece: Piece, width: WireFormat, columns: int) -> Iterator[list[int]]:
    """(element, rows, columns, rank, scale, code) of a piece's tiles, in the order of its elements."""
    rank, element, scale, code = piece.rank, piece.element, piece.scale, piece.code
    code_bytes = max(1, width.bits // 8)
    for _ in range(piece.count):
        for row in range(0, piece.rows, BLOCK):
            height = min(BLOCK, piece.rows - row)
            for column in range(0, rank, columns):
                panel = min(columns, rank - column)
                places = scale + column * SCALE_BYTES, code + column * code_bytes
                yield [element + column, height, panel, rank, *places]
            element += height * rank
            scale += SCALE_BYTES * rank
            code += width.code_bytes(height, rank)
