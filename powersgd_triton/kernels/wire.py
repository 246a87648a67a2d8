"""Messages as bytes: factors in 16, 8 or 4 bits with a scale for each column of a block, and elements as they are.

A program works on a tile, which is at most 128 rows of one matrix and some of its columns, or on a slice of the
elements that travel exactly (bypass tensors). ``wire_device.py`` says how a tile is found, rounded and read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.launcher import run
from powersgd_triton.kernels.table_device import known_multiple
from powersgd_triton.kernels.wire_device import (
    WIRE,
    WIRE_COLUMNS,
    exact_slice,
    read_tile,
    tile_is_aligned,
    tile_offsets,
    tile_places,
    views_of,
    wire_entry,
    write_tile,
)
from powersgd_triton.kernels.wire_table import WireTable


@triton.jit(do_not_specialize=["size", "has_own"])
def _encode_kernel(
    message, own, content, table, size: tl.int64, has_own, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr,
    HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """A tile as scales and codes, and as own what these stand for; or exact elements. Grid: all tiles and slices."""
    entry, chunk, element = wire_entry(table, tl.program_id(0), size)
    exact, scales, codes = views_of(content, BITS, LEVELS)
    if tl.load(entry + WIRE_COLUMNS) == 0:
        i, place, ok = exact_slice(entry, chunk, COPY)
        tl.store(exact + place, tl.load(message + element + i, ok, 0.0), ok)
    elif tile_is_aligned(entry, chunk, BITS):
        _encode_tile(message, own, scales, codes, entry, chunk, has_own, 4, BITS, LEVELS, C, HALF)
    else:
        _encode_tile(message, own, scales, codes, entry, chunk, has_own, 1, BITS, LEVELS, C, HALF)


@triton.jit
def _encode_tile(
    message, own, scales, codes, entry, chunk, has_own,
    VEC: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    element, offsets, distance, low_ok, high_ok, col_ok = tile_offsets(entry, VEC, C, HALF)
    scale, code = tile_places(entry, chunk, VEC, BITS)
    low = tl.load(message + element + offsets, low_ok, 0.0)
    high = tl.load(message + element + distance + offsets, high_ok, 0.0)
    low, high = write_tile(
        low, high, scales + scale, codes + code, offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C
    )
    if has_own > 0:
        tl.store(own + element + offsets, low, low_ok)
        tl.store(own + element + distance + offsets, high, high_ok)


@triton.jit(do_not_specialize=["size", "first", "workers", "has_own"])
def _reduce_kernel(
    received, own, content, table, size: tl.int64, first, workers, has_own,
    BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """All workers' parts summed: a tile, rounded again, own −= what that lost; or exact elements. Grid: an owner's."""
    entry = table + (first + tl.program_id(0)) * WIRE
    # What was received from each worker, and the sum, are bytes of this chunk alone: it starts at 0.
    exact, scales, codes = views_of(content, BITS, LEVELS)
    if tl.load(entry + WIRE_COLUMNS) == 0:
        _, place, ok = exact_slice(entry, 0, COPY)
        total = tl.zeros([COPY], tl.float32)
        for worker in range(workers):
            one = (received + worker * size).to(tl.pointer_type(tl.float32))
            total += tl.load(one + place, ok, 0.0)
        tl.store(exact + place, total, ok)
    elif tile_is_aligned(entry, size, BITS):
        _reduce_tile(
            received, own, scales, codes, entry, known_multiple(size, 4), workers, has_own, 4, BITS, LEVELS, C, HALF
        )
    else:
        _reduce_tile(received, own, scales, codes, entry, size, workers, has_own, 1, BITS, LEVELS, C, HALF)


@triton.jit
def _reduce_tile(
    received, own, scales, codes, entry, size, workers, has_own,
    VEC: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    element, offsets, distance, low_ok, high_ok, col_ok = tile_offsets(entry, VEC, C, HALF)
    scale, code = tile_places(entry, 0, VEC, BITS)
    low_sum = tl.zeros([HALF, C], tl.float32)
    high_sum = tl.zeros([HALF, C], tl.float32)
    # In the order of the workers, as in the reference: the same bits.
    for worker in range(workers):
        views = views_of(received + worker * size, BITS, LEVELS)
        low, high = read_tile(
            views[1] + scale, views[2] + code,
            offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C,
        )  # fmt: skip
        low_sum += low
        high_sum += high
    low, high = write_tile(
        low_sum, high_sum, scales + scale, codes + code, offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C
    )
    if has_own > 0:
        # This worker counts what rounding the sum lost as not contributed by itself, so it stays in its error buffer.
        own += element
        low_own = tl.load(own + offsets, low_ok, 0.0)
        high_own = tl.load(own + distance + offsets, high_ok, 0.0)
        tl.store(own + offsets, low_own - (low_sum - low), low_ok)
        tl.store(own + distance + offsets, high_own - (high_sum - high), high_ok)


@triton.jit(do_not_specialize=["size"])
def _decode_kernel(
    content, out, table, size: tl.int64, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr,
    HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """A tile from its scales and codes, or exact elements. Grid: tiles and slices of all chunks."""
    entry, chunk, element = wire_entry(table, tl.program_id(0), size)
    exact, scales, codes = views_of(content, BITS, LEVELS)
    if tl.load(entry + WIRE_COLUMNS) == 0:
        i, place, ok = exact_slice(entry, chunk, COPY)
        tl.store(out + element + i, tl.load(exact + place, ok, 0.0), ok)
    elif tile_is_aligned(entry, chunk, BITS):
        _decode_tile(scales, codes, out, entry, chunk, 4, BITS, LEVELS, C, HALF)
    else:
        _decode_tile(scales, codes, out, entry, chunk, 1, BITS, LEVELS, C, HALF)


@triton.jit
def _decode_tile(
    scales, codes, out, entry, chunk,
    VEC: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    element, offsets, distance, low_ok, high_ok, col_ok = tile_offsets(entry, VEC, C, HALF)
    scale, code = tile_places(entry, chunk, VEC, BITS)
    low, high = read_tile(
        scales + scale, codes + code, offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C
    )  # fmt: skip
    tl.store(out + element + offsets, low, low_ok)
    tl.store(out + element + distance + offsets, high, high_ok)


def encode_triton(table: WireTable, message: Tensor, own: Tensor | None, launch: Launch, *, out: Tensor) -> None:
    """out = the message's bytes, own = its factors as the bytes represent them.

    Args:
        table: of the plan.
        message: fp32, [factors | exact elements].
        own: fp32, the factors; None where it is not wanted.
        launch: warps and stages.
        out: uint8 [workers, plan.size], contiguous.
    """
    if programs := table.rows.size(0):
        run(
            _encode_kernel, (programs,), launch.options,
            message, message if own is None else own, out, table.rows, table.plan.size, int(own is not None),
            **table.constants,
        )  # fmt: skip


def reduce_triton(
    table: WireTable, received: Tensor, own: Tensor | None, worker: int, launch: Launch, *, out: Tensor
) -> None:
    """out = the sums of the parts that ``worker`` owns, rounded; own −= what rounding lost.

    Args:
        table: of the plan.
        received: uint8 [workers, plan.size], contiguous: every worker's bytes of that part.
        own: fp32, the factors; None where it is not wanted.
        worker: number of this worker.
        launch: as for ``encode_triton``.
        out: uint8 [plan.size].
    """
    first, end = table.starts[worker : worker + 2]
    if end > first:
        # An argument that is not read: any fp32 tensor.
        target = out.view(torch.float32) if own is None else own
        run(
            _reduce_kernel, (end - first,), launch.options,
            received, target, out, table.rows, table.plan.size, first, received.size(0), int(own is not None),
            **table.constants,
        )  # fmt: skip


def decode_triton(table: WireTable, gathered: Tensor, launch: Launch, *, out: Tensor) -> None:
    """out = the message that the bytes represent.

    Args:
        table: of the plan.
        gathered: uint8 [workers, plan.size], contiguous.
        launch: as for ``encode_triton``.
        out: fp32, [factors | exact elements].
    """
    if programs := table.rows.size(0):
        run(_decode_kernel, (programs,), launch.options, gathered, out, table.rows, table.plan.size, **table.constants)
