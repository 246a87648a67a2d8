"""The sparse format of whole tensors: the largest elements of each chunk, as their signs and places. Integers only."""

import dataclasses
import functools

from powersgd_triton.layout.wire_format import ALIGNMENT, SCALE_BYTES

CHUNK = 4096
"""Number of consecutive elements that share a scale, and of which as many are sent."""


@dataclasses.dataclass(frozen=True)
class SparseFormat:
    """Of each chunk, ``kept`` elements of one magnitude, the chunk's scale. ``kept`` is a multiple of 8.

    In the order of their places, an element's place is written in two parts (Elias 1974, Fano 1971): its ``low`` lowest
    bits, and the number that is left of it, in unary. Bit (place >> low) + i of the unary bits is 1 for element i.
    A message is [scales | chunks], and a chunk [low planes of bits | plane of signs | unary bits].
    """

    kept: int
    name = "sparse"
    unit = CHUNK
    stochastic = False

    @classmethod
    @functools.cache
    def of(cls, compression: float) -> "SparseFormat":
        """Return the format that sends as many elements as fit into so many times fewer bytes than fp32."""
        most = 4 * CHUNK / compression
        return next(found for k in range(CHUNK // 2, 0, -8) if (found := cls(k)).bytes_each * CHUNK <= most or k == 8)

    @property
    def low(self) -> int:
        """Bits of a place that are written as they are."""
        return (CHUNK // self.kept).bit_length() - 1

    @property
    def unary(self) -> int:
        """Bits of the other parts of a chunk's places."""
        return (CHUNK >> self.low) + self.kept

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk without its scale."""
        return ((self.low + 1) * self.kept + self.unary) // 8

    @property
    def bytes_each(self) -> float:
        """Bytes of an element, on average."""
        return (self.chunk_bytes + SCALE_BYTES) / CHUNK

    def checked_bytes(self, numel: int) -> int:
        return SCALE_BYTES * -(-numel // CHUNK)

    def difference_bytes(self, numel: int) -> tuple[int, int]:
        chunks = -(-numel // CHUNK)
        codes = -(-SCALE_BYTES * chunks // ALIGNMENT) * ALIGNMENT
        return codes, codes + -(-chunks * self.chunk_bytes // ALIGNMENT) * ALIGNMENT
