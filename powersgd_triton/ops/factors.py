"""Factors in 16, 8 and 4 bits, in messages: in plain torch, and those with scales on the CPU in C, ``factors.c``."""

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from powersgd_triton.layout.constants import BF16_NAN
from powersgd_triton.layout.wire_format import BLOCK, SCALE_BYTES, Chunk, WireFormat
from powersgd_triton.ops.host import fields, library
from powersgd_triton.ops.reference import on_host


class _Piece(ctypes.Structure):
    _fields_ = fields(int64="count rows rank element scale code")


class _Factors(ctypes.Structure):
    _fields_ = fields(void_p="pieces values out content", int64="number size messages", int32="bits")


class FactorCodec:
    """Encodes and sums the factors of one chunk.

    Values [numel] are in fp32 or fp64. The scale of each block's columns is s = max|x| / levels, and codes are
    round(x / s), to nearest, ties to even. A non-finite value makes its scale NaN, and with it the column. Where the
    scale is 0, codes are 0.

    Attributes:
        place: Where the factors lie in the message. The pieces of a chunk are adjacent.
    """

    def __init__(self, chunk: Chunk, width: WireFormat) -> None:
        self._pieces, self._width = chunk.pieces, width
        first = chunk.pieces[0].element if chunk.pieces else 0
        self.numel = sum(piece.numel for piece in chunk.pieces)
        self.place = slice(first, first + self.numel)
        pieces = (_Piece(p.count, p.rows, p.rank, p.element - first, p.scale, p.code) for p in chunk.pieces)
        self._in_c = (_Piece * len(chunk.pieces))(*pieces)

    def encode(self, values: Tensor, *, content: Tensor, rounded: Tensor | None) -> None:
        """Write scales and codes of values to the chunk's bytes, and what the codes stand for to ``rounded``."""
        width = self._width
        if not width.scaled:
            codes = self._unscaled(content).copy_(values)
            if rounded is not None:
                rounded.copy_(codes)
            return
        if self._compute(content[None], values, rounded):
            return
        results = values if rounded is None else rounded
        parts = (self._blocks(x, content) for x in (values, results))
        for (A, scales, codes), (out, _, _) in zip(*parts, strict=True):
            # Not by a number: torch on CUDA would multiply by its reciprocal, which has other bits.
            scale = A.abs().amax(2, keepdim=True) / torch.full((), width.levels, dtype=A.dtype, device=A.device)
            # One of the many NaNs, so that all backends write the same bytes.
            scales.copy_(scale).view(torch.int16).masked_fill_(~scale.isfinite(), BF16_NAN)
            # Divide by the scales as they are stored, since the codes are multiplied by those.
            A = (A / scales).nan_to_num_(0.0, 0.0, 0.0)
            if width.bits < 16:
                # 0 in the place of −0, which integers do not have.
                A = A.round_().clamp_(-width.levels, width.levels).add_(0.0)
            if width.bits == 4:
                # A row of the lower half of a block and one of the upper half share bytes.
                low, high = A.to(torch.int8).split_with_sizes([codes.shape[2], A.shape[2] - codes.shape[2]], dim=2)
                codes.copy_(low).bitwise_and_(15)
                codes[:, :, : high.shape[2]].add_(high, alpha=16)
            else:
                codes.copy_(A)
            if rounded is not None:
                out.copy_((codes if width.bits == 16 else A).to(out.dtype) * scales)

    def sum(self, contents: Tensor, *, out: Tensor) -> None:
        """Write 0 + codes · scales of the first message + those of the second one …, in this order, to ``out``.

        ``contents`` are uint8 [messages, bytes] of the same chunk.
        """
        if self._width.scaled and self._compute(contents, None, out):
            return
        out.zero_()
        for content in contents:
            if not self._width.scaled:
                out += self._unscaled(content)
                continue
            for total, scales, codes in self._blocks(out, content):
                if self._width.bits == 4:
                    # Shifts of signed integers restore the signs.
                    codes = torch.cat([codes << 4 >> 4, codes >> 4], dim=2)[:, :, : total.shape[2]]
                total += codes.to(out.dtype) * scales

    def _compute(self, contents: Tensor, values: Tensor | None, out: Tensor | None) -> bool:
        """Encode values, or sum to ``out``, in C. Return False, without a change, if the library does not take them."""
        function = getattr(library(), "powersgd_factors", None)
        if function is None or any(x.dtype != torch.float32 or not on_host(x) for x in (values, out) if x is not None):
            return False
        places = (None if x is None else x.data_ptr() for x in (values, out, contents))
        sizes = len(self._in_c), contents.stride(0), len(contents), self._width.bits
        function(ctypes.byref(_Factors(ctypes.addressof(self._in_c), *places, *sizes)), torch.get_num_threads())
        return True

    def _unscaled(self, content: Tensor) -> Tensor:
        """Return the codes of all factors, which are adjacent."""
        return content[self._pieces[0].code if self.numel else 0 :][: 2 * self.numel].view(torch.bfloat16)

    def _blocks(self, values: Tensor, content: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return views of blocks of equal height: entries and codes [count, blocks, rows, rank], scales with 1 row."""
        dtype, together = torch.float16 if self._width.bits == 16 else torch.int8, 2 if self._width.bits == 4 else 1
        for piece in self._pieces:
            count, rows, rank = piece.count, piece.rows, piece.rank
            code_rows, each = -(-rows // together), -(-rows // BLOCK) * rank
            entries = values[piece.element - self.place.start :][: piece.numel].view(count, rows, rank)
            scales = content[piece.scale :][: SCALE_BYTES * count * each].view(torch.bfloat16).view(count, -1, 1, rank)
            codes = content[piece.code :][: count * code_rows * rank * dtype.itemsize].view(dtype)
            codes = codes.view(count, code_rows, rank)
            whole, rest = divmod(rows, BLOCK)
            for start, blocks, height in ((0, whole, BLOCK), (whole, 1, rest)):
                if blocks and height:
                    own = entries[:, start * BLOCK :][:, : blocks * height].unflatten(1, (blocks, height))
                    some = -(-height // together)
                    written = codes[:, start * BLOCK // together :][:, : blocks * some].unflatten(1, (blocks, some))
                    yield own, scales[:, start : start + blocks], written
