"""Messages as bytes: factors in 16, 8 or 4 bits with a scale for each column of a block, and elements as they are.

A tile is at most 128 rows of one matrix and some of its columns. Its rows are worked on in two halves, since a byte of
4-bit codes holds a row of each. Rounding is done by integers and by additions, so that every device, and the reference,
has the same bits. Compilers may fuse the products of codes and scales with sums: having at most 19 bits, they are exact
(down to 2⁻¹⁴⁹).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.table import COPY_BLOCK
from powersgd_triton.kernels.wire_table import WireTable
from powersgd_triton.layout.wire_format import BLOCK

CODES = {"bfloat16": torch.int16, "float16": torch.float16, "int8": torch.int8, "int4": torch.int8}


@triton.jit
def _bf16_bits(x):
    """The 16 bits of x rounded to bf16, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _from_bf16_bits(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude(x):
    """Largest |x| of each column; infinite where a value is not finite, NaN included."""
    size = tl.abs(x)
    return tl.max(tl.where(size < float("inf"), size, float("inf")), axis=0)


@triton.jit
def _nearest_code(x, scale, LEVELS: tl.constexpr):
    """round(x / scale), ties to even, at most ± LEVELS; 0 where the scale is 0 or NaN. In fp32."""
    code = _quotient(x, scale)
    # Adding 1.5 · 2²³ leaves no bits behind the point; quotients are below 2²².
    code = (code + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(code, -LEVELS), LEVELS)


@triton.jit
def _quotient(x, scale):
    some = scale > 0
    return tl.where(some, tl.div_rn(x, tl.where(some, scale, 1.0) + tl.zeros_like(x)), 0.0)


@triton.jit
def _tile(entry, VEC: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr):
    """Offsets of a tile's lower half [HALF, C], distance of the upper one, masks of both and of the columns [C]."""
    rows = tl.load(entry + 2).to(tl.int32)
    # Written so that the compiler sees what VEC divides; masks then do not cut through a vector.
    columns = tl.load(entry + 3).to(tl.int32) // VEC * VEC
    rank = tl.load(entry + 4).to(tl.int32) // VEC * VEC
    half = (rows + 1) // 2
    k = tl.arange(0, HALF)
    cols = tl.arange(0, C)
    col_ok = cols < columns
    offsets = k[:, None] * rank + cols[None, :]
    low_ok = (k < half)[:, None] & col_ok[None, :]
    high_ok = (half + k < rows)[:, None] & col_ok[None, :]
    return offsets, half * rank, low_ok, high_ok, col_ok


@triton.jit
def _write(
    low, high, scales, codes, offsets, distance, low_ok, high_ok, col_ok,
    BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write a tile's scales and codes; both halves as these say."""
    if LEVELS == 0:
        low_codes, high_codes = _bf16_bits(low), _bf16_bits(high)
        low, high = _from_bf16_bits(low_codes), _from_bf16_bits(high_codes)
    else:
        largest = tl.maximum(_magnitude(low), _magnitude(high))
        bits = _bf16_bits(tl.div_rn(largest, tl.full([C], LEVELS, tl.float32)))
        bits = tl.where(largest < float("inf"), bits, 0x7FC0).to(tl.int16)
        tl.store(scales + tl.arange(0, C), bits, col_ok)
        scale = _from_bf16_bits(bits)[None, :]
        if BITS == 16:
            low_codes, high_codes = _quotient(low, scale).to(tl.float16), _quotient(high, scale).to(tl.float16)
        else:
            low_codes = _nearest_code(low, scale, LEVELS).to(tl.int8)
            high_codes = _nearest_code(high, scale, LEVELS).to(tl.int8)
        low, high = low_codes.to(tl.float32) * scale, high_codes.to(tl.float32) * scale
    if BITS == 4:
        # Where the number of rows is odd, the last upper row is one of zeros.
        both = (low_codes.to(tl.int32) & 15) | (high_codes.to(tl.int32) << 4)
        tl.store(codes + offsets, both.to(tl.int8), low_ok)
    else:
        tl.store(codes + offsets, low_codes, low_ok)
        tl.store(codes + distance + offsets, high_codes, high_ok)
    return low, high


@triton.jit
def _read(
    scales, codes, offsets, distance, low_ok, high_ok, col_ok,
    BITS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Both halves of a tile, as its scales and codes say."""
    low_codes = tl.load(codes + offsets, low_ok, 0)
    if BITS == 4:
        both = low_codes.to(tl.int32)
        low_codes, high_codes = (both << 28) >> 28, both >> 4
    else:
        high_codes = tl.load(codes + distance + offsets, high_ok, 0)
    if LEVELS == 0:
        low, high = _from_bf16_bits(low_codes), _from_bf16_bits(high_codes)
    else:
        scale = _from_bf16_bits(tl.load(scales + tl.arange(0, C), col_ok, 0))[None, :]
        low, high = low_codes.to(tl.float32) * scale, high_codes.to(tl.float32) * scale
    return low, high


@triton.jit
def _encode_kernel(
    message, own, exact, scales, codes, table, size,
    OWN: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, VEC: tl.constexpr, CODE_VEC: tl.constexpr,
    C: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """One tile of factors as scales and codes, and what they say as own; or exact elements. Grid: tiles and slices."""
    entry = table + tl.program_id(0) * 7
    chunk = tl.load(entry) * (size // 16 * 16)
    element = tl.load(entry + 1)
    if tl.load(entry + 3) == 0:
        i = tl.arange(0, COPY)
        ok = i < tl.load(entry + 2)
        tl.store(exact + (chunk + tl.load(entry + 6)) // 4 + i, tl.load(message + element + i, ok, 0.0), ok)
        return
    offsets, distance, low_ok, high_ok, col_ok = _tile(entry, VEC, C, HALF)
    element = element // VEC * VEC
    low = tl.load(message + element + offsets, low_ok, 0.0)
    high = tl.load(message + element + distance + offsets, high_ok, 0.0)
    scales += (chunk + tl.load(entry + 5)) // 2
    codes += chunk // (2 if BITS == 16 else 1) + tl.load(entry + 6) // (2 if BITS == 16 else 1) // CODE_VEC * CODE_VEC
    low, high = _write(low, high, scales, codes, offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C)
    if OWN:
        tl.store(own + element + offsets, low, low_ok)
        tl.store(own + element + distance + offsets, high, high_ok)


@triton.jit(do_not_specialize=["first", "workers"])
def _reduce_kernel(
    received_exact, received_scales, received_codes, own, exact, scales, codes, table, size, first, workers,
    OWN: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, VEC: tl.constexpr, CODE_VEC: tl.constexpr,
    C: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """The sum of all workers' parts, of one tile rounded again, own −= what that lost. Grid: an owner's tiles."""
    entry = table + (first + tl.program_id(0)) * 7
    size = tl.cast(size // 16 * 16, tl.int64)
    if tl.load(entry + 3) == 0:
        i = tl.arange(0, COPY)
        ok = i < tl.load(entry + 2)
        place = tl.load(entry + 6) // 4 + i
        total = tl.zeros([COPY], tl.float32)
        for worker in range(workers):
            total += tl.load(received_exact + worker * (size // 4) + place, ok, 0.0)
        tl.store(exact + place, total, ok)
        return
    offsets, distance, low_ok, high_ok, col_ok = _tile(entry, VEC, C, HALF)
    scale = tl.load(entry + 5) // 2
    code = tl.load(entry + 6) // (2 if BITS == 16 else 1) // CODE_VEC * CODE_VEC
    low_sum = tl.zeros([HALF, C], tl.float32)
    high_sum = tl.zeros([HALF, C], tl.float32)
    for worker in range(workers):
        low, high = _read(
            received_scales + worker * (size // 2) + scale,
            received_codes + worker * (size // (2 if BITS == 16 else 1)) + code,
            offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C,
        )  # fmt: skip
        low_sum += low
        high_sum += high
    low, high = _write(
        low_sum, high_sum, scales + scale, codes + code, offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C
    )
    if OWN:
        own += tl.load(entry + 1) // VEC * VEC
        low_own = tl.load(own + offsets, low_ok, 0.0)
        high_own = tl.load(own + distance + offsets, high_ok, 0.0)
        tl.store(own + offsets, low_own - (low_sum - low), low_ok)
        tl.store(own + distance + offsets, high_own - (high_sum - high), high_ok)


@triton.jit
def _decode_kernel(
    exact, scales, codes, out, table, size,
    BITS: tl.constexpr, LEVELS: tl.constexpr, VEC: tl.constexpr, CODE_VEC: tl.constexpr,
    C: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """One tile of factors from scales and codes, or exact elements. Grid: tiles and slices of all chunks."""
    entry = table + tl.program_id(0) * 7
    chunk = tl.load(entry) * (size // 16 * 16)
    element = tl.load(entry + 1)
    if tl.load(entry + 3) == 0:
        i = tl.arange(0, COPY)
        ok = i < tl.load(entry + 2)
        tl.store(out + element + i, tl.load(exact + (chunk + tl.load(entry + 6)) // 4 + i, ok, 0.0), ok)
        return
    offsets, distance, low_ok, high_ok, col_ok = _tile(entry, VEC, C, HALF)
    scales += (chunk + tl.load(entry + 5)) // 2
    codes += chunk // (2 if BITS == 16 else 1) + tl.load(entry + 6) // (2 if BITS == 16 else 1) // CODE_VEC * CODE_VEC
    low, high = _read(scales, codes, offsets, distance, low_ok, high_ok, col_ok, BITS, LEVELS, C)
    out += element // VEC * VEC
    tl.store(out + offsets, low, low_ok)
    tl.store(out + distance + offsets, high, high_ok)


def encode_triton(table: WireTable, message: Tensor, own: Tensor | None, launch: Launch, *, out: Tensor) -> None:
    """out = the message's bytes, own = what those of its factors say.

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
            OWN=own is not None, **_constants(table), num_warps=launch.num_warps, num_stages=launch.num_stages,
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
            *_views(table, received), target, *views, table.rows, table.plan.size, first, len(table.plan.chunks),
            OWN=own is not None, **_constants(table), num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip


def decode_triton(table: WireTable, gathered: Tensor, launch: Launch, *, out: Tensor) -> None:
    """out = the message that the bytes say.

    Args:
        table: of the plan.
        gathered: uint8 [workers, plan.size], contiguous.
        launch: as for ``encode_triton``.
        out: fp32, [factors | exact elements].
    """
    if programs := len(table.rows):
        _decode_kernel[(programs,)](
            *_views(table, gathered), out, table.rows, table.plan.size,
            **_constants(table), num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip


def _views(table: WireTable, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes as exact elements, bits of scales, and codes."""
    return content.view(torch.float32), content.view(torch.int16), content.view(CODES[table.plan.width.name])


def _constants(table: WireTable) -> dict[str, int]:
    width = table.plan.width
    return {
        "BITS": width.bits,
        "LEVELS": width.levels if width.scaled else 0,
        "VEC": table.vector,
        "CODE_VEC": table.code_vector,
        "C": table.columns,
        "HALF": BLOCK // 2,
        "COPY": COPY_BLOCK,
    }
