"""Messages with factors narrower than fp32: encoding, summing and decoding.

Each worker owns a part of a message. It receives this part from all workers, sums it in the message's dtype, rounds the
sum and sends it to all workers. The contribution of a worker is its factors after rounding. The part's owner subtracts
the rounding error of the sum from its own contribution. So the contributions of all workers add up to what arrives.
Both of two workers receive both messages as a whole instead, and add them.
"""

from typing import Protocol

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import Chunk, WirePlan
from powersgd_triton.ops.factors import FactorCodec


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
    """The reference implementation of ``Wire``, for messages in fp32 or fp64. Bypass tensors are sent in this dtype."""

    def __init__(self, plan: WirePlan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self._codecs = [FactorCodec(chunk, plan.width) for chunk in plan.chunks]
        # The CPU takes longer to get new memory than for the operations on it.
        numel = max((codec.numel for codec in self._codecs), default=0)
        self._total, self._rounded = torch.empty(2, numel, dtype=dtype, device=device)

    def encode(self, message: Tensor, own: Tensor | None, *, out: Tensor) -> None:
        for chunk, codec, content in zip(self.plan.chunks, self._codecs, out, strict=True):
            self._exact(content, chunk).copy_(message[chunk.bypass : chunk.bypass + chunk.bypass_numel])
            codec.encode(message[codec.place], content=content, rounded=None if own is None else own[codec.place])

    def reduce(self, received: Tensor, own: Tensor | None, worker: int, *, out: Tensor) -> None:
        chunk, codec = self.plan.chunks[worker], self._codecs[worker]
        total, rounded = self._total[: codec.numel], self._rounded[: codec.numel]
        self._sum_exact(received, chunk, out=self._exact(out, chunk))
        codec.sum(received, out=total)
        codec.encode(total, content=out, rounded=None if own is None else rounded)
        if own is not None:
            own[codec.place].sub_(total.sub_(rounded))

    def decode(self, gathered: Tensor, *, out: Tensor) -> None:
        messages = gathered.view(-1, len(self.plan.chunks), gathered.shape[-1])
        for chunk, codec, contents in zip(self.plan.chunks, self._codecs, messages.unbind(1), strict=True):
            self._sum_exact(contents, chunk, out=out[chunk.bypass : chunk.bypass + chunk.bypass_numel])
            codec.sum(contents, out=out[codec.place])

    def _sum_exact(self, contents: Tensor, chunk: Chunk, *, out: Tensor) -> None:
        """Write 0 + the exact elements of the first worker + those of the second one …, in this order."""
        out.zero_()
        for content in contents:
            out += self._exact(content, chunk)

    def _exact(self, content: Tensor, chunk: Chunk) -> Tensor:
        return content[: chunk.bypass_numel * self._total.itemsize].view(self._total.dtype)
