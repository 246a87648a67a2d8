"""Messages with factors narrower than fp32, in plain torch: encoding, summing and decoding.

Each worker owns a part of a message. It receives this part from all workers, sums it in the message's dtype, rounds the
sum and sends it to all workers. The contribution of a worker is its factors after rounding. The part's owner subtracts
the rounding error of the sum from its own contribution. So the contributions of all workers add up to what arrives.
Both of two workers receive both messages as a whole instead, and add them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import Chunk, WirePlan
from powersgd_triton.ops.runs import Work, runs_of

CODES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "int4": torch.int8}

TOGETHER = 4 << 20
"""Bytes of factors of several workers that are decoded together."""


class Wire(Protocol):
    """Encodes and decodes one kind of message of one bucket. Bytes are uint8 [chunks, plan.size]."""

    plan: WirePlan

    def encode(self, message: Tensor, own: Tensor | None, *, out: Tensor) -> None:
        """Write this worker's message to ``out``, rounded, and its rounded factors to ``own`` if given."""

    def reduce(self, received: Tensor, own: Tensor | None, worker: int, *, out: Tensor) -> None:
        """Write the rounded sum of the parts that ``worker`` owns to ``out`` [plan.size]. own −= sum − rounded sum."""

    def decode(self, gathered: Tensor, *, out: Tensor) -> None:
        """Write the message of all rounded sums to ``out``, or the sum of messages [messages · chunks, plan.size]."""


