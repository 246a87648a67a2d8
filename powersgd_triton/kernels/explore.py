"""Exploration: the last column of a right basis is replaced by a direction that the basis does not see."""

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import table_device as tables
from powersgd_triton.kernels.configurations import NUMERICS
from powersgd_triton.kernels.factorize import arrives_last
from powersgd_triton.kernels.launcher import run
from powersgd_triton.kernels.random_device import random_values, stream_of
from powersgd_triton.kernels.table import BucketTable
from powersgd_triton.kernels.table_device import PROGRESS, PROGRESS_ARRIVED
from powersgd_triton.layout.constants import CARRY, OTHER_KEY, SMALLEST_REST

BLOCK = 8192
"""Elements of a basis that a program holds at a time."""

OPTIONS = {"num_warps": 8, **NUMERICS}


@triton.jit(do_not_specialize=["number", "every", "carry", "smallest", "other"])
def _explore_kernel(
    basis, parts, finite, number, records, factors, chunks, progress, every, other, carry, smallest,
    C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """See ``explore_reference``. Grid: chunks of the bases. Most programs find that it is not their matrix's turn."""
    matrix, start, end, r, offset = tables.factor_chunk(factors, chunks, tl.program_id(0))
    n, m, _ = tables.matrix_sizes(records, matrix)
    key = tables.key_of(factors, matrix)
    step = tl.load(number)
    if ((key.to(tl.int64) + step) % every != 0) | (r >= tl.minimum(n, m)) | (tl.load(finite) <= 0):
        return
    basis += offset
    stream = stream_of(key + other, step)
    ranks = tl.arange(0, C)
    inside = tl.zeros([C], tl.float32)
    size = tl.zeros([ROWS], tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        direction = tl.where(rows < end, random_values(rows, stream), 0.0)
        at = rows.to(tl.int64)[:, None] * r + ranks[None, :]
        block = tl.load(basis + at, (rows < end)[:, None] & (ranks < r)[None, :], 0.0)
        inside += tl.sum(direction[:, None] * block, axis=0)
        size += direction * direction
    # A chunk's part: products with the columns, and the squared norm.
    part = parts + tl.program_id(0) * (C + 1)
    tl.store(part + ranks, inside)
    tl.store(part + C, tl.sum(size, axis=0))
    first_chunk, count = tables.chunks_of(factors, matrix)
    if not arrives_last(progress + matrix * PROGRESS + PROGRESS_ARRIVED, count):
        return
    inside = tl.zeros([C], tl.float32)
    whole = 0.0
    # In the order of the chunks: the same bits, whichever program is last. The others' parts are not in this
    # multiprocessor's own cache. Several are loaded at once.
    for chunk in tl.range(first_chunk, first_chunk + count, loop_unroll_factor=8):
        part = parts + chunk * (C + 1)
        inside += tl.load(part + ranks, cache_modifier=".cg")
        whole += tl.load(part + C, cache_modifier=".cg")
    left = whole - tl.sum(inside * inside, axis=0)
    if left <= smallest * whole:
        return
    # Column r − 1 of the basis has the weight of the old column in addition.
    weights = tl.where(ranks == r - 1, carry, 0.0) - inside
    scale = 1.0 / tl.sqrt(left + carry * carry)
    for first in range(0, m, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * r + ranks[None, :]
        block = tl.load(basis + at, (rows < m)[:, None] & (ranks < r)[None, :], 0.0)
        explored = (random_values(rows, stream) + tl.sum(block * weights[None, :], axis=1)) * scale
        # No thread stores before all have loaded.
        tl.debug_barrier()
        tl.store(basis + rows.to(tl.int64) * r + r - 1, explored, rows < m)


def explore_triton(
    table: BucketTable, number: Tensor, finite: Tensor, rank: int, every: int, *, parts: Tensor, out: Tensor
) -> None:
    """Replace the last columns of the right bases ``out`` [fp32, flat], as ``explore_reference`` does.

    ``number`` (int64) and ``finite`` (int32) are scalars on the device, ``rank`` is the largest that may occur, and
    ``parts`` is an fp32 workspace of ``explore_numel`` elements.
    """
    if table.matrices:
        factors, columns = table.Q, triton.next_power_of_2(rank)
        rows, constants = max(1, BLOCK // columns), (every, OTHER_KEY, CARRY, SMALLEST_REST)
        arguments = finite, number, table.records, factors.records, factors.chunks, factors.progress, *constants
        run(_explore_kernel, (len(factors.chunks),), OPTIONS, out, parts, *arguments, C=columns, ROWS=rows)


def explore_numel(table: BucketTable, rank: int) -> int:
    """Return the elements of the workspace ``parts``."""
    return len(table.Q.chunks) * (int(triton.next_power_of_2(rank)) + 1)
