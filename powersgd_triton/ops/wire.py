"""Messages with factors narrower than fp32, in plain torch: encoding, summing and decoding.

Each worker owns a part of a message. It receives this part from all workers, sums it in the message's dtype, rounds the
sum and sends it to all workers. The contribution of a worker is its factors after rounding. The part's owner subtracts
the rounding error of the sum from its own contribution. So the contributions of all workers add up to what arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import BLOCK, SCALE_BYTES, Chunk, Piece, WireFormat, WirePlan

CODES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "int4": torch.int8}


class Wire(Protocol):
    """Encodes and decodes one kind of message of one bucket. Bytes are uint8 [workers, plan.size]."""

    plan: WirePlan

    def encode(self, message: Tensor, own: Tensor | None, *, out: Tensor) -> None:
        """Write this worker's message to ``out``, rounded, and its rounded factors to ``own`` if given."""

    def reduce(self, received: Tensor, own: Tensor | None, worker: int, *, out: Tensor) -> None:
        """Write the rounded sum of the parts that ``worker`` owns to ``out`` [plan.size].

        Subtract what rounding lost, sum − rounded sum, from ``own`` if given.
        """

    def decode(self, gathered: Tensor, *, out: Tensor) -> None:
        """Write the message of all rounded sums to ``out``."""


class TorchWire:
    """The reference implementation of ``Wire``.

    Args:
        plan: Places of all parts in the bytes.
        dtype: Dtype of messages, fp32 or fp64. Bypass tensors are sent in it.
    """

    def __init__(self, plan: WirePlan, dtype: torch.dtype) -> None:
        self.plan = plan
        self._dtype = dtype

    def encode(self, message: Tensor, own: Tensor | None, *, out: Tensor) -> None:
        for chunk, content in zip(self.plan.chunks, out, strict=True):
            self._exact(content, chunk).copy_(message[chunk.bypass : chunk.bypass + chunk.bypass_numel])
            for piece in chunk.pieces:
                encode_reference(_part(message, piece), piece, self.plan.width, out=content)
                if own is not None:
                    decode_reference(content, piece, self.plan.width, out=_part(own, piece))

    def reduce(self, received: Tensor, own: Tensor | None, worker: int, *, out: Tensor) -> None:
        chunk, width = self.plan.chunks[worker], self.plan.width
        exact = self._exact(out, chunk).zero_()
        for content in received:
            exact += self._exact(content, chunk)
        for piece in chunk.pieces:
            shape = piece.count, piece.rows, piece.rank
            total, part = (torch.zeros(shape, dtype=self._dtype, device=out.device) for _ in range(2))
            for content in received:
                decode_reference(content, piece, width, out=part)
                total += part
            encode_reference(total, piece, width, out=out)
            if own is not None:
                decode_reference(out, piece, width, out=part)
                _part(own, piece).sub_(total.sub_(part))

    def decode(self, gathered: Tensor, *, out: Tensor) -> None:
        for chunk, content in zip(self.plan.chunks, gathered, strict=True):
            out[chunk.bypass : chunk.bypass + chunk.bypass_numel].copy_(self._exact(content, chunk))
            for piece in chunk.pieces:
                decode_reference(content, piece, self.plan.width, out=_part(out, piece))

    def _exact(self, content: Tensor, chunk: Chunk) -> Tensor:
        return content[: chunk.bypass_numel * self._dtype.itemsize].view(self._dtype)


def encode_reference(A: Tensor, piece: Piece, width: WireFormat, *, out: Tensor) -> None:
    """out, at the piece's places ← scales s = max|x| / levels of each block's columns, and codes round(x / s).

    Rounding is to nearest, ties to even. A non-finite value makes its scale NaN, and with it all decoded values of the
    column. Zeros have code 0, and so have values so small that the scale is 0.

    Args:
        A: [count, rows, rank], fp32 or fp64.
        piece: Places of the codes and scales.
        width: Format of the factors.
        out: Bytes of a chunk.
    """
    for rows, scales, codes in _blocks(piece, width, out):
        block = _in_blocks(A, rows)
        if scales is not None:
            largest = block.abs().amax(dim=2)
            # Not by a number: torch on CUDA would multiply by its reciprocal, which has other bits.
            scales.copy_(torch.where(largest.isfinite(), largest / torch.full_like(largest, width.levels), torch.nan))
            divisor = scales.to(A.dtype).unsqueeze(2)
            block = torch.where(divisor > 0, block / divisor, 0)
        if width.bits < 16:
            block = block.round_().clamp_(-width.levels, width.levels)
        if width.bits == 4:
            low, high = _halves(block.to(torch.int8))
            codes.copy_((low & 15) | (high << 4))
        else:
            codes.copy_(block)


def decode_reference(content: Tensor, piece: Piece, width: WireFormat, *, out: Tensor) -> None:
    """out [count, rows, rank], fp32 or fp64 ← codes · scales of a chunk's bytes: the inverse of encoding."""
    for rows, scales, codes in _blocks(piece, width, content):
        block = _in_blocks(out, rows)
        if width.bits == 4:
            height = block.shape[2]
            block[:, :, : codes.shape[2]] = (codes << 4) >> 4
            block[:, :, codes.shape[2] :] = (codes >> 4)[:, :, : height - codes.shape[2]]
        else:
            block.copy_(codes)
        if scales is not None:
            block.mul_(scales.to(out.dtype).unsqueeze(2))


def _part(factors: Tensor, piece: Piece) -> Tensor:
    return factors[piece.element : piece.element + piece.numel].view(piece.count, piece.rows, piece.rank)


def _blocks(piece: Piece, width: WireFormat, content: Tensor) -> Iterator[tuple[range, Tensor | None, Tensor]]:
    """Yield runs of blocks of equal height: (rows, scales [count, blocks, rank], codes [count, blocks, height, rank]).

    With 4-bit codes, ``height`` is half of the rows, rounded up. ``rows.step`` is the height of the run's blocks.
    """
    count, rank = piece.count, piece.rank
    whole, rest = divmod(piece.rows, BLOCK)
    blocks = -(-piece.rows // BLOCK)
    each = whole * width.code_bytes(BLOCK, rank) + width.code_bytes(rest, rank)
    codes = content[piece.code : piece.code + count * each].view(CODES[width.name]).view(count, -1)
    scales = None
    if width.scaled:
        numel = SCALE_BYTES * count * blocks * rank
        scales = content[piece.scale : piece.scale + numel].view(torch.bfloat16).view(count, blocks, rank)
    start = 0
    runs = (range(0, whole * BLOCK, BLOCK), 0, whole), (range(whole * BLOCK, piece.rows, max(rest, 1)), whole, blocks)
    for rows, first, last in runs:
        if not rows:
            continue
        height = -(-rows.step // 2) if width.bits == 4 else rows.step
        numel = (last - first) * height * rank
        run = codes[:, start : start + numel].view(count, last - first, height, rank)
        yield rows, None if scales is None else scales[:, first:last], run
        start += numel


def _in_blocks(A: Tensor, rows: range) -> Tensor:
    """Return a view [count, blocks, height, rank] of rows of A [count, rows, rank]."""
    view: Tensor = A[:, rows.start : rows.stop].unflatten(1, (len(rows), rows.step))
    return view


def _halves(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second half of each block's rows. If their number is odd, the second ends with zeros."""
    half = -(-codes.shape[2] // 2)
    low, high = codes[:, :, :half], codes[:, :, half:]
    return low, high if high.shape[2] == half else torch.nn.functional.pad(high, (0, 0, 0, 1))
