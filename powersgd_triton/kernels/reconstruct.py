"""Ĝ = P̂ Q̄ᵀ, and the bypass tensors back from the message that carried them, in one pass over Ĝ."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import table_device as tables
from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.launcher import ELEMENTS, run, vector_of
from powersgd_triton.kernels.product_device import multiply
from powersgd_triton.kernels.table import COPY_BLOCK, BucketTable, Pointers


@triton.jit
def _note_overflow(magnitudes, verdict):
    """Verdict ← 0 if one of the magnitudes, in fp32, is infinite or NaN.

    Several threads may store to the verdict at once. That is no race: all of them store 0.
    """
    # NaN fails the comparison too.
    fits = magnitudes < float("inf")
    tl.store(verdict + tl.zeros_like(magnitudes).to(tl.int32), 0.0, fits == 0)


@triton.jit(do_not_specialize=["out_base", "verdict", "row_programs"])
def _reconstruct_kernel(
    P_hat, Q, message, out_base: tl.int64, out_at, verdict, records, tiles, entries, row_programs,
    OUT_TYPE: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, COPY: tl.constexpr, C: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [n, m] = P̂ Q̄ᵀ; bypass tensors from the message; verdict ← 0 where one overflows.

    Grid: row tiles, then blocks of bypass tensors.
    """
    program = tl.program_id(0)
    if program >= row_programs:
        source, _, _, target, numel, tensor = tables.pack_entry(entries, program - row_programs)
        i = tl.arange(0, COPY)
        ok = i < numel
        rounded = tl.load(message + target + i, ok, 0.0).to(OUT_TYPE)
        # Bypass tensors start anywhere: nothing is known to divide their offsets.
        place = tables.pointer_to(tables.tensor_address(out_base, out_at, tensor), OUT_TYPE, 1) + source
        tl.store(place + i, rounded, ok)
        _note_overflow(tl.abs(rounded.to(tl.float32)), verdict)
        return
    matrix, row, start, end, _ = tables.tile_of(tiles, program, 1, BLOCK_COLS)
    n, m, r = tables.matrix_sizes(records, matrix)
    P_at, Q_at, _, _ = tables.factor_offsets(records, matrix)
    out = tables.tensor_address(out_base, out_at, matrix)
    P_hat += P_at + row.to(tl.int64) * r
    Q += Q_at
    if tables.rows_are_aligned(out, m, VEC):
        _walk_along_columns(
            P_hat, Q, out, verdict, n, tables.known_multiple(m, VEC), r, row, start, end,
            OUT_TYPE, WIDE, VEC, C, BLOCK_ROWS, BLOCK_COLS, PRECISION,
        )  # fmt: skip
    else:
        _walk_along_columns(
            P_hat, Q, out, verdict, n, m, r, row, start, end, OUT_TYPE, WIDE, 1, C, BLOCK_ROWS, BLOCK_COLS, PRECISION
        )


@triton.jit
def _walk_along_columns(
    P_hat, Q, out, verdict, n, m, r, row, start, end,
    OUT_TYPE: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The work of a row tile, where all rows of the matrix at address ``out`` start at multiples of VEC elements."""
    out = tables.pointer_to(out, OUT_TYPE, VEC) + row.to(tl.int64) * m
    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    ranks = tl.arange(0, C)
    row_ok = row + rows < n
    # Rows beyond the last are copies of it, which are not stored: a mask would take an instruction for each element.
    left = tl.minimum(rows, n - 1 - row)[:, None] * r + ranks[None, :]  # [rows, C]
    right_t = ranks[:, None] + cols[None, :] * r  # [C, cols]
    tile = rows[:, None] * m + cols[None, :]
    # The first panel's tile of P is the same for all columns.
    P_tile = tl.load(P_hat + left, (ranks < r)[None, :], 0.0)
    largest = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for col in range(start, end, BLOCK_COLS):
        col_ok = col + cols < m
        factor = tl.cast(col, tl.int64) * r
        Q_tile = tl.load(Q + factor + right_t, (ranks < r)[:, None] & col_ok[None, :], 0.0)
        value = multiply(P_tile, Q_tile, PRECISION)
        if WIDE:
            # Panel by panel into ``value``, in this order: another one would round differently.
            for k in range(C, r, C):
                more = k + ranks < r
                P_more = tl.load(P_hat + k + left, more[None, :], 0.0)
                Q_more = tl.load(Q + factor + k + right_t, more[:, None] & col_ok[None, :], 0.0)
                value += multiply(P_more, Q_more, PRECISION)
        rounded = value.to(OUT_TYPE)
        tl.store(out + col + tile, rounded, row_ok[:, None] & col_ok[None, :])
        # Noted once, after all tiles. Of columns beyond the last, Q is 0: they are finite if the others are.
        largest = tl.maximum(largest, tl.abs(rounded.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    _note_overflow(largest, verdict)


def reconstruct_triton(
    table: BucketTable, P: Tensor, Q: Tensor, message: Tensor, entries: Tensor, launch: Launch, *, out: Pointers,
    verdict: Tensor,
) -> None:  # fmt: skip
    """out = P Qᵀ, see ``reconstruct_reference``. Bypass tensors are copied from the message.

    P and Q hold the factors of all matrices, fp32 and flat. ``entries`` is the table by which the message was packed,
    ``pack_P`` or ``pack_left``. ``out`` is in fp32, bf16 or fp16. ``verdict`` is a scalar on the device.
    """
    tiles, programs = table.row_tiles, len(table.row_tiles) + table.bypass_programs
    if programs:
        options = launch.of_limited_tiles[0 if out.dtype == torch.float32 else 1]
        run(
            _reconstruct_kernel, (programs,), options, P, Q, message, out.base, out.distances, verdict,
            table.records, tiles, entries, len(tiles),
            OUT_TYPE=ELEMENTS[out.dtype], WIDE=launch.wide, VEC=vector_of(out.dtype), COPY=COPY_BLOCK,
        )  # fmt: skip
