"""Tables that tell each program of a kernel which work is its own: their columns, and device functions that read them.

They hold integers. Offsets count elements, unless a column says bytes. The compiler drops loads of unused values.
"""

from collections import namedtuple
from typing import Any

import triton
import triton.language as tl

from powersgd_triton.kernels.availability import MAX_RANK
from powersgd_triton.layout.wire_format import ALIGNMENT

WIDEST = tl.constexpr(ALIGNMENT)
"""Bytes of the widest memory access."""

ARRIVALS = MAX_RANK // 32
"""Sums of one factor that are made at once: one for each panel of its columns."""

MatrixRow = namedtuple("MatrixRow", "n m r P Q P_parts Q_parts")
"""One n × m matrix of rank r, in ``BucketTable.records``: where its P and Q start among those of all matrices, and the
first part of each in the workspace. Part k follows after k · n · r or k · m · r."""

TileRow = namedtuple("TileRow", "matrix first start end split")
"""One program's share of a product: part number ``split`` of its sums.

In ``BucketTable.row_tiles``, it computes rows of P from ``first`` on and sums over columns ``start`` to ``end``; in
``BucketTable.column_tiles``, rows of Q, that is columns of M, and sums over rows.
"""

PackRow = namedtuple("PackRow", "source distance splits target numel tensor")
"""One block of a message, in ``BucketTable.pack_P``, ``pack_Q`` and ``pack_left``: the sum of ``splits`` parts from
``source`` on, ``distance`` apart. With 0 splits, a piece of bypass tensor: number ``tensor`` of the pointers."""

RollbackRow = namedtuple("RollbackRow", "matrix start end")
"""One block of an error buffer that loses its gradient again after a step that was not finite."""

FactorRow = namedtuple("FactorRow", "rows r offset key first_chunk chunks")
"""One matrix's factor on one side, in ``FactorTable.records``. ``key`` is the seed of its random directions."""

ChunkRow = namedtuple("ChunkRow", "matrix start end")
"""Rows of a factor that one program works on, in ``FactorTable.chunks``."""

ProgressRow = namedtuple("ProgressRow", "passes finished zeroed arrived")
"""How far the orthogonalization of one factor is, in ``FactorTable.progress``. Kernels write it.

``finished`` is 1 if the ``passes`` done are enough. ``zeroed`` counts columns set to 0, since no pass made them
orthonormal. ``arrived`` is the first of ``ARRIVALS`` counters of programs that have written their parts of a sum.
"""

WireRow = namedtuple("WireRow", "chunk element rows columns rank scales codes")
"""One tile of a factor, or one slice of exact elements, of a narrow message.

``chunk`` is the worker that owns it, ``element`` its offset in the message, and ``rank`` the distance from row to row.
If ``columns`` is 0, it has ``rows`` exact elements. ``scales`` and ``codes`` (or the exact elements) are offsets in the
chunk, in bytes.
"""


def indices(row: Any) -> list[tl.constexpr]:
    """Return the number of columns of a table and their indices, as constexprs: kernels use no other globals."""
    fields = len(row._fields)
    return [tl.constexpr(fields), *map(tl.constexpr, range(fields))]


MATRIX, MATRIX_N, MATRIX_M, MATRIX_R, MATRIX_P, MATRIX_Q, MATRIX_P_PARTS, MATRIX_Q_PARTS = indices(MatrixRow)
TILE, TILE_MATRIX, TILE_FIRST, TILE_START, TILE_END, TILE_SPLIT = indices(TileRow)
PACK, PACK_SOURCE, PACK_DISTANCE, PACK_SPLITS, PACK_TARGET, PACK_NUMEL, PACK_TENSOR = indices(PackRow)
ROLLBACK, ROLLBACK_MATRIX, ROLLBACK_START, ROLLBACK_END = indices(RollbackRow)
FACTOR, FACTOR_ROWS, FACTOR_R, FACTOR_OFFSET, FACTOR_KEY, FACTOR_FIRST_CHUNK, FACTOR_CHUNKS = indices(FactorRow)
CHUNK, CHUNK_MATRIX, CHUNK_START, CHUNK_END = indices(ChunkRow)
_, PROGRESS_PASSES, PROGRESS_FINISHED, PROGRESS_ZEROED, PROGRESS_ARRIVED = indices(ProgressRow)
PROGRESS = tl.constexpr(PROGRESS_ARRIVED.value + ARRIVALS)


@triton.jit
def known_multiple(x, VEC: tl.constexpr):
    """x, a multiple of VEC that was loaded, in a form from which the compiler sees that wide accesses are aligned."""
    return x // VEC * VEC


@triton.jit
def rows_are_aligned(addresses, m, VEC: tl.constexpr):
    """Whether rows of m elements are whole vectors of VEC elements at multiples of 16 bytes; addresses joined by |."""
    return (addresses % WIDEST == 0) & (m % VEC == 0)


@triton.jit
def tensor_address(base, distances, tensor):
    """Address of the first element of a matrix or a bypass tensor from ``Pointers``, int64."""
    return base + tl.load(distances + tensor)


@triton.jit
def pointer_to(address, TYPE: tl.constexpr, VEC: tl.constexpr):
    """An address as a pointer to elements of a type. It is a multiple of 16 bytes if VEC is not 1."""
    pointer = address.to(tl.pointer_type(TYPE))
    # The compiler does not see through the cast what divides the address.
    return tl.multiple_of(pointer, WIDEST) if VEC > 1 else pointer


@triton.jit
def tile_of(tiles, program, FIRST: tl.constexpr, START: tl.constexpr):
    """(matrix, first row or column, start, end, split) of a program, see ``TileRow``.

    FIRST and START divide ``first`` and ``start``. Columns start with a block: loads of a row's block stay aligned.
    """
    tile = tiles + program * TILE
    start = known_multiple(tl.load(tile + TILE_START), START)
    matrix, first = tl.load(tile + TILE_MATRIX), known_multiple(tl.load(tile + TILE_FIRST), FIRST)
    return matrix, first, start, tl.load(tile + TILE_END), tl.load(tile + TILE_SPLIT)


@triton.jit
def matrix_sizes(records, matrix):
    """(n, m, r), int32."""
    record = records + matrix * MATRIX
    n, m, r = tl.load(record + MATRIX_N), tl.load(record + MATRIX_M), tl.load(record + MATRIX_R)
    return n.to(tl.int32), m.to(tl.int32), r.to(tl.int32)


@triton.jit
def factor_offsets(records, matrix):
    """(where a matrix's P and Q start among all factors, where their first parts start in the workspace), int64."""
    record = records + matrix * MATRIX
    P_parts, Q_parts = tl.load(record + MATRIX_P_PARTS), tl.load(record + MATRIX_Q_PARTS)
    return tl.load(record + MATRIX_P), tl.load(record + MATRIX_Q), P_parts, Q_parts


@triton.jit
def pack_entry(entries, program):
    """(source, distance of the parts, their number, target, elements, tensor) of a block of a message."""
    entry = entries + program * PACK
    source, distance = tl.load(entry + PACK_SOURCE), tl.load(entry + PACK_DISTANCE)
    splits, target = tl.load(entry + PACK_SPLITS), tl.load(entry + PACK_TARGET)
    return source, distance, splits, target, tl.load(entry + PACK_NUMEL), tl.load(entry + PACK_TENSOR)


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
    start, end = tl.load(row + CHUNK_START), tl.load(row + CHUNK_END)
    return matrix, start, end, tl.load(record + FACTOR_R).to(tl.int32), tl.load(record + FACTOR_OFFSET)


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
