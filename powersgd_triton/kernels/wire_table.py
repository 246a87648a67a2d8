"""The table that tells each program of the wire's kernels which part of a message is its own. Integers only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from powersgd_triton.kernels.columns import WireRow
from powersgd_triton.kernels.table import COPY_BLOCK, on_host
from powersgd_triton.layout.wire_format import BLOCK, SCALE_BYTES, Chunk, WireFormat, WirePlan

ITEMSIZE = 4
"""Bytes of an element of messages, which are fp32."""


class WireTable:
    """What each program works on: a tile of a block of at most 128 rows, or a slice of exact elements.

    A tile has a power of two of ``columns``.

    Attributes:
        rows: int64 [programs, columns of ``WireRow``], chunk by chunk, so that the programs of one owner are together.
        starts: The first program of each chunk, and the number of all.
        constants: Constants of the kernels.
    """

    def __init__(self, plan: WirePlan, columns: int, device: torch.device) -> None:
        width = plan.width
        chunks = [list(_rows(number, chunk, width, columns)) for number, chunk in enumerate(plan.chunks)]
        self.starts = [0, *itertools.accumulate(len(rows) for rows in chunks)]
        rows = on_host(list(itertools.chain(*chunks)), len(WireRow._fields), torch.int64, device)
        self.rows = rows.to(device, non_blocking=True)
        levels = width.levels if width.scaled else 0
        self.constants = {"BITS": width.bits, "LEVELS": levels, "C": columns, "HALF": BLOCK // 2, "COPY": COPY_BLOCK}


def _rows(number: int, chunk: Chunk, width: WireFormat, columns: int) -> Iterator[WireRow]:
    """Yield a chunk's tiles in the order of its elements, then its exact elements, whose bytes come first."""
    code_bytes = max(1, width.bits // 8)
    for piece in chunk.pieces:
        rank, element, scale, code = piece.rank, piece.element, piece.scale, piece.code
        for _, row in itertools.product(range(piece.count), range(0, piece.rows, BLOCK)):
            height = min(BLOCK, piece.rows - row)
            for first in range(0, rank, columns):
                place = scale + first * SCALE_BYTES, code + first * code_bytes
                yield WireRow(number, element + first, height, min(columns, rank - first), rank, *place)
            element += height * rank
            scale += SCALE_BYTES * rank
            code += width.code_bytes(height, rank)
    for start in range(0, chunk.bypass_numel, COPY_BLOCK):
        numel = min(COPY_BLOCK, chunk.bypass_numel - start)
        yield WireRow(number, chunk.bypass + start, numel, columns=0, rank=0, scales=0, codes=start * ITEMSIZE)
