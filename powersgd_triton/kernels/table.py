"""Tables of integers from which the kernels' programs learn which part of which matrix is theirs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

MAX_COLUMNS = 2**24
"""Offsets within a tile are 32-bit; a tile has up to 128 rows. Everything else is addressed with 64 bits."""

MAX_RANK = 256
COPY_BLOCK = 1024
"""Elements of a message that one program packs."""

ROLLBACK_BLOCK = 1 << 16
"""Elements of an error buffer that one program looks after when a step is taken back."""

PROGRAMS = 1024
"""About so many programs keep the largest GPUs busy; more than that, and sums are split for nothing."""

MIN_PART = 256
"""A sum is not split into parts of fewer elements."""

MAX_CHUNKS = 32
CHUNK_ROWS = 256
DEAD_COLUMN = 2.0**-22
"""As in the reference."""
VECTOR = 8
"""Elements of the widest memory access, of 16 bits each."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One n × m matrix of rank r; its factors start at these elements of all P, all Q; key: for random directions."""

    n: int
    m: int
    r: int
    p_offset: int
    q_offset: int
    key: int


@dataclasses.dataclass(frozen=True)
class FactorTable:
    """The factors on one side, for orthogonalization.

    Attributes:
        records: int64 [B, 6]: rows, r, offset, key, first chunk, number of chunks.
        chunks: int32 [number, 3]: matrix, first row, end row.
    """

    records: Tensor
    chunks: Tensor