class TorchWire:
    """The reference implementation of ``Wire``, for messages in fp32 or fp64. Bypass tensors are sent in this dtype.

    The number of operations decides how long a small message takes. So an operation processes all factors of a chunk,
    or all blocks of a run, in scratch memory of which all views are made only once.
    """

    def __init__(self, plan: WirePlan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self._dtype = dtype
        self._runs = [runs_of(chunk, plan.width) for chunk in plan.chunks]
        # Not a number: torch on CUDA would multiply by its reciprocal, which has other bits.
        self._levels = torch.full((), plan.width.levels, dtype=dtype, device=device)
        # Scratch for the largest chunk, of several workers if it is small. (Without it, the CPU takes longer to get new
        # memory than for the operations on it.) If there is one chunk, two workers exchange it.
        numel = max(map(_numel, plan.chunks), default=0)
        several = max(1, min(max(2, len(plan.chunks)), TOGETHER // max(1, numel * dtype.itemsize)))
        self._values = torch.empty(several, numel, dtype=dtype, device=device)
        self._total = torch.empty(numel, dtype=dtype, device=device)
        # By the number of a chunk, and of messages.
        self._work: dict[tuple[int, int], Work] = {}

    def encode(self, message: Tensor, own: Tensor | None, *, out: Tensor) -> None:
        for number, (chunk, content) in enumerate(zip(self.plan.chunks, out, strict=True)):
            self._exact(content, chunk).copy_(message[chunk.bypass : chunk.bypass + chunk.bypass_numel])
            if chunk.pieces:
                rounded = self._encode(message[_factors(chunk)], content, number, rounded=own is not None)
                if own is not None:
                    own[_factors(chunk)].copy_(rounded)

    def reduce(self, received: Tensor, own: Tensor | None, worker: int, *, out: Tensor) -> None:
        chunk = self.plan.chunks[worker]
        total = self._total[: _numel(chunk)]
        self._sum(received, worker, exact=self._exact(out, chunk), factors=total)
        if chunk.pieces:
            rounded = self._encode(total, out, worker, rounded=own is not None)
            if own is not None:
                own[_factors(chunk)].sub_(total.sub_(rounded))

    def decode(self, gathered: Tensor, *, out: Tensor) -> None:
        messages = gathered.view(-1, len(self.plan.chunks), gathered.shape[-1])
        for number, (chunk, contents) in enumerate(zip(self.plan.chunks, messages.unbind(1), strict=True)):
            exact = out[chunk.bypass : chunk.bypass + chunk.bypass_numel]
            self._sum(contents, number, exact=exact, factors=out[_factors(chunk)] if chunk.pieces else out[:0])

    def _sum(self, contents: Tensor, number: int, *, exact: Tensor, factors: Tensor) -> None:
        """Write the sums of the same chunk of several workers, in their order."""
        chunk = self.plan.chunks[number]
        _add_up((self._exact(content, chunk) for content in contents), out=exact)
        if chunk.pieces:
            some = contents.split(len(self._values))
            _add_up((part for contents in some for part in self._decode(contents, number)), out=factors)

    def _exact(self, content: Tensor, chunk: Chunk) -> Tensor:
        return content[: chunk.bypass_numel * self._dtype.itemsize].view(self._dtype)

    def _parts(self, contents: Tensor, number: int) -> tuple[Tensor, Tensor, Work]:
        """Return scales and codes of the bytes [messages, size] of a chunk, and the memory to work on."""
        chunk, width, key = self.plan.chunks[number], self.plan.width, (number, len(contents))
        if key not in self._work:
            self._work[key] = Work(self._runs[number], self._values[: len(contents), : _numel(chunk)], width)
        work, first, dtype = self._work[key], chunk.pieces[0], CODES[width.name]
        scales = contents[:, first.scale : first.code].view(torch.bfloat16)
        return scales, contents[:, first.code : first.code + work.codes * dtype.itemsize].view(dtype), work

    def _encode(self, A: Tensor, content: Tensor, number: int, *, rounded: bool) -> Tensor:
        """Write scales s = max|x| / levels of each block's columns, and codes round(x / s), for a chunk's factors.

        Rounding is to nearest, ties to even. A non-finite value makes its scale NaN, and with it the column. Where the
        scale is 0, codes are 0. If ``rounded``, return codes · scales, in memory that the next message overwrites.
        """
        width, (scales, codes, work) = self.plan.width, self._parts(content.unsqueeze(0), number)
        A, values = A.unsqueeze(0), work.values
        if width.scaled:
            torch.abs(A, out=values)
            scale = work.largest().div_(self._levels)
            # On other devices the host would have to wait to know.
            ordinary = scale.device.type == "cpu" and _ordinary(scale)
            if not ordinary:
                scale.masked_fill_(~scale.isfinite(), torch.nan)
            # Divide by the scales as they are stored, since the codes are multiplied by those.
            work.repeat(scales.copy_(scale))
            values.copy_(A)
            torch._foreach_div_(work.blocks, work.long)
            if not ordinary:
                # They are quotients by 0, or by NaN.
                values.nan_to_num_(0.0, 0.0, 0.0)
            if width.bits < 16:
                values.round_()
                if not ordinary:
                    values.clamp_(-width.levels, width.levels)
            A = values
        if width.bits == 4:
            work.pack(out=codes)
        else:
            codes.copy_(A)
        if not width.scaled:
            return codes[0]
        if rounded:
            if width.bits == 16:
                values.copy_(codes)
            torch._foreach_mul_(work.blocks, work.long)
        return values[0]

    def _decode(self, contents: Tensor, number: int) -> Tensor:
        """Return codes · scales [messages, entries] of a chunk, in memory that the next messages overwrite."""
        scales, codes, work = self._parts(contents, number)
        if not self.plan.width.scaled:
            return codes
        if self.plan.width.bits == 4:
            work.unpack(codes)
        else:
            work.values.copy_(codes)
        work.repeat(scales)
        torch._foreach_mul_(work.blocks, work.long)
        return work.values


def _factors(chunk: Chunk) -> slice:
    """Return where a chunk's factors lie in the message. Its pieces are adjacent."""
    first, last = chunk.pieces[0], chunk.pieces[-1]
    return slice(first.element, last.element + last.numel)


def _numel(chunk: Chunk) -> int:
    return sum(piece.numel for piece in chunk.pieces)


def _ordinary(scale: Tensor) -> bool:
    """Return whether all scales are finite and normal numbers of bf16. Then no code exceeds the levels."""
    smallest, largest = torch.aminmax(scale)
    return float(smallest) >= torch.finfo(torch.bfloat16).tiny and float(largest) < torch.inf


def _add_up(parts: Iterable[Tensor], *, out: Tensor) -> None:
    """Write 0 + the first part + the second one …, in this order."""
    for number, part in enumerate(parts):
        torch.add(out if number else part, part if number else 0.0, out=out)
