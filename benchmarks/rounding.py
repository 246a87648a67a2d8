"""Other ways of rounding factors on the wire, to be put in the place of what the package does."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import FORMATS, SCALE_BYTES, Piece, WirePlan

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way of writing a factor.

    Attributes:
        block: rows of a column that share a bf16 scale; None for all those that lie in one worker's part.
        stochastic: round up with the probability of the fraction that is cut off, instead of to nearest.
    """

    block: int | None
    stochastic: bool

    @property
    def record(self) -> Record:
        return {"block": self.block, "rounding": "stochastic" if self.stochastic else "nearest"}


def rounded(A: Tensor, levels: int, variant: Variant, generator: torch.Generator) -> Tensor:
    """What codes and scales of A [count, rows, rank] say; A is finite, in fp32 or fp64."""
    rows = A.shape[1]
    height = variant.block or rows
    blocks = torch.nn.functional.pad(A, (0, 0, 0, -rows % height)).unflatten(1, (-1, height))
    scales = (blocks.abs().amax(dim=2, keepdim=True) / levels).bfloat16().to(A.dtype)
    codes = torch.where(scales > 0, blocks / scales, 0)
    if variant.stochastic:
        codes = (codes + torch.rand(codes.shape, dtype=A.dtype, generator=generator)).floor_()
    else:
        codes = codes.round_()
    said: Tensor = codes.clamp_(-levels, levels).mul_(scales).flatten(1, 2)[:, :rows]
    return said


class VariantWire:
    """Stands in for ``TorchWire``: the same two roundings and their part in the error, with a variant's numbers.

    Args:
        variant: how to round.
        key: seeds the draws together with the step: the run's seed, the worker, and the wire's number in its process.
        plan: what the wire that this stands in for would have; of it the cuts are taken.
        dtype: of messages.
    """

    def __init__(self, variant: Variant, key: tuple[int, ...], plan: WirePlan, dtype: torch.dtype) -> None:
        self._variant, self._key, self._dtype = variant, key, dtype
        self._levels = plan.width.levels
        self._step = 0
        numels = [chunk.bypass_numel + sum(piece.numel for piece in chunk.pieces) for chunk in plan.chunks]
        self.plan = dataclasses.replace(plan, size=max(numels) * dtype.itemsize)

    def encode(self, message: Tensor, own: Tensor | None, *, out: Tensor) -> None:
        self._step += 1
        generator = self._generator("own")
        for chunk, content in zip(self.plan.chunks, out.view(self._dtype), strict=True):
            content[: chunk.bypass_numel] = message[chunk.bypass : chunk.bypass + chunk.bypass_numel]
            for piece, said in self._parts(chunk.pieces, chunk.bypass_numel, content):
                said.copy_(rounded(_part(message, piece), self._levels, self._variant, generator))
                if own is not None:
                    _part(own, piece).copy_(said)

    def reduce(self, received: Tensor, own: Tensor | None, worker: int, *, out: Tensor) -> None:
        generator, chunk = self._generator("sum"), self.plan.chunks[worker]
        content = out.view(self._dtype)
        content.zero_()
        for each in received.view(self._dtype):
            content += each
        for piece, said in self._parts(chunk.pieces, chunk.bypass_numel, content):
            total = said.clone()
            said.copy_(rounded(total, self._levels, self._variant, generator))
            if own is not None:
                _part(own, piece).sub_(total - said)

    def decode(self, gathered: Tensor, *, out: Tensor) -> None:
        for chunk, content in zip(self.plan.chunks, gathered.view(self._dtype), strict=True):
            out[chunk.bypass : chunk.bypass + chunk.bypass_numel] = content[: chunk.bypass_numel]
            for piece, said in self._parts(chunk.pieces, chunk.bypass_numel, content):
                _part(out, piece).copy_(said)

    def _generator(self, phase: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(repr((*self._key, self._step, phase)).encode()))

    def _parts(self, pieces: Sequence[Piece], start: int, content: Tensor) -> list[tuple[Piece, Tensor]]:
        ends = itertools.accumulate((piece.numel for piece in pieces), initial=start)
        views = [content[end : end + piece.numel] for piece, end in zip(pieces, ends, strict=False)]
        return [(p, view.view(p.count, p.rows, p.rank)) for p, view in zip(pieces, views, strict=True)]


def _part(factors: Tensor, piece: Piece) -> Tensor:
    return factors[piece.element : piece.element + piece.numel].view(piece.count, piece.rows, piece.rank)


def wires(variant: Variant, *key: int) -> Callable[[WirePlan, torch.dtype], VariantWire]:
    """What to call instead of ``TorchWire``."""
    number = itertools.count()
    return lambda plan, dtype: VariantWire(variant, (*key, next(number)), plan, dtype)


def payload(factors: Sequence[tuple[int, int, int]], width: str, block: int | None) -> Record:
    """Bytes of codes and scales of factors, (count, rows, rank) each."""
    bits, codes, scales = FORMATS[width].bits, 0, 0
    for count, rows, rank in factors:
        whole, rest = divmod(rows, block or rows)
        codes += count * rank * (whole * -(-(block or rows) * bits // 8) + -(-rest * bits // 8))
        scales += count * rank * SCALE_BYTES * (whole + (rest > 0)) * FORMATS[width].scaled
    return {"bytes": codes + scales, "scale_bytes": scales}
