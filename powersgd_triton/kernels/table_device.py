"""Device functions that read a program's row of a table: how a program finds its matrix, and its rows or columns.

A value that a kernel does not use costs nothing, since the compiler drops its load.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from powersgd_triton.kernels import columns
from powersgd_triton.kernels.table import PROGRESS_COLUMNS


def indices(row: Any) -> list[tl.constexpr]:
    """Return the number of columns of a table of such rows, and the number of each of them in their order.

    Kernels may only use globals that are constexpr.
    """
    fields = len(row._fields)
    return [tl.constexpr(fields), *map(tl.constexpr, range(fields))]


MATRIX, MATRIX_N, MATRIX_M, MATRIX_R, MATRIX_P, MATRIX_Q, MATRIX_P_PARTS, MATRIX_Q_PARTS = indices(columns.MatrixRow)
TILE, TILE_MATRIX, TILE_FIRST, TILE_START, TILE_END, TILE_SPLIT = indices(columns.TileRow)
PACK, PACK_SOURCE, PACK_DISTANCE, PACK_SPLITS, PACK_TARGET, PACK_NUMEL, PACK_TENSOR = indices(columns.PackRow)
ROLLBACK, ROLLBACK_MATRIX, ROLLBACK_START, ROLLBACK_END = indices(columns.RollbackRow)
FACTOR, FACTOR_ROWS, FACTOR_R, FACTOR_OFFSET, FACTOR_KEY, FACTOR_FIRST_CHUNK, FACTOR_CHUNKS = indices(columns.FactorRow)
CHUNK, CHUNK_MATRIX, CHUNK_START, CHUNK_END = indices(columns.ChunkRow)
_, PROGRESS_PASSES, PROGRESS_FINISHED, PROGRESS_ZEROED, PROGRESS_ARRIVED = indices(columns.ProgressRow)
PROGRESS = tl.constexpr(PROGRESS_COLUMNS)


@triton.jit
def row_tile(tiles, program, BLOCK_COLS: tl.constexpr):
    """(matrix, first row, first column, end column, split) of a program that walks along rows."""
    tile = tiles + program * TILE
    # A part of the columns starts with a block: loads of a row's block stay aligned.
    start = tl.load(tile + TILE_START) // BLOCK_COLS * BLOCK_COLS
    return (
        tl.load(tile + TILE_MATRIX),
        tl.load(tile + TILE_FIRST),
        start,
        tl.load(tile + TILE_END),
        tl.load(tile + TILE_SPLIT),
    )


@triton.jit
def column_tile(tiles, program, BLOCK_COLS: tl.constexpr):
    """(matrix, first column, first row, end row, split) of a program that walks along columns."""
    tile = tiles + program * TILE
    # As above; here the block is in each row at the same columns.
    first = tl.load(tile + TILE_FIRST) // BLOCK_COLS * BLOCK_COLS
    return (
        tl.load(tile + TILE_MATRIX),
        first,
        tl.load(tile + TILE_START),
        tl.load(tile + TILE_END),
        tl.load(tile + TILE_SPLIT),
    )


@triton.jit
def matrix_sizes(records, matrix):
    """(n, m, r), int32."""
    record = records + matrix * MATRIX
    return (
        tl.load(record + MATRIX_N).to(tl.int32),
        tl.load(record + MATRIX_M).to(tl.int32),
        tl.load(record + MATRIX_R).to(tl.int32),
    )


@triton.jit
def factor_offsets(records, matrix):
    """(where the matrix's P starts, where its Q starts) among all factors, int64."""
    record = records + matrix * MATRIX
    return tl.load(record + MATRIX_P), tl.load(record + MATRIX_Q)


@triton.jit
def part_of_P(records, matrix, split, row, r):
    """Where a row of a split's part of P [n, r] starts in the workspace, int64."""
    record = records + matrix * MATRIX
    return tl.load(record + MATRIX_P_PARTS) + (split * tl.load(record + MATRIX_N) + row) * r


@triton.jit
def part_of_Q(records, matrix, split, row, r):
    """Where a row of a split's part of Q [m, r] starts in the workspace, int64."""
    record = records + matrix * MATRIX
    return tl.load(record + MATRIX_Q_PARTS) + (split * tl.load(record + MATRIX_M) + row) * r


@triton.jit
def pack_entry(entries, program):
    """(source, distance of the parts, their number, target, elements, tensor) of a block of a message."""
    entry = entries + program * PACK
    return (
        tl.load(entry + PACK_SOURCE),
        tl.load(entry + PACK_DISTANCE),
        tl.load(entry + PACK_SPLITS),
        tl.load(entry + PACK_TARGET),
        tl.load(entry + PACK_NUMEL),
        tl.load(entry + PACK_TENSOR),
    )


@triton.jit
def rollback_block(blocks, program):
    """(matrix, first element, end element) of a block of an error buffer."""
    block = blocks + program * ROLLBACK
    return tl.load(block + ROLLBACK_MATRIX), tl.load(block + ROLLBACK_START), tl.load(block + ROLLBACK_END)


@triton.jit
def factor_chunk(records, chunks, chunk):
    """(matrix, first row, end row, r, where the factor starts) of a program that works on rows of a factor."""
    row = chunks + chunk * CHUNK
    matrix = tl.load(row + CHUNK_MATRIX)
    record = records + matrix * FACTOR
    return (
        matrix,
        tl.load(row + CHUNK_START),
        tl.load(row + CHUNK_END),
        tl.load(record + FACTOR_R).to(tl.int32),
        tl.load(record + FACTOR_OFFSET),
    )


@triton.jit
def chunks_of(records, matrix):
    """(first chunk of a matrix's factor, number of its chunks): where parts of its inner products lie."""
    record = records + matrix * FACTOR
    return tl.load(record + FACTOR_FIRST_CHUNK), tl.load(record + FACTOR_CHUNKS)


@triton.jit
def rows_of(records, matrix):
    """Number of rows of a matrix's factor."""
    return tl.load(records + matrix * FACTOR + FACTOR_ROWS).to(tl.int32)


@triton.jit
def key_of(records, matrix):
    """The matrix's seed of random directions, uint32."""
    return tl.load(records + matrix * FACTOR + FACTOR_KEY).to(tl.uint32)
