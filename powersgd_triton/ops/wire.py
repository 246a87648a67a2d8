"""Messages with factors narrower than fp32, in plain torch: encoding, summing and decoding.

Each worker owns a part of a message. It receives this part from all workers, sums it in the message's dtype, rounds the
sum and sends it to all workers. The contribution of a worker is its factors after rounding. The part's owner subtracts
the rounding error of the sum from its own contribution. So the contributions of all workers add up to what arrives.
Both of two workers receive both messages as a whole instead, and add them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import BLOCK, Chunk, WireFormat, WirePlan

CODES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "int4": torch.int8}

ROW = 64
"""Entries of a row from which operations on rows take little longer than operations on flat tensors."""
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
    or all blocks of a run. Operations on short rows are slow, so several rows of a block count as one long row, with
    repeated scales.
    """

    def __init__(self, plan: WirePlan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self._dtype = dtype
        self._runs = [_runs(chunk, plan.width) for chunk in plan.chunks]
        # Not a number: torch on CUDA would multiply by its reciprocal, which has other bits.
        self._levels = torch.full((), plan.width.levels, dtype=dtype, device=device)
        # Scratch for the largest chunk, of several workers if it is small. (Without it, the CPU takes longer to get new
        # memory than for the operations on it.) If there is one chunk, two workers exchange it.
        numel = max((_numel(chunk) for chunk in plan.chunks), default=0)
        several = max(1, min(max(2, len(plan.chunks)), TOGETHER // max(1, numel * dtype.itemsize)))
        self._total = torch.empty(numel, dtype=dtype, device=device)
        self._decoded = torch.empty(several, numel, dtype=dtype, device=device)
        self._codes = torch.empty(several, numel if plan.width.bits == 4 else 0, dtype=torch.int8, device=device)

    def encode(self, message: Tensor, own: Tensor | None, *, out: Tensor) -> None:
        for chunk, runs, content in zip(self.plan.chunks, self._runs, out, strict=True):
            self._exact(content, chunk).copy_(message[chunk.bypass : chunk.bypass + chunk.bypass_numel])
            if runs:
                factors = _factors(chunk)
                self._encode(message[factors], runs, content, chunk, own=None if own is None else own[factors])

    def reduce(self, received: Tensor, own: Tensor | None, worker: int, *, out: Tensor) -> None:
        chunk, runs = self.plan.chunks[worker], self._runs[worker]
        total = self._total[: _numel(chunk)]
        self._sum(received, runs, chunk, exact=self._exact(out, chunk), factors=total)
        if not runs:
            return
        rounded = None if own is None else self._decoded[0, : len(total)]
        self._encode(total, runs, out, chunk, own=rounded)
        if own is not None and rounded is not None:
            own[_factors(chunk)].sub_(total.sub_(rounded))

    def decode(self, gathered: Tensor, *, out: Tensor) -> None:
        chunks = self.plan.chunks
        messages = gathered.view(-1, len(chunks), gathered.shape[-1])
        for chunk, runs, contents in zip(chunks, self._runs, messages.unbind(1), strict=True):
            exact = out[chunk.bypass : chunk.bypass + chunk.bypass_numel]
            factors = out[_factors(chunk)] if runs else out[:0]
            if len(contents) > 1:
                self._sum(contents, runs, chunk, exact=exact, factors=factors)
                continue
            exact.copy_(self._exact(contents[0], chunk))
            if runs:
                self._decode(contents[0], runs, chunk, out=factors)

    def _sum(self, contents: Tensor, runs: Sequence[Run], chunk: Chunk, *, exact: Tensor, factors: Tensor) -> None:
        """Write the sums of the same chunk of several workers, in their order."""
        exact.zero_()
        for content in contents:
            exact += self._exact(content, chunk)
        factors.zero_()
        for some in contents.split(len(self._decoded)) if runs else ():
            decoded = self._decoded[: len(some), : len(factors)]
            self._decode(some, runs, chunk, out=decoded)
            for part in decoded:
                factors += part

    def _exact(self, content: Tensor, chunk: Chunk) -> Tensor:
        return content[: chunk.bypass_numel * self._dtype.itemsize].view(self._dtype)

    def _parts(self, content: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return scales and codes of the bytes of a chunk, or of the same chunk of several workers."""
        scales, codes, dtype = chunk.pieces[0].scale, chunk.pieces[0].code, CODES[self.plan.width.name]
        # With 4 bits there are fewer codes than this. What lies behind them is not used.
        end = codes + _numel(chunk) * dtype.itemsize
        return content[..., scales:codes].view(torch.bfloat16), content[..., codes:end].view(dtype)

    def _encode(self, A: Tensor, runs: Sequence[Run], content: Tensor, chunk: Chunk, *, own: Tensor | None) -> None:
        """Write scales s = max|x| / levels of each block's columns, and codes round(x / s). own ← codes · scales.

        Rounding is to nearest, ties to even. A non-finite value makes its scale NaN, and with it the column. Where the
        scale is 0, codes are 0. ``A`` and ``own``, which may be scratch, are the chunk's factors, flat.
        """
        width, (scales, codes) = self.plan.width, self._parts(content, chunk)
        divisors: list[Tensor] = []
        if width.scaled:
            quotient = torch.abs(A, out=self._decoded[0, : len(A)])
            scale = torch.empty(scales.shape, dtype=self._dtype, device=scales.device)
            for run in runs:
                _write_largest(run.entries.of(quotient), run.scales.of(scale))
            scale.div_(self._levels)
            # On other devices the host would have to wait to know.
            ordinary = scale.device.type == "cpu" and _ordinary(scale)
            if not ordinary:
                scale = torch.where(scale.isfinite(), scale, torch.nan)
            # Divide by the scales as they are stored, since the codes are multiplied by those.
            divisors = _repeated(runs, scale.copy_(scales.copy_(scale)))
            for run, divisor in zip(runs, divisors, strict=True):
                block = run.entries.of(quotient)
                torch.div(run.entries.of(A), divisor, out=block)
                if not ordinary:
                    block.copy_(torch.where(divisor > 0, block, 0))
            A = quotient
            if width.bits < 16:
                A.round_()
                if not ordinary:
                    A.clamp_(-width.levels, width.levels)
        if width.bits == 4:
            A = self._codes[0, : len(A)].copy_(A)
            for run in runs:
                low, high, packed = run.low.of(A), run.high.of(A), run.codes.of(codes)
                packed.copy_(low).bitwise_and_(15)
                packed[..., : high.shape[-1]].add_(high, alpha=16)
        else:
            A = codes.copy_(A)
        if own is not None:
            own.copy_(A)
            for run, divisor in zip(runs, divisors, strict=False):
                run.entries.of(own).mul_(divisor)

    def _decode(self, content: Tensor, runs: Sequence[Run], chunk: Chunk, *, out: Tensor) -> None:
        """out ← codes · scales, for the factors of a chunk of one worker or of several: the inverse of encoding."""
        scales, codes = self._parts(content, chunk)
        if self.plan.width.bits == 4:
            whole = self._codes[: len(out), : out.shape[1]] if out.dim() == 2 else self._codes[0, : len(out)]
            for run in runs:
                low, high, packed = run.low.of(whole), run.high.of(whole), run.codes.of(codes)
                # Shifts of signed integers restore the signs.
                torch.bitwise_left_shift(packed, 4, out=low)
                torch.bitwise_right_shift(packed[..., : high.shape[-1]], 4, out=high)
                low.bitwise_right_shift_(4)
            codes = whole
        out.copy_(codes)
        if self.plan.width.scaled:
            for run, factor in zip(runs, _repeated(runs, scales.to(out.dtype)), strict=True):
                run.entries.of(out).mul_(factor)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a part of a flat tensor lies, or the same part of each row of a matrix, in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """Return the part as a view, [*shape] or [rows, *shape]."""
        offset = flat.storage_offset() + self.offset
        return flat.as_strided((*flat.shape[:-1], *self.shape), (*flat.stride()[:-1], *self.strides), offset)


@dataclasses.dataclass(frozen=True)
class Run:
    """Blocks of equal height of matrices at equal distances, and their places in a chunk's entries, scales and codes.

    Attributes:
        entries: [count, blocks, long rows, entries of a long row].
        low, high: Halves of each block's entries, [count, blocks, entries]. The second may be a row shorter.
        scales, repeated: [count, blocks, rank], and for a long row [count, blocks, rows in a long row, rank].
        codes: [count, blocks, codes]. Two 4-bit codes are one.
    """

    entries: Place
    low: Place
    high: Place
    scales: Place
    repeated: Place
    codes: Place


def _factors(chunk: Chunk) -> slice:
    """Return where a chunk's factors lie in the message. Its pieces are adjacent."""
    first, last = chunk.pieces[0], chunk.pieces[-1]
    return slice(first.element, last.element + last.numel)


def _numel(chunk: Chunk) -> int:
    return sum(piece.numel for piece in chunk.pieces)


def _runs(chunk: Chunk, width: WireFormat) -> list[Run]:
    """Divide the pieces of a chunk into as few runs as possible."""

    def sizes(height: int, rank: int) -> list[int]:
        """Return the numbers of entries, scales and codes of a block."""
        codes = width.code_bytes(height, rank) if width.bits == 4 else height * rank
        return [height * rank, rank, codes] if height else [0, 0, 0]

    def behind(start: list[int], count: int, each: list[int]) -> list[int]:
        return [x + count * size for x, size in zip(start, each, strict=True)]

    # (count, blocks, height, rank, first entry, scale and code, distances between matrices in each of them)
    found: list[tuple[int, int, int, int, list[int], list[int]]] = []
    start = [0, 0, 0]
    for piece in chunk.pieces:
        whole, rest = divmod(piece.rows, BLOCK)
        full = sizes(BLOCK, piece.rank)
        matrix = behind(sizes(rest, piece.rank), whole, full)
        for first, blocks, height in ((0, whole, BLOCK), (whole, 1, rest)):
            if not (blocks and height):
                continue
            places, count = behind(start, first, full), piece.count
            if not (whole and rest):
                # The blocks of all matrices are adjacent.
                count, blocks = 1, count * blocks
            if found and count == found[-1][0] == 1 and found[-1][2:4] == (height, piece.rank):
                _, before, _, _, begin, _ = found[-1]
                if places == behind(begin, before, sizes(height, piece.rank)):
                    found[-1] = (1, before + blocks, height, piece.rank, begin, matrix)
                    continue
            found.append((count, blocks, height, piece.rank, places, matrix))
        start = behind(start, piece.count, matrix)
    runs = []
    for count, blocks, height, rank, places, matrix in found:
        joined = 1
        while joined * rank < ROW and height % (2 * joined) == 0:
            joined *= 2
        (entry, scale, code), (next_entry, next_scale, next_code) = places, matrix
        size, _, codes = sizes(height, rank)
        half = -(-height // 2) * rank
        run = Run(
            Place(entry, (count, blocks, height // joined, joined * rank), (next_entry, size, joined * rank, 1)),
            Place(entry, (count, blocks, half), (next_entry, size, 1)),
            Place(entry + half, (count, blocks, size - half), (next_entry, size, 1)),
            Place(scale, (count, blocks, rank), (next_scale, rank, 1)),
            Place(scale, (count, blocks, joined, rank), (next_scale, rank, 0, 1)),
            Place(code, (count, blocks, codes), (next_code, codes, 1)),
        )
        runs.append(run)
    return runs


def _write_largest(sizes: Tensor, out: Tensor) -> None:
    """out ← the largest |x| of each block's columns, [count, blocks, rank]."""
    largest = sizes.amax(dim=2)
    while largest.shape[2] > out.shape[2]:
        # A long row has a power of two of rows.
        half = largest.shape[2] // 2
        largest = torch.maximum(largest[:, :, :half], largest[:, :, half:])
    out.copy_(largest)


def _ordinary(scale: Tensor) -> bool:
    """Return whether all scales are finite and normal numbers of bf16. Then no code exceeds the levels."""
    smallest, largest = torch.aminmax(scale)
    return float(smallest) >= torch.finfo(torch.bfloat16).tiny and float(largest) < torch.inf


def _repeated(runs: Sequence[Run], scales: Tensor) -> list[Tensor]:
    """Return the scales of each run, repeated for long rows, [..., count, blocks, 1, entries of a long row]."""
    places = [run.repeated.of(scales) for run in runs]
    return [place.reshape(*place.shape[:-2], 1, -1) for place in places]