class BucketTable:
    """A bucket's matrices and bypass tensors, in the order in which pointers to them are given.

    Args:
        matrices: the compressed matrices.
        bypass: for each tensor that is not compressed (elements, offset in the message of P, in that of Q).
        row_tile, column_tile: rows and columns of one tile in ``row_tiles`` and ``column_tiles``, powers of two.
        device: where the tables live.
        any_rank: take the kernels that are compiled for no rank in particular, also where all matrices have the same.

    Attributes:
        records: int64 [B, 7]: n, m, r, offset of P, offset of Q, offset of P's parts, offset of Q's parts.
        row_tiles: int32 [programs, 5]: matrix, first row, first column, end column, split. A block of rows each.
        column_tiles: int32 [programs, 5]: matrix, first column, first row, end row, split. A block of columns each.
        pack_P, pack_Q, pack_left: int64 [programs, 6], what one program copies into a message: source, distance of the
            parts, their number (0: a bypass tensor), target, elements, tensor. Bypass tensors come first, in pack_P
            and pack_Q for the message of P, in pack_left for that of Q.
        rollback: int64 [programs, 3]: matrix, first element, end element.
        P, Q: tables of the factors.

    Raises:
        ValueError: a matrix is beyond what the kernels can address.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        bypass: Sequence[tuple[int, int, int]],
        row_tile: tuple[int, int],
        column_tile: tuple[int, int],
        device: torch.device,
        any_rank: bool = False,
    ) -> None:
        for matrix in matrices:
            _check(matrix)
        (rows, width_block), (height_block, columns) = row_tile, column_tile
        self.matrices, self.bypass, self.device = tuple(matrices), tuple(bypass), device
        self.rank = max((matrix.r for matrix in matrices), default=0)
        self.uniform_rank = 0 if any_rank or any(matrix.r != self.rank for matrix in matrices) else self.rank
        self._pointers: dict[tuple[int, ...], Pointers] = {}
        self._anchors: dict[torch.dtype, Tensor] = {}

        area = sum(matrix.n * matrix.m for matrix in matrices) // PROGRAMS
        widths = [_part_length(x.m, area // rows, width_block, 16 * x.r) for x in matrices]
        heights = [_part_length(x.n, area // columns, height_block, 16 * x.r) for x in matrices]
        p_splits = [-(-x.m // width) for x, width in zip(matrices, widths, strict=True)]
        q_splits = [-(-x.n // height) for x, height in zip(matrices, heights, strict=True)]
        p_parts, self.p_parts_numel = _places(x.n * x.r * count for x, count in zip(matrices, p_splits, strict=True))
        q_parts, self.q_parts_numel = _places(x.m * x.r * count for x, count in zip(matrices, q_splits, strict=True))
        self.records = self._tensor(
            [[x.n, x.m, x.r, x.p_offset, x.q_offset, p, q] for x, p, q in zip(matrices, p_parts, q_parts, strict=True)],
            7,
            torch.int64,
        )
        self.row_tiles = self._tensor(
            [
                [index, row, *part]
                for index, (x, width) in enumerate(zip(matrices, widths, strict=True))
                for row in range(0, x.n, rows)
                for part in _parts(x.m, width)
            ],
            5,
            torch.int32,
        )
        self.column_tiles = self._tensor(
            [
                [index, column, *part]
                for index, (x, height) in enumerate(zip(matrices, heights, strict=True))
                for part in _parts(x.n, height)
                for column in range(0, x.m, columns)
            ],
            5,
            torch.int32,
        )
        sums_P = _sums([(x.n * x.r, x.p_offset) for x in matrices], p_parts, p_splits)
        sums_Q = _sums([(x.m * x.r, x.q_offset) for x in matrices], q_parts, q_splits)
        behind_P, behind_Q = self._bypass_rows(0), self._bypass_rows(1)
        self.bypass_programs = len(behind_P)
        self.pack_P = self._tensor([*behind_P, *sums_P], 6, torch.int64)
        self.pack_Q = self._tensor([*behind_P, *sums_Q], 6, torch.int64)
        self.pack_left = self._tensor([*behind_Q, *sums_Q], 6, torch.int64)
        self.rollback = self._tensor(
            [
                [index, start, min(x.n * x.m, start + ROLLBACK_BLOCK)]
                for index, x in enumerate(matrices)
                for start in range(0, x.n * x.m, ROLLBACK_BLOCK)
            ],
            3,
            torch.int64,
        )
        self.P = self._factors([(x.n, x.r, x.p_offset, x.key) for x in matrices])
        self.Q = self._factors([(x.m, x.r, x.q_offset, x.key) for x in matrices])

    def pointers(self, tensors: Sequence[Tensor], *, bypass: bool = True) -> Pointers:
        """Where the matrices (and, with ``bypass``, the bypass tensors) lie now.

        Checked and uploaded when they lie elsewhere than before; the same places are not looked at again.

        Raises:
            TypeError: they are not all of one of the dtypes fp32, bf16, fp16.
            ValueError: they are on another device, not contiguous, or not of the table's sizes.
        """
        key = tuple([tensor.data_ptr() for tensor in tensors])
        known = self._pointers.get(key)
        if known is not None and known.anchor.dtype == tensors[0].dtype:
            return known
        sizes = [x.n * x.m for x in self.matrices] + ([numel for numel, *_ in self.bypass] if bypass else [])
        if len(tensors) != len(sizes):
            raise ValueError(f"expected {len(sizes)} tensors; got {len(tensors)}")
        dtype = tensors[0].dtype
        for index, (tensor, numel) in enumerate(zip(tensors, sizes, strict=True)):
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) or tensor.dtype != dtype:
                raise TypeError(f"tensors must all be float32, bfloat16 or float16; number {index} is {tensor.dtype}")
            if tensor.device != self.device:
                raise ValueError(f"tensors must be on {self.device}; number {index} is on {tensor.device}")
            if not tensor.is_contiguous() or tensor.numel() != numel:
                raise ValueError(
                    f"tensor {index} must be contiguous with {numel} elements; "
                    f"got shape {tuple(tensor.shape)} and stride {tensor.stride()}"
                )
        if dtype not in self._anchors:
            self._anchors[dtype] = torch.zeros(VECTOR, dtype=dtype, device=self.device)
        anchor, size = self._anchors[dtype], dtype.itemsize
        origin = anchor.data_ptr()
        # A tensor without elements may have no address.
        addresses = [address if numel else origin for address, numel in zip(key, sizes, strict=True)]
        if any((address - origin) % size for address in addresses):
            raise ValueError(f"tensors must start at multiples of their elements' {size} bytes")
        offsets = [(address - origin) // size for address in addresses]
        places = [*offsets[: len(self.matrices)], *(matrix.m for matrix in self.matrices)]
        vector = math.gcd(*places, VECTOR) if places else VECTOR
        pointers = Pointers(anchor, self._tensor([offsets], len(offsets), torch.int64), vector)
        if len(self._pointers) >= 8:
            self._pointers.pop(next(iter(self._pointers)))
        self._pointers[key] = pointers
        return pointers

    def _bypass_rows(self, message: int) -> list[list[int]]:
        """Rows of a pack table for the bypass tensors, in the message of P (0) or of Q (1)."""
        return [
            [start, 0, 0, offsets[message] + start, min(COPY_BLOCK, numel - start), len(self.matrices) + index]
            for index, (numel, *offsets) in enumerate(self.bypass)
            for start in range(0, numel, COPY_BLOCK)
        ]

    def _factors(self, factors: Sequence[tuple[int, int, int, int]]) -> FactorTable:
        records: list[list[int]] = []
        chunks: list[list[int]] = []
        for index, (rows, r, offset, key) in enumerate(factors):
            height = max(CHUNK_ROWS, -(-rows // MAX_CHUNKS // CHUNK_ROWS) * CHUNK_ROWS)
            mine = [[index, row, min(rows, row + height)] for row in range(0, rows, height)]
            records.append([rows, r, offset, key, len(chunks), len(mine)])
            chunks += mine
        return FactorTable(self._tensor(records, 6, torch.int64), self._tensor(chunks, 3, torch.int32))

    def _tensor(self, rows: Sequence[Sequence[int]], columns: int, dtype: torch.dtype) -> Tensor:
        return integers(rows, columns, dtype, self.device)


def integers(rows: Sequence[Sequence[int]], columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table on the device, by a copy that does not wait for it."""
    host = torch.tensor(rows, dtype=dtype).view(len(rows), columns)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


