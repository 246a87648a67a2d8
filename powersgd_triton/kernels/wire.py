"""Messages as bytes: factors in 16, 8 or 4 bits with a scale for each column of a block, and exact elements.

A program works on a tile, which is at most 128 rows of one matrix and some of its columns, or on a slice of the exact
elements (bypass tensors). ``wire_device.py`` says how a tile is found, rounded and read.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import wire_device
from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.launcher import run
from powersgd_triton.kernels.table import COPY_BLOCK, on_host
from powersgd_triton.kernels.table_device import WireRow
from powersgd_triton.kernels.wire_device import EXACT_BYTES, WIRE, WIRE_COLUMNS
from powersgd_triton.layout.wire_format import BLOCK, SCALE_BYTES, WirePlan


@triton.jit(do_not_specialize=["size", "has_own"])
def _encode_kernel(
    message, own, content, table, size: tl.int64, has_own, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr,
    HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Encode a tile, and write to own what its codes stand for, or copy exact elements. Grid: tiles and slices."""
    entry, chunk, element = wire_device.wire_entry(table, tl.program_id(0), size)
    exact, scales, codes = wire_device.views_of(content, BITS, LEVELS)
    if tl.load(entry + WIRE_COLUMNS) == 0:
        i, place, ok = wire_device.exact_slice(entry, chunk, COPY)
        tl.store(exact + place, tl.load(message + element + i, ok, 0.0), ok)
    elif wire_device.tile_is_aligned(entry, chunk, BITS):
        _encode_tile(message, own, scales, codes, entry, chunk, has_own, 4, BITS, LEVELS, C, HALF)
    else:
        _encode_tile(message, own, scales, codes, entry, chunk, has_own, 1, BITS, LEVELS, C, HALF)


