"""Exploration: the last column of a right basis is replaced by a direction that the basis does not see."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import NUMERICS
from powersgd_triton.kernels.launcher import run
from powersgd_triton.kernels.random_device import random_values, stream_of
from powersgd_triton.kernels.table import BucketTable
from powersgd_triton.kernels.table_device import factor_offsets, key_of, matrix_sizes
from powersgd_triton.layout.constants import CARRY, OTHER_KEY, SMALLEST_REST

BLOCK = 2048
"""Elements of a basis that a program holds at a time."""


@triton.jit(do_not_specialize=["number", "every", "carry", "smallest", "other"])
def _explore_kernel(
    basis, finite, number, records, factors, every, other, carry, smallest, C: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """See ``explore_reference``. Grid: matrices. Most programs find that it is not their matrix's turn."""
    matrix = tl.program_id(0)
    n, m, r = matrix_sizes(records, matrix)
    key = key_of(factors, matrix)
    step = tl.load(number)
    if ((key.to(tl.int64) + step) % every != 0) | (r >= tl.minimum(n, m)) | (tl.load(finite) <= 0):
        return
    _, start = factor_offsets(records, matrix)
    stream = stream_of(key + other, step)
    ranks = tl.arange(0, C)
    inside = tl.zeros([C], tl.float32)
    size = tl.zeros([ROWS], tl.float32)
    for first in range(0, m, ROWS):
        rows = first + tl.arange(0, ROWS)
        direction = tl.where(rows < m, random_values(rows, stream), 0.0)
        at = start + rows.to(tl.int64)[:, None] * r + ranks[None, :]
        block = tl.load(basis + at, (rows < m)[:, None] & (ranks < r)[None, :], 0.0)
        inside += tl.sum(direction[:, None] * block, axis=0)
        size += direction * direction
    whole = tl.sum(size, axis=0)
    left = whole - tl.sum(inside * inside, axis=0)
    if left <= smallest * whole:
        return
    # Column r − 1 of the basis has the weight of the old column in addition.
    weights = tl.where(ranks == r - 1, carry, 0.0) - inside
    scale = 1.0 / tl.sqrt(left + carry * carry)
    for first in range(0, m, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = start + rows.to(tl.int64)[:, None] * r + ranks[None, :]
        block = tl.load(basis + at, (rows < m)[:, None] & (ranks < r)[None, :], 0.0)
        explored = (random_values(rows, stream) + tl.sum(block * weights[None, :], axis=1)) * scale
        # No thread stores before all have loaded.
        tl.debug_barrier()
        tl.store(basis + start + rows.to(tl.int64) * r + r - 1, explored, rows < m)


def explore_triton(table: BucketTable, number: Tensor, finite: Tensor, rank: int, every: int, *, out: Tensor) -> None:
    """Replace the last columns of the right bases ``out`` [fp32, flat], as ``explore_reference`` does.

    ``number`` (int64) and ``finite`` (int32) are scalars on the device, and ``rank`` is the largest that may occur.
    """
    if not table.matrices:
        return
    columns = triton.next_power_of_2(rank)
    constants = every, OTHER_KEY, CARRY, SMALLEST_REST
    arguments = out, finite, number, table.records, table.Q.records, *constants
    rows = max(1, BLOCK // columns)
    run(_explore_kernel, (len(table.matrices),), NUMERICS, *arguments, C=columns, ROWS=rows)
