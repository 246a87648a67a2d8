"""Messages of ``rivals``: sparse tensors and floats of 4 bits, packed to the bit."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

LEVELS = 7
"""Magnitudes of a float of 4 bits besides zero."""


@dataclasses.dataclass(frozen=True)
class TopK:
    """A message with the k largest of each chunk's n entries.

    The indices are sorted, and sent in Elias–Fano code: 1 bit of the index space in 2ˡ, and l + 1 bits an index, with
    2ˡ ≤ n / k. This is less than one bit an index above the least that is possible for n = 4096 and k of 8 to 512.

    Attributes:
        n, k: Entries of a chunk, and how many of them are sent.
        two_bits: For each value, send a sign and which of two magnitudes, which each chunk has in bf16. If not, send
            each value in bf16.
    """

    n: int
    k: int
    two_bits: bool

    @property
    def low(self) -> int:
        return int(math.log2(self.n / self.k))

    def encode(self, chunks: Tensor) -> Tensor:
        """chunks [C, n] → message."""
        indices = chunks.abs().topk(self.k).indices.sort(dim=1).values
        values = chunks.gather(1, indices)
        high = torch.zeros(len(chunks), self._high_bits, dtype=torch.bool)
        high.scatter_(1, (indices >> self.low) + torch.arange(self.k), True)
        bits = [high, bits_of(indices & ((1 << self.low) - 1), self.low).flatten(1)]
        if self.two_bits:
            magnitude = values.abs()
            large = magnitude > magnitude.mean(1, keepdim=True)
            bits += [values < 0, large]
            values = torch.stack([_mean_where(magnitude, ~large), _mean_where(magnitude, large)], 1)
        return torch.cat([pack(torch.cat(bits, 1)), _raw(values)])

    def decode(self, message: Tensor, chunks: int) -> Tensor:
        """Message → chunks [C, n], zero where nothing was sent."""
        high_bits, low_bits = self._high_bits, self.k * self.low
        width = high_bits + low_bits + 2 * self.k * self.two_bits
        size = -(-chunks * width // 8)
        bits = unpack(message[:size], (chunks, width))
        values = _from_raw(message[size:], (chunks, 2 if self.two_bits else self.k))
        high = bits[:, :high_bits].nonzero()[:, 1].view(chunks, self.k) - torch.arange(self.k)
        low = number(bits[:, high_bits : high_bits + low_bits].view(chunks, self.k, self.low))
        if self.two_bits:
            negative, large = bits[:, high_bits + low_bits :].split(self.k, dim=1)
            magnitude = torch.where(large, values[:, 1:], values[:, :1])
            values = torch.where(negative, -magnitude, magnitude)
        return torch.zeros(chunks, self.n).scatter_(1, (high << self.low) + low, values)

    @property
    def _high_bits(self) -> int:
        return (self.n >> self.low) + self.k


def float_codes(blocks: Tensor) -> Tensor:
    """Encode ±scale · 2⁻ʲ, j from 0 to 6, and zero. The scale is a block's largest magnitude in bf16."""
    scale = blocks.abs().amax(1, keepdim=True).bfloat16()
    exponent = torch.log2(scale.float() / blocks.abs().clamp_min(1e-30)).round().clamp(0, LEVELS)
    return torch.cat([pack(torch.cat([bits_of(LEVELS - exponent.long(), 3), bits_of(blocks < 0, 1)], -1)), _raw(scale)])


def from_float_codes(message: Tensor, shape: torch.Size) -> Tensor:
    blocks, size = shape
    codes, scale = message[: blocks * size // 2], message[blocks * size // 2 :]
    bits = unpack(codes, (blocks, size, 4))
    level, negative = number(bits[..., :3]), bits[..., 3]
    magnitude = torch.where(level > 0, torch.exp2(level.float() - LEVELS), 0.0) * _from_raw(scale, (blocks, 1))
    return torch.where(negative, -magnitude, magnitude)


def bits_of(numbers: Tensor, width: int) -> Tensor:
    """The lowest ``width`` bits of each number, in a new last dimension."""
    return (numbers.long()[..., None] >> torch.arange(width) & 1).bool()


def number(bits: Tensor) -> Tensor:
    """Undo ``bits_of``."""
    return (bits.long() << torch.arange(bits.shape[-1])).sum(-1)


def pack(bits: Tensor) -> Tensor:
    """Bits → bytes."""
    flat = bits.reshape(-1)
    octets = nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return number(octets).to(torch.uint8)


def unpack(octets: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo ``pack``."""
    return bits_of(octets, 8).view(-1)[: math.prod(shape)].view(*shape)


def _raw(values: Tensor) -> Tensor:
    """Return the values in bf16 as bytes."""
    return values.bfloat16().contiguous().view(torch.uint8).view(-1)


def _from_raw(octets: Tensor, shape: Sequence[int]) -> Tensor:
    # A copy, since a part of a message may begin at an odd address.
    return octets.clone().view(torch.bfloat16).float().view(*shape)


def _mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    return (values * chosen).sum(1) / chosen.sum(1).clamp_min(1)
