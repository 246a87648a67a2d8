"""Columns of the tables that tell each program of a kernel which work is its own. All of them hold integers.

The host builds the tables from these tuples (``table.py``, ``wire_table.py``). Kernels read them through the functions
of ``table_device.py`` and ``wire_device.py``. All offsets count elements, unless a column says bytes.
"""

from __future__ import annotations

from collections import namedtuple

MatrixRow = namedtuple("MatrixRow", "n m r P Q P_parts Q_parts")
"""One n × m matrix of rank r, in ``BucketTable.records``.

``P`` and ``Q`` say where its factors [n, r] and [m, r] start among those of all matrices, ``P_parts`` and ``Q_parts``
where the first part of each starts in the workspace. Part k follows after k · n · r or k · m · r.
"""

TileRow = namedtuple("TileRow", "matrix first start end split")
"""One program's share of a product, in ``BucketTable.row_tiles`` and ``BucketTable.column_tiles``.

A program of ``row_tiles`` computes rows of P from ``first`` on and sums over columns ``start`` to ``end``. A program of
``column_tiles`` computes rows of Q, that is columns of M, and sums over rows ``start`` to ``end``. Both write the sum's
part number ``split``.
"""

PackRow = namedtuple("PackRow", "source distance splits target numel tensor")
"""One block of a message, in ``BucketTable.pack_P``, ``pack_Q`` and ``pack_left``.

It is the sum of ``splits`` parts, which are ``distance`` apart and of which the first is at ``source``. With 0 splits,
it is a piece of a bypass tensor from ``source`` on: number ``tensor`` of the pointers, in which matrices come first.
"""

RollbackRow = namedtuple("RollbackRow", "matrix start end")
"""One block of an error buffer that loses its gradient again after a step that was not finite."""

FactorRow = namedtuple("FactorRow", "rows r offset key first_chunk chunks")
"""One matrix's factor on one side, in ``FactorTable.records``. ``key`` is the seed of its random directions."""

ChunkRow = namedtuple("ChunkRow", "matrix start end")
"""Rows of a factor that one program works on, in ``FactorTable.chunks``."""

ProgressRow = namedtuple("ProgressRow", "passes finished zeroed arrived")
"""How far the orthogonalization of one factor is, in ``FactorTable.progress``. Kernels write it.

``finished`` is 1 if the ``passes`` done are enough. ``zeroed`` counts columns that were set to 0, because no pass had
made them orthonormal. ``arrived`` is the first of ``ARRIVALS`` counters of programs that have written their parts of a
sum. They are 0 between launches.
"""

WireRow = namedtuple("WireRow", "chunk element rows columns rank scales codes")
"""One tile of a factor, or one slice of exact elements, in ``WireTable.rows``.

``chunk`` is the worker that owns it, ``element`` its offset in the message, and ``rank`` the distance from row to row.
If ``columns`` is 0, it has ``rows`` exact elements. ``scales`` and ``codes`` (or the exact elements) are offsets in the
chunk, in bytes.
"""