@triton.jit
def _encode_tile(
    message, own, scales, codes, entry, chunk, has_own,
    VEC: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    element, scale, code, tile = wire_device.wire_tile(entry, chunk, VEC, BITS, C, HALF)
    low, high = wire_device.load_tile(message + element, tile)
    low, high = wire_device.write_tile(low, high, scales + scale, codes + code, tile, BITS, LEVELS, C)
    if has_own > 0:
        wire_device.store_tile(own + element, low, high, tile)


@triton.jit(do_not_specialize=["size", "first", "workers", "has_own"])
def _reduce_kernel(
    received, own, content, table, size: tl.int64, first, workers, has_own,
    BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Sum all workers' parts, and round a tile's sum. own −= what that lost. Grid: one owner's tiles and slices."""
    entry = table + (first + tl.program_id(0)) * WIRE
    # What was received from each worker, and the sum, are bytes of this chunk alone: it starts at 0.
    exact, scales, codes = wire_device.views_of(content, BITS, LEVELS)
    if tl.load(entry + WIRE_COLUMNS) == 0:
        _, place, ok = wire_device.exact_slice(entry, 0, COPY)
        total = tl.zeros([COPY], tl.float32)
        for worker in range(workers):
            one = (received + worker * size).to(tl.pointer_type(tl.float32))
            total += tl.load(one + place, ok, 0.0)
        tl.store(exact + place, total, ok)
    elif wire_device.tile_is_aligned(entry, size, BITS):
        _reduce_tile(received, own, scales, codes, entry, size, workers, has_own, 4, BITS, LEVELS, C, HALF)
    else:
        _reduce_tile(received, own, scales, codes, entry, size, workers, has_own, 1, BITS, LEVELS, C, HALF)


@triton.jit
def _reduce_tile(
    received, own, scales, codes, entry, size, workers, has_own,
    VEC: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    element, scale, code, tile = wire_device.wire_tile(entry, 0, VEC, BITS, C, HALF)
    low_sum, high_sum = wire_device.add_tiles(received, size, workers, scale, code, tile, VEC, BITS, LEVELS, C, HALF)
    low, high = wire_device.write_tile(low_sum, high_sum, scales + scale, codes + code, tile, BITS, LEVELS, C)
    if has_own > 0:
        # This worker counts what rounding the sum lost as not contributed by itself, so it stays in its error buffer.
        own += element
        offsets, distance, low_ok, high_ok, _ = tile
        low_own, high_own = wire_device.load_tile(own, tile)
        # No thread stores before all have loaded: at rank 1, several threads load the same element and one stores it.
        tl.debug_barrier()
        tl.store(own + offsets, low_own - (low_sum - low), low_ok)
        tl.store(own + distance + offsets, high_own - (high_sum - high), high_ok)


@triton.jit(do_not_specialize=["size", "chunks", "messages"])
def _decode_kernel(
    content, out, table, size: tl.int64, chunks, messages, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr,
    HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Decode a tile of all messages and add them up, or exact elements. Grid: tiles and slices of all chunks."""
    entry, chunk, element = wire_device.wire_entry(table, tl.program_id(0), size)
    # From a chunk of a message to the same one of the next message.
    stride = chunks * size
    if tl.load(entry + WIRE_COLUMNS) == 0:
        i, place, ok = wire_device.exact_slice(entry, chunk, COPY)
        total = tl.zeros([COPY], tl.float32)
        for message in range(messages):
            one = (content + message * stride).to(tl.pointer_type(tl.float32))
            total += tl.load(one + place, ok, 0.0)
        tl.store(out + element + i, total, ok)
    elif wire_device.tile_is_aligned(entry, chunk | stride, BITS):
        _decode_tile(content, out, entry, chunk, stride, messages, 4, BITS, LEVELS, C, HALF)
    else:
        _decode_tile(content, out, entry, chunk, stride, messages, 1, BITS, LEVELS, C, HALF)


@triton.jit
def _decode_tile(
    content, out, entry, chunk, stride, messages,
    VEC: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    element, scale, code, tile = wire_device.wire_tile(entry, chunk, VEC, BITS, C, HALF)
    low, high = wire_device.add_tiles(content, stride, messages, scale, code, tile, VEC, BITS, LEVELS, C, HALF)
    wire_device.store_tile(out + element, low, high, tile)


class TritonWire:
    """What ``TorchWire`` does, with the same bits, for fp32 messages: in one launch for any number of matrices.

    ``plan`` has a format narrower than fp32, and ``rank`` is the largest that may occur.
    """

    def __init__(self, plan: WirePlan, launch: Launch, rank: int, device: torch.device) -> None:
        self.plan, self._options = plan, launch.options
        columns = min(launch.panel, triton.next_power_of_2(rank))
        rows, self._starts = wire_rows(plan, columns)
        self._table = on_host(rows, len(WireRow._fields), torch.int64, device).to(device, non_blocking=True)
        width, sizes = plan.width, {"C": columns, "HALF": BLOCK // 2, "COPY": COPY_BLOCK}
        self._constants = {"BITS": width.bits, "LEVELS": width.levels if width.scaled else 0, **sizes}

    def encode(self, message: Tensor, own: Tensor | None, *, out: Tensor) -> None:
        target, has_own = message if own is None else own, int(own is not None)
        self._run(_encode_kernel, len(self._table), message, target, out, self._table, self.plan.size, has_own)

    def reduce(self, received: Tensor, own: Tensor | None, worker: int, *, out: Tensor) -> None:
        first, end = self._starts[worker : worker + 2]
        # Without ``own``, an argument that is not read: any fp32 tensor.
        target, has_own = out.view(torch.float32) if own is None else own, int(own is not None)
        arguments = received, target, out, self._table, self.plan.size, first, len(received), has_own
        self._run(_reduce_kernel, end - first, *arguments)

    def decode(self, gathered: Tensor, *, out: Tensor) -> None:
        chunks = len(self.plan.chunks)
        arguments = gathered, out, self._table, self.plan.size, chunks, len(gathered) // chunks
        self._run(_decode_kernel, len(self._table), *arguments)

    def _run(self, kernel: Any, programs: int, *arguments: Any) -> None:
        if programs:
            run(kernel, (programs,), self._options, *arguments, **self._constants)


def wire_rows(plan: WirePlan, columns: int) -> tuple[list[WireRow], list[int]]:
    """Return what each program works on, chunk by chunk, and the first program of each chunk and the number of all.

    It is a tile of a block of at most 128 rows, with a power of two of ``columns``, or a slice of exact elements. Those
    of a chunk come last, although their bytes come first.
    """
    rows, starts = list[WireRow](), [0]
    code_bytes = max(1, plan.width.bits // 8)
    for number, chunk in enumerate(plan.chunks):
        for piece in chunk.pieces:
            rank, element, scale, code = piece.rank, piece.element, piece.scale, piece.code
            for _, row in itertools.product(range(piece.count), range(0, piece.rows, BLOCK)):
                height = min(BLOCK, piece.rows - row)
                for first in range(0, rank, columns):
                    place = scale + first * SCALE_BYTES, code + first * code_bytes
                    rows.append(WireRow(number, element + first, height, min(columns, rank - first), rank, *place))
                element += height * rank
                scale += SCALE_BYTES * rank
                code += plan.width.code_bytes(height, rank)
        for start in range(0, chunk.bypass_numel, COPY_BLOCK):
            numel, code = min(COPY_BLOCK, chunk.bypass_numel - start), start * EXACT_BYTES.value
            rows.append(WireRow(number, chunk.bypass + start, numel, columns=0, rank=0, scales=0, codes=code))
        starts.append(len(rows))
    return rows, starts