@dataclasses.dataclass(frozen=True)
class Pointers:
    """Where tensors lie.

    Attributes:
        anchor: a tensor of their dtype, whose address is a multiple of 16 bytes.
        offsets: int64 [1, number], their distances from it in elements.
        vector: elements, at most ``VECTOR``, at multiples of which all rows of all matrices start.
    """

    anchor: Tensor
    offsets: Tensor
    vector: int


def _check(matrix: Matrix) -> None:
    if not 1 <= matrix.r <= min(matrix.n, matrix.m):
        raise ValueError(f"rank must be from 1 to min(n, m); got {matrix.r} for {matrix.n} × {matrix.m}")
    if matrix.r > MAX_RANK:
        raise ValueError(f"rank must be at most {MAX_RANK}; got {matrix.r}")
    if matrix.m > MAX_COLUMNS or matrix.n >= 2**31:
        raise ValueError(
            f"a matrix may have 2³¹ − 1 rows and {MAX_COLUMNS} columns at most; got {matrix.n} × {matrix.m}"
        )


def _part_length(size: int, wished: int, block: int, least: int) -> int:
    """Length of the parts, a multiple of ``block``, into which a sum over ``size`` elements is split."""
    length = max(MIN_PART, least, wished)
    return min(-(-size // block), -(-length // block)) * block


def _parts(size: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, number) of each part."""
    for number, start in enumerate(range(0, size, length)):
        yield start, min(size, start + length), number


def _places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where each starts when they lie one behind the other, and where the last ends."""
    ends = [0, *itertools.accumulate(sizes)]
    return ends[:-1], ends[-1]


def _sums(factors: Sequence[tuple[int, int]], parts: Sequence[int], splits: Sequence[int]) -> list[list[int]]:
    """Rows of a pack table: factors of (elements, offset), the offset of their parts, and how many there are."""
    return [
        [part + start, numel, count, offset + start, min(COPY_BLOCK, numel - start), 0]
        for (numel, offset), part, count in zip(factors, parts, splits, strict=True)
        for start in range(0, numel, COPY_BLOCK)
    ]
