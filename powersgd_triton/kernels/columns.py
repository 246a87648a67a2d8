"""Columns of the tables that tell each program of a kernel which work is its own.

The host builds the tables row by row from these tuples (``table.py``, ``wire_table.py``). Kernels read them through the
functions of ``table_device.py`` and ``wire_device.py``, which take the columns' numbers from here. All offsets count
elements, unless a column says bytes.
"""

from __future__ import annotations

from typing import NamedTuple


class MatrixRow(NamedTuple):
    """One n × m matrix of rank r, in ``BucketTable.records``."""

    n: int
    m: int
    r: int
    P: int
    """Where its P [n, r] starts among the factors of all matrices."""
    Q: int
    """Where its Q [m, r] starts."""
    P_parts: int
    """Where the first part of P starts in the workspace; part k follows after k · n · r elements."""
    Q_parts: int
    """Where the first part of Q starts in the workspace; part k follows after k · m · r elements."""


class TileRow(NamedTuple):
    """One program's share of a product, in ``BucketTable.row_tiles`` and ``BucketTable.column_tiles``.

    A program of ``row_tiles`` computes a block of rows of P and sums over columns ``start`` to ``end``. A program of
    ``column_tiles`` computes a block of rows of Q, that is of columns of M, and sums over rows ``start`` to ``end``.
    """

    matrix: int
    first: int
    """First row or column of the block."""
    start: int
    end: int
    split: int
    """Number of the part of the sum, which is where the program writes it."""


class PackRow(NamedTuple):
    """One block of a message, in ``BucketTable.pack_P``, ``pack_Q`` and ``pack_left``."""

    source: int
    """Offset in the first part, or in the bypass tensor."""
    distance: int
    """From one part to the next."""
    splits: int
    """Number of parts; 0 for a bypass tensor, which has none."""
    target: int
    """Offset in the message."""
    numel: int
    tensor: int
    """Number of the bypass tensor among the gradient's pointers; matrices come first."""


class RollbackRow(NamedTuple):
    """One block of an error buffer that takes its gradient back after a step that was not finite."""

    matrix: int
    start: int
    end: int


class FactorRow(NamedTuple):
    """One matrix's factor on one side, in ``FactorTable.records``."""

    rows: int
    r: int
    offset: int
    key: int
    """Seeds the random directions that replace dead columns."""
    first_chunk: int
    chunks: int


class ChunkRow(NamedTuple):
    """Rows of a factor that one program works on, in ``FactorTable.chunks``."""

    matrix: int
    start: int
    end: int


class ProgressRow(NamedTuple):
    """How far the orthogonalization of one factor is, in ``FactorTable.progress``. Kernels write it."""

    passes: int
    """Passes that are done."""
    finished: int
    """1 if these passes are enough."""
    zeroed: int
    """Columns that were set to 0 so far, because no pass had made them orthonormal."""
    arrived: int
    """First of ``ARRIVALS`` counters of programs that have written their parts of a sum; 0 between launches."""


class WireRow(NamedTuple):
    """One tile of a factor, or one slice of exact elements, in ``WireTable.rows``."""

    chunk: int
    """Number of the worker that owns it, whose bytes are together."""
    element: int
    """Offset in the message."""
    rows: int
    """Of the tile; of exact elements their number."""
    columns: int
    """Of the tile; 0 marks exact elements."""
    rank: int
    """Of the matrix: the distance from row to row."""
    scales: int
    """Offset in the chunk, in bytes."""
    codes: int
    """Offset in the chunk, in bytes; of exact elements the offset of these."""
