"""Messages as bytes: factors in 16, 8 or 4 bits with a scale for each column of a block, and elements as they are.

A program works on a tile, which is at most 128 rows of one matrix and some of its columns, or on a slice of the
elements that travel exactly (bypass tensors). ``wire_device.py`` says how a tile is found, rounded and read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.table import COPY_BLOCK
from powersgd_triton.kernels.wire_device import (
    EXACT_BYTES,
    SCALE,
    WIRE,
    WIRE_COLUMNS,
    WIRE_ELEMENT,
    chunk_size,
    exact_slice,
    read_tile,
    tile_offsets,
    tile_places,
    wire_entry,
    write_tile,
)
from powersgd_triton.kernels.wire_table import WireTable
from powersgd_triton.layout.wire_format import BLOCK

CODES = {"bfloat16": torch.int16, "float16": torch.float16, "int8": torch.int8, "int4": torch.int8}


@triton.jit
def _encode_kernel(
    message, own, exact, scales, codes, table, size,
    OWN: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr,
    VEC: tl.constexpr, CODE_VEC: tl.constexpr, CODE_BYTES: tl.constexpr,
    C: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """A tile as scales and codes, and as own what these stand for; or exact elements. Grid: all tiles and slices."""
    entry, chunk, element = wire_entry(table, tl.program_id(0), size)
    if tl.load(entry + WIRE_COLUMNS) == 0:
        i, place, ok = exact_slice(entry, chunk, COPY)
        tl.store(exact + place, tl.load(message + element + i, ok, 0.0), ok)
        return
    offsets, distance, low_ok, high_ok, col_ok = tile_offsets(entry, VEC, C, HALF)
    element = element // VEC * VEC
    scale, code = tile_places(entry, chunk, CODE_VEC, CODE_BYTES)
    low = tl.load(message + element + offsets, low_ok, 0.0)
    high = tl.load(message + element + distance + offsets, high_ok, 0.0)
    low, high = write_tile(
        low, high, scales + scale, codes + code, offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C
    )
    if OWN:
        tl.store(own + element + offsets, low, low_ok)
        tl.store(own + element + distance + offsets, high, high_ok)


@triton.jit(do_not_specialize=["first", "workers"])
def _reduce_kernel(
    received_exact, received_scales, received_codes, own, exact, scales, codes, table, size, first, workers,
    OWN: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr,
    VEC: tl.constexpr, CODE_VEC: tl.constexpr, CODE_BYTES: tl.constexpr,
    C: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """All workers' parts summed: a tile, rounded again, own −= what that lost; or exact elements. Grid: an owner's."""
    entry = table + (first + tl.program_id(0)) * WIRE
    # Workers times bytes may exceed 32 bits.
    size = tl.cast(chunk_size(size), tl.int64)
    if tl.load(entry + WIRE_COLUMNS) == 0:
        _, place, ok = exact_slice(entry, 0, COPY)
        total = tl.zeros([COPY], tl.float32)
        for worker in range(workers):
            total += tl.load(received_exact + worker * (size // EXACT_BYTES) + place, ok, 0.0)
        tl.store(exact + place, total, ok)
        return
    offsets, distance, low_ok, high_ok, col_ok = tile_offsets(entry, VEC, C, HALF)
    # What was received from each worker, and the sum, are bytes of this chunk alone: it starts at 0.
    scale, code = tile_places(entry, 0, CODE_VEC, CODE_BYTES)
    low_sum = tl.zeros([HALF, C], tl.float32)
    high_sum = tl.zeros([HALF, C], tl.float32)
    # In the order of the workers, as in the reference: the same bits.
    for worker in range(workers):
        low, high = read_tile(
            received_scales + worker * (size // SCALE) + scale,
            received_codes + worker * (size // CODE_BYTES) + code,
            offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C,
        )  # fmt: skip
        low_sum += low
        high_sum += high
    low, high = write_tile(
        low_sum, high_sum, scales + scale, codes + code, offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C
    )
    if OWN:
        # This worker counts what rounding the sum lost as not contributed by itself, so it stays in its error buffer.
        own += tl.load(entry + WIRE_ELEMENT) // VEC * VEC
        low_own = tl.load(own + offsets, low_ok, 0.0)
        high_own = tl.load(own + distance + offsets, high_ok, 0.0)
        tl.store(own + offsets, low_own - (low_sum - low), low_ok)
        tl.store(own + distance + offsets, high_own - (high_sum - high), high_ok)


@triton.jit
def _decode_kernel(
    exact, scales, codes, out, table, size,
    BITS: tl.constexpr, LEVELS: tl.constexpr,
    VEC: tl.constexpr, CODE_VEC: tl.constexpr, CODE_BYTES: tl.constexpr,
    C: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """A tile from its scales and codes, or exact elements. Grid: tiles and slices of all chunks."""
    entry, chunk, element = wire_entry(table, tl.program_id(0), size)
    if tl.load(entry + WIRE_COLUMNS) == 0:
        i, place, ok = exact_slice(entry, chunk, COPY)
        tl.store(out + element + i, tl.load(exact + place, ok, 0.0), ok)
        return
    offsets, distance, low_ok, high_ok, col_ok = tile_offsets(entry, VEC, C, HALF)
    element = element // VEC * VEC
    scale, code = tile_places(entry, chunk, CODE_VEC, CODE_BYTES)
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
        launch: columns of a tile (as in the table), warps and stages.
        out: uint8 [workers, plan.size], contiguous.
    """
    if programs := len(table.rows):
        target = message if own is None else own
        _encode_kernel[(programs,)](
            message, target, *_views(table, out), table.rows, table.plan.size,
            OWN=own is not None, **_constants(table, launch),
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
        views = _views(table, out)
        target = views[0] if own is None else own
        _reduce_kernel[(end - first,)](
            *_views(table, received), target, *views, table.rows, table.plan.size, first, len(received),
            OWN=own is not None, **_constants(table, launch),
        )  # fmt: skip


def decode_triton(table: WireTable, gathered: Tensor, launch: Launch, *, out: Tensor) -> None:
    """out = the message that the bytes represent.

    Args:
        table: of the plan.
        gathered: uint8 [workers, plan.size], contiguous.
        launch: as for ``encode_triton``.
        out: fp32, [factors | exact elements].
    """
    if programs := len(table.rows):
        _decode_kernel[(programs,)](
            *_views(table, gathered), out, table.rows, table.plan.size,
            **_constants(table, launch),
        )  # fmt: skip


def _views(table: WireTable, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes as exact elements, bits of scales, and codes."""
    return content.view(torch.float32), content.view(torch.int16), content.view(CODES[table.plan.width.name])


def _constants(table: WireTable, launch: Launch) -> dict[str, Any]:
    """The keywords that the three kernels share."""
    width = table.plan.width
    return {
        "BITS": width.bits,
        "LEVELS": width.levels if width.scaled else 0,
        "VEC": table.vector,
        "CODE_VEC": table.code_vector,
        "CODE_BYTES": table.code_bytes,
        "C": table.columns,
        "HALF": BLOCK // 2,
        "COPY": COPY_BLOCK,
        **launch.options,
    }
