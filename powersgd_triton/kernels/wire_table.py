"""The table that tells each program of the wire's kernels which part of a message is its own. Integers only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from powersgd_triton.kernels.columns import WireRow
from powersgd_triton.kernels.table import COPY_BLOCK, integers
from powersgd_triton.layout.wire_format import BLOCK, SCALE_BYTES, Chunk, Piece, WireFormat, WirePlan

ITEMSIZE = 4
"""Of messages, which are fp32."""


class WireTable:
    """What each program encodes, adds up or decodes: a tile of a block of at most 128 rows, or a slice of exact ones.

    Args:
        plan: the message's bytes.
        columns: of a tile, a power of two.
        device: where the table lives.

    Attributes:
        plan, device: as given.
        rows: int64 [programs, columns of ``WireRow``], chunk by chunk, so that the programs of one owner are together.
        starts: the first program of each chunk, and the number of all.
        constants: of the kernels.
    """

    def __init__(self, plan: WirePlan, columns: int, device: torch.device) -> None:
        self.plan, self.device, width = plan, device, plan.width
        chunks = [list(_rows(number, chunk, width, columns)) for number, chunk in enumerate(plan.chunks)]
        self.starts = [0, *itertools.accumulate(len(rows) for rows in chunks)]
        self.rows = integers(list(itertools.chain(*chunks)), len(WireRow._fields), torch.int64, device)
        levels = width.levels if width.scaled else 0
        self.constants = {"BITS": width.bits, "LEVELS": levels, "C": columns, "HALF": BLOCK // 2, "COPY": COPY_BLOCK}


def _rows(number: int, chunk: Chunk, width: WireFormat, columns: int) -> Iterator[WireRow]:
    """A chunk's rows of the table: tiles of its factors, then its exact elements, whose bytes are the chunk's first."""
    for piece in chunk.pieces:
        yield from _tiles(number, piece, width, columns)
    for start in range(0, chunk.bypass_numel, COPY_BLOCK):
        numel = min(COPY_BLOCK, chunk.bypass_numel - start)
        yield WireRow(
            chunk=number,
            element=chunk.bypass + start,
            rows=numel,
            columns=0,
            rank=0,
            scales=0,
            codes=start * ITEMSIZE,
        )


def _tiles(number: int, piece: Piece, width: WireFormat, columns: int) -> Iterator[WireRow]:
    """A piece's tiles, in the order of its elements."""
    rank, element, scale, code = piece.rank, piece.element, piece.scale, piece.code
    for _ in range(piece.count):
        for row in range(0, piece.rows, BLOCK):
            height = min(BLOCK, piece.rows - row)
            for column in range(0, rank, columns):
                yield WireRow(
                    chunk=number,
                    element=element + column,
                    rows=height,
                    columns=min(columns, rank - column),
                    rank=rank,
                    scales=scale + column * SCALE_BYTES,
                    codes=code + column * _code_bytes(width),
                )
            element += height * rank
            scale += SCALE_BYTES * rank
            code += width.code_bytes(height, rank)


def _code_bytes(width: WireFormat) -> int:
    return max(1, width.bits // 8)
