"""What codecs of flat tensors are given. Those in torch, in C and in Triton take the same, and write the same bits."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Encoding(NamedTuple):
    """Differences target − base, of which scales and codes are written to ``out``.

    Attributes:
        target: [numel], fp32 or narrower.
        base: [numel] of any float dtype. None for zeros.
        width: The ``WireFormat`` or ``SparseFormat``.
        out: uint8 [bytes], as many as ``width.difference_bytes`` says. With ``each``, uint8 [parts, bytes].
        subtract: Whether target ← target − what the codes stand for.
        each: Elements of a message. The last one may have fewer, and its other bytes stay as they are. None for all.
        seed: Makes rounding stochastic in formats that can, below 2³². None rounds to nearest.
        terms: Two tensors, as long as the target and of any float dtype. If given, target ← their sum comes first.
    """

    target: Tensor
    base: Tensor | None
    width: Any
    out: Tensor
    subtract: bool = False
    each: int | None = None
    seed: int | None = None
    terms: Sequence[Tensor] | None = None

    def messages(self) -> Iterable[tuple[Tensor, Tensor | None, Tensor]]:
        """Add the terms. Return (target, base, bytes) of each message."""
        if self.terms is not None:
            torch.add(*self.terms, out=self.target)
        each, bases = self.each or max(1, len(self.target)), itertools.repeat(None)
        out = self.out if self.each else self.out[None]
        return zip(self.target.split(each), bases if self.base is None else self.base.split(each), out, strict=False)


class Decoding(NamedTuple):
    """Messages that are added to the rows of ``base``: base ← base + codes · (scales · weight).

    Attributes:
        content: uint8 [copies, bytes], what was encoded for each row. Weight −1 takes it back.
        base: [copies, numel] of any float dtype. Its rows may be the same memory (``expand``): then all messages are
            added to it, in their order.
        each: Elements of a message, of which the rows may have fewer.
        fresh: Whether what ``base`` contains counts as 0.
    """

    content: Tensor
    width: Any
    base: Tensor
    weight: float = 1.0
    each: int | None = None
    fresh: bool = False

    def rows(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return (row, its messages [messages, bytes]) of different memory."""
        if len(self.base) > 1 and self.base.stride(0) == 0:
            return [(self.base[0], self.content)]
        return zip(self.base, self.content.unsqueeze(1), strict=True)
