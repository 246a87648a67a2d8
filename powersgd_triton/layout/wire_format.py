"""The formats of factors and of differences in messages, and which worker sums which part. Integers only."""

import dataclasses
import functools
import math
from collections.abc import Sequence

Factors = Sequence[tuple[int, int, int]]
"""(number, rows, rank) of adjacent matrices."""
BLOCK = 128
"""Number of consecutive entries of a factor's column that share a scale."""
SCALE_BYTES = 2
ALIGNMENT = 16
"""Bytes of the widest memory access."""
LARGE_CHUNK = 4096
"""Bytes from which the size of a chunk is a multiple of 16."""
TERNARY_ZERO = 0.7
"""Share of a block's mean magnitude up to which a ternary code is 0."""
LARGEST_BF16 = (2 - 2.0**-7) * 2.0**127
LARGEST_FP32 = (2 - 2.0**-23) * 2.0**127


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """A width of factors, or of differences, in messages.

    Attributes:
        bits: Bits of an entry, or of as many entries as ``blocks`` says.
        scaled: Whether each 128 entries of a column share a scale. It is bf16, since in fp16 scales of columns below
            1e-6 would have few bits or be zero.
        levels: Largest magnitude of a block in units of its scale.
        blocks: Number of blocks that share their bytes: each byte holds a ternary code of each of them.
        mantissa: Bits of the mantissa, if the codes of whole tensors are floating-point numbers.
    """

    name: str
    bits: int
    scaled: bool
    levels: int = 1
    blocks: int = 1
    mantissa: int = 0

    @property
    def ternary(self) -> bool:
        """Whether the codes are −1, 0 and 1. Only these share their bytes with those of other blocks."""
        return self.blocks > 1

    @property
    def stochastic(self) -> bool:
        """Whether whole tensors can be rounded so that the mean is exact. Fewer bits have too few numbers."""
        return self.bits > 2 and not self.ternary

    @property
    def largest_scale(self) -> float:
        """The largest bf16 number whose product with the levels is finite in fp32."""
        mantissa, exponent = math.frexp(LARGEST_FP32 / self.levels)
        return math.ldexp(math.floor(mantissa * 256) / 256, exponent)

    @property
    def numbers(self) -> int:
        """Number of different codes."""
        return 3 if self.ternary else 2**self.bits

    @property
    def together(self) -> int:
        """Number of codes in a byte. The first one is its lowest digit to base ``numbers``."""
        return self.blocks * max(1, 8 // self.bits)

    @property
    def unit(self) -> int:
        """Elements of a whole tensor whose blocks share bytes."""
        return BLOCK * self.blocks

    @property
    def bytes_each(self) -> float:
        """Bytes of an element of a whole tensor, on average."""
        return self.bits / (8 * self.blocks) + (SCALE_BYTES / BLOCK if self.scaled else 0)

    def code_bytes(self, rows: int, rank: int) -> int:
        """Return the bytes of the codes of at most 128 rows. Two 4-bit codes of a column share a byte."""
        return -(-rows // 2) * rank if self.bits == 4 else rows * rank * self.bits // 8

    def factor_bytes(self, rows: int, rank: int) -> int:
        """Return the bytes of a factor [rows, rank] with its scales."""
        whole, rest = divmod(rows, BLOCK)
        codes = whole * self.code_bytes(BLOCK, rank) + self.code_bytes(rest, rank)
        return codes + (SCALE_BYTES * rank * -(-rows // BLOCK) if self.scaled else 0)

    def rows_in(self, size: int, rank: int) -> int:
        """Return the most rows of a factor whose codes and scales fit in ``size`` bytes, an even number for 4 bits."""
        scales = SCALE_BYTES * rank if self.scaled else 0
        step = 2 if self.bits == 4 else 1
        whole, rest = divmod(size, self.factor_bytes(BLOCK, rank))
        return whole * BLOCK + max(0, rest - scales) // self.code_bytes(step, rank) * step

    def difference_blocks(self, numel: int) -> int:
        """Return the number of blocks of a flat tensor, with those that fill up the last bytes."""
        return -(-numel // (BLOCK * self.blocks)) * self.blocks

    def checked_bytes(self, numel: int) -> int:
        """Return the first bytes of a message, bf16, of which some are not finite if some elements are not."""
        return SCALE_BYTES * self.difference_blocks(numel) if self.scaled else self.difference_bytes(numel)[1]

    def difference_bytes(self, numel: int) -> tuple[int, int]:
        """Return (offset of the codes, bytes) of a flat tensor's differences: [scales | codes], in whole blocks."""
        blocks = self.difference_blocks(numel)
        codes = -(-SCALE_BYTES * blocks // ALIGNMENT) * ALIGNMENT if self.scaled else 0
        return codes, codes + -(-blocks // self.blocks * BLOCK * self.bits // 8 // ALIGNMENT) * ALIGNMENT


FORMATS = {
    "float32": WireFormat("float32", 32, False),
    "bfloat16": WireFormat("bfloat16", 16, False),
    # 2 levels: with 1, the scale of the largest fp32 value would round to infinity in bf16.
    "float16": WireFormat("float16", 16, True, 2),
    "int8": WireFormat("int8", 8, True, 127),
    "int4": WireFormat("int4", 4, True, 7),
}
"""Formats of factors."""

DIFFERENCES = {
    "int8": FORMATS["int8"],
    "int4": FORMATS["int4"],
    # Codes −3, −1, 1 and 3, which with 4 levels are the middles of four equal parts of [−largest, largest]. There is no
    # code 0: −1, 0 and 1 follow a parameter worse.
    "int2": WireFormat("int2", 2, True, 4),
    # Codes −1, 0 and 1. 3⁵ = 243, so a byte holds five.
    "ternary": WireFormat("ternary", 8, True, 1, blocks=5),
}
"""Formats of differences from a copy. Factors need more than 2 bits."""

QUANTIZED = {
    # 448 is the largest number of E4M3.
    "fp8": WireFormat("fp8", 8, True, 448, mantissa=3),
    "bf16": WireFormat("bf16", 16, False, mantissa=7),
    **DIFFERENCES,
}
"""Formats of whole tensors."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Factors [count, rows, rank] of whole matrices, or of some rows of one. Blocks count from the first row.

    Attributes:
        element: Offset in the message, in elements.
        scale, code: Offsets of its bf16 scales [count, ⌈rows / 128⌉, rank] and of its codes in the chunk, in bytes.
    """

    count: int
    rows: int
    rank: int
    element: int
    scale: int
    code: int

    @property
    def numel(self) -> int:
        return self.count * self.rows * self.rank


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one worker sums: elements [bypass, bypass + bypass_numel) and pieces. Bytes: [exact | scales | codes]."""

    bypass: int
    bypass_numel: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class WirePlan:
    """The bytes of a message: one chunk per worker, each of ``size`` bytes."""

    width: WireFormat
    chunks: tuple[Chunk, ...]
    size: int

    @classmethod
    def build(cls, width: WireFormat, factors: Factors, bypass_numel: int, itemsize: int, workers: int) -> "WirePlan":
        """Divide a message [factors | exact elements] among the workers, in chunks of the smallest possible size.

        A chunk may end at any row of a matrix. A block of 128 rows that is cut has scales on either side of the cut.
        """
        total = sum(count * width.factor_bytes(rows, rank) for count, rows, rank in factors) + itemsize * bypass_numel
        mean = -(-total // workers)
        # Wide accesses to the bytes need alignment. In a small chunk it would be a large share of the bytes.
        unit = ALIGNMENT if mean >= LARGE_CHUNK else itemsize
        divided = functools.partial(_divide, width, factors, bypass_numel, itemsize, workers)
        # The smallest size is a little above the mean, since a cut adds scales.
        least, step = -(-mean // unit) - 1, 1
        while (chunks := divided((least + step) * unit)) is None:
            least, step = least + step, 2 * step
        most = least + step
        while most - least > 1:
            middle = (least + most) // 2
            found = divided(middle * unit)
            least, most, chunks = (middle, most, chunks) if found is None else (least, middle, found)
        return cls(width, tuple(_placed(width, chunk, itemsize) for chunk in chunks), most * unit)

    def part(self, index: int, parts: int) -> "WirePlan":
        """Return the plan of one of several equal numbers of consecutive chunks."""
        each = len(self.chunks) // parts
        return dataclasses.replace(self, chunks=self.chunks[index * each : (index + 1) * each])


def _divide(
    width: WireFormat, factors: Factors, bypass_numel: int, itemsize: int, workers: int, size: int
) -> list[Chunk] | None:
    """Fill chunks of ``size`` bytes one after the other, not yet ``_placed``. None if ``workers`` do not suffice."""
    shapes, done, row, element = iter(factors), 0, 0, 0
    shape = next(shapes, None)
    start, exact = sum(count * rows * rank for count, rows, rank in factors), 0
    chunks = list[Chunk]()
    for _ in range(workers):
        space, pieces = size, list[Piece]()
        while shape is not None:
            count, rows, rank = shape
            whole = 0 if row else min(count - done, space // width.factor_bytes(rows, rank))
            height = rows if whole else min(rows - row, width.rows_in(space, rank))
            if not height:
                break
            pieces.append(Piece(max(whole, 1), height, rank, element, 0, 0))
            element += pieces[-1].numel
            space -= max(whole, 1) * width.factor_bytes(height, rank)
            if whole or row + height == rows:
                done, row = done + max(whole, 1), 0
            else:
                row += height
            if done == count:
                shape, done = next(shapes, None), 0
        # Exact elements follow when all factors have a place.
        numel = min(bypass_numel - exact, space // itemsize) if shape is None else 0
        chunks.append(Chunk(start + exact, numel, tuple(pieces)))
        exact += numel
    return chunks if shape is None and exact == bypass_numel else None


def _placed(width: WireFormat, chunk: Chunk, itemsize: int) -> Chunk:
    """Return a chunk whose pieces have their places in its bytes."""
    scale = chunk.bypass_numel * itemsize
    scales = [SCALE_BYTES * p.count * -(-p.rows // BLOCK) * p.rank if width.scaled else 0 for p in chunk.pieces]
    code, placed = scale + sum(scales), list[Piece]()
    for piece, size in zip(chunk.pieces, scales, strict=True):
        placed.append(dataclasses.replace(piece, scale=scale, code=code))
        scale += size
        code += piece.count * width.factor_bytes(piece.rows, piece.rank) - size
    return dataclasses.replace(chunk, pieces=tuple(placed))
