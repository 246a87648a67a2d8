"""Tables of integers that tell each program of a kernel which part of which matrix is its own.

``columns.py`` says what the tables' columns are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powersgd_triton.kernels.columns import (
    ChunkRow,
    FactorRow,
    MatrixRow,
    PackRow,
    ProgressRow,
    RollbackRow,
    TileRow,
)
from powersgd_triton.kernels.configurations import multiprocessors
from powersgd_triton.kernels.splits import part_lengths, parts

MAX_COLUMNS = 2**24
"""Kernels compute offsets within a tile in 32 bits, and a tile has up to 128 rows. All other offsets have 64 bits."""

MAX_RANK = 256
ARRIVALS = MAX_RANK // 32
"""Sums of one factor that are made at once: one for each panel of its columns."""

PROGRESS_COLUMNS = len(ProgressRow._fields) - 1 + ARRIVALS

COPY_BLOCK = 1024
"""Elements of a message that one program packs."""

ROLLBACK_BLOCK = 1 << 16
"""Elements of an error buffer that one program restores after a step that was not finite."""

MAX_CHUNKS = 64
"""One program adds the inner products of all chunks of a factor, so these must stay few."""

MAX_SHARES = 64
"""Programs among which a chunk is divided at most: each chunk has as many, and most need few."""

CHUNK_ROWS = 64
"""Rows of a factor's chunk are a multiple of this."""

DEAD_COLUMN = 2.0**-22
"""A column is replaced when so little of its norm is left after projecting the others out; as in the reference."""

POINTERS = 8
"""Number of sets of tensors whose places are remembered."""


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
        records: int64 [matrices, columns of ``FactorRow``].
        chunks: int32 [programs, columns of ``ChunkRow``].
        progress: int32 [matrices, columns of ``ProgressRow``, the last of them ``ARRIVALS`` times]; kernels write it.
        shares: among how many programs a chunk is divided where nothing is added.
    """

    records: Tensor
    chunks: Tensor
    progress: Tensor
    shares: int

    @property
    def zeroed(self) -> Tensor:
        """[matrices]: number of columns that were set to 0 so far, because no pass had made them orthonormal."""
        return self.progress[:, ProgressRow._fields.index("zeroed")]


class BucketTable:
    """The tables of one bucket: its matrices and bypass tensors, in the order in which pointers to them are given.

    Args:
        matrices: the compressed matrices.
        bypass: for each tensor that is not compressed (elements, offset in the message of P, in that of Q).
        row_tile, column_tile: rows and columns of one tile in ``row_tiles`` and ``column_tiles``, powers of two.
        device: where the tables live.
        rows_of_larger: the matrices are rows of larger ones, and may have fewer of them than the rank.

    Attributes:
        records: int64 [matrices, columns of ``MatrixRow``].
        row_tiles: int32 [programs, columns of ``TileRow``], for kernels that walk along rows.
        column_tiles: the same for kernels that walk along columns.
        pack_P, pack_Q, pack_left: int64 [programs, columns of ``PackRow``], what one program copies into a message.
            Bypass tensors come first; in pack_P and pack_Q they belong to the message of P, in pack_left to that of Q.
        rollback: int64 [programs, columns of ``RollbackRow``].
        P, Q: tables of the factors.
        rank: the largest.
        p_parts_numel, q_parts_numel: elements of the workspaces of the parts.
        bypass_programs: rows of a pack table that belong to bypass tensors.

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
        rows_of_larger: bool = False,
    ) -> None:
        for matrix in matrices:
            _check(matrix, rows_of_larger)
        self.matrices, self.bypass, self.device = tuple(matrices), tuple(bypass), device
        self.rank = max((matrix.r for matrix in matrices), default=0)
        self._distances: dict[tuple[torch.dtype, int, tuple[int, ...]], Distances] = {}
        # Those that a CUDA graph uses, also later.
        self._captured: list[Distances] = []

        (rows, width_block), (height_block, columns) = row_tile, column_tile
        cores = multiprocessors(device)
        widths = part_lengths([(-(-x.n // rows), x.m, x.r) for x in matrices], width_block, cores)
        heights = part_lengths([(-(-x.m // columns), x.n, x.r) for x in matrices], height_block, cores)
        p_splits = [-(-x.m // width) for x, width in zip(matrices, widths, strict=True)]
        q_splits = [-(-x.n // height) for x, height in zip(matrices, heights, strict=True)]
        p_parts, self.p_parts_numel = _places(x.n * x.r * count for x, count in zip(matrices, p_splits, strict=True))
        q_parts, self.q_parts_numel = _places(x.m * x.r * count for x, count in zip(matrices, q_splits, strict=True))
        self.records = self._tensor(
            MatrixRow,
            [
                MatrixRow(x.n, x.m, x.r, P=x.p_offset, Q=x.q_offset, P_parts=p, Q_parts=q)
                for x, p, q in zip(matrices, p_parts, q_parts, strict=True)
            ],
        )
        # A matrix's tiles are neighbours, and so are the programs that read the same factors.
        row_tiles = [
            TileRow(index, first, start, end, split)
            for index, (x, width) in enumerate(zip(matrices, widths, strict=True))
            for first in range(0, x.n, rows)
            for start, end, split in parts(x.m, width)
        ]
        column_tiles = [
            TileRow(index, first, start, end, split)
            for index, (x, height) in enumerate(zip(matrices, heights, strict=True))
            for start, end, split in parts(x.n, height)
            for first in range(0, x.m, columns)
        ]
        self.row_tiles = self._tensor(TileRow, _longest_first(row_tiles), torch.int32)
        self.column_tiles = self._tensor(TileRow, _longest_first(column_tiles), torch.int32)
        sums_P = _sums([(x.n * x.r, x.p_offset) for x in matrices], p_parts, p_splits)
        sums_Q = _sums([(x.m * x.r, x.q_offset) for x in matrices], q_parts, q_splits)
        with_P, with_Q = self._bypass_rows(0), self._bypass_rows(1)
        self.bypass_programs = len(with_P)
        self.pack_P = self._tensor(PackRow, [*with_P, *sums_P])
        self.pack_Q = self._tensor(PackRow, [*with_P, *sums_Q])
        self.pack_left = self._tensor(PackRow, [*with_Q, *sums_Q])
        self.rollback = self._tensor(
            RollbackRow,
            [
                RollbackRow(index, start, min(x.n * x.m, start + ROLLBACK_BLOCK))
                for index, x in enumerate(matrices)
                for start in range(0, x.n * x.m, ROLLBACK_BLOCK)
            ],
        )
        self.P = self._factors([(x.n, x.r, x.p_offset, x.key) for x in matrices])
        self.Q = self._factors([(x.m, x.r, x.q_offset, x.key) for x in matrices])

    def pointers(self, tensors: Sequence[Tensor], *, bypass: bool = True) -> Pointers:
        """Where the matrices (and, with ``bypass``, the bypass tensors) lie now.

        The tensors are checked, and their distances uploaded, only the first time that they lie so far apart. Parts of
        one buffer always do, wherever the buffer is.

        Raises:
            TypeError: they are not all of one of the dtypes fp32, bf16, fp16.
            ValueError: they are on another device, not contiguous, or not of the table's sizes.
        """
        # That of a tensor without elements is 0, wherever it lies.
        addresses = [tensor.data_ptr() for tensor in tensors]
        base = next(filter(None, addresses), 0)
        dtype = tensors[0].dtype if tensors else torch.float32
        # Elements lie at multiples of their size, and distances are checked.
        distances = tuple([address and address - base for address in addresses])
        key = (dtype, base % dtype.itemsize, distances)
        known = self._distances.pop(key, None)
        if known is None:
            known = self._upload(tensors, distances, base, bypass)
            if len(self._distances) >= POINTERS:
                self._distances.pop(next(iter(self._distances)))
        # Last in the dictionary, so that what was not used for longest is first.
        self._distances[key] = known
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.append(known)
        return Pointers(dtype, base, known.on_device)

    def _upload(self, tensors: Sequence[Tensor], distances: Sequence[int], base: int, bypass: bool) -> Distances:
        """Check the tensors and upload how far they lie from the first one."""
        sizes = [x.n * x.m for x in self.matrices] + ([numel for numel, *_ in self.bypass] if bypass else [])
        if len(tensors) != len(sizes):
            raise ValueError(f"expected {len(sizes)} tensors; got {len(tensors)}")
        dtype = tensors[0].dtype if tensors else torch.float32
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
        if any((base + distance) % dtype.itemsize for distance in distances):
            raise ValueError(f"tensors must start at multiples of their elements' {dtype.itemsize} bytes")
        host = on_host([distances], len(distances), torch.int64, self.device)
        return Distances(host, host.to(self.device, non_blocking=True))

    def _bypass_rows(self, message: int) -> list[PackRow]:
        """Rows of a pack table for the bypass tensors, in the message of P (0) or of Q (1)."""
        return [
            PackRow(
                source=start,
                distance=0,
                splits=0,
                target=offsets[message] + start,
                numel=min(COPY_BLOCK, numel - start),
                tensor=len(self.matrices) + index,
            )
            for index, (numel, *offsets) in enumerate(self.bypass)
            for start in range(0, numel, COPY_BLOCK)
        ]

    def _factors(self, factors: Sequence[tuple[int, int, int, int]]) -> FactorTable:
        records: list[FactorRow] = []
        chunks: list[ChunkRow] = []
        highest = 0
        for index, (rows, r, offset, key) in enumerate(factors):
            height = max(CHUNK_ROWS, -(-rows // MAX_CHUNKS // CHUNK_ROWS) * CHUNK_ROWS)
            highest = max(highest, height)
            mine = [ChunkRow(index, row, min(rows, row + height)) for row in range(0, rows, height)]
            records.append(FactorRow(rows, r, offset, key, first_chunk=len(chunks), chunks=len(mine)))
            chunks += mine
        progress = torch.zeros(len(records), PROGRESS_COLUMNS, dtype=torch.int32, device=self.device)
        return FactorTable(
            self._tensor(FactorRow, records),
            self._tensor(ChunkRow, chunks, torch.int32),
            progress,
            shares=min(MAX_SHARES, max(1, highest // CHUNK_ROWS)),
        )

    def _tensor(self, row: Any, rows: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.int64) -> Tensor:
        """A table of rows of one kind, of which there may be none."""
        return integers(rows, len(row._fields), dtype, self.device)


def integers(rows: Sequence[Sequence[int]], columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table on the device, by a copy that does not wait for it."""
    return on_host(rows, columns, dtype, device).to(device, non_blocking=True)


def on_host(rows: Sequence[Sequence[int]], columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table on the host, from where it can be copied to the device without waiting."""
    host = torch.tensor(rows, dtype=dtype).view(len(rows), columns)
    return host if device.type == "cpu" else host.pin_memory()


class Distances(NamedTuple):
    """How far tensors lie from the first of them, in bytes: int64 [1, number].

    ``on_device`` was copied from ``on_host``. A CUDA graph in which it was copied does so in each replay.
    """

    on_host: Tensor
    on_device: Tensor


class Pointers(NamedTuple):
    """Where tensors lie, for kernels that reach any number of them.

    Kernels add a distance to the base and turn the sum into a pointer. The base is a number and not a pointer: for
    pointers to at most 2 GiB, Triton's AMD backend computes offsets in 32 bits.

    Attributes:
        dtype: of the tensors' elements.
        base: address of the first tensor, in bytes.
        distances: of all tensors from there, in bytes, int64 [1, number] on the device.
    """

    dtype: torch.dtype
    base: int
    distances: Tensor


def _check(matrix: Matrix, rows_of_larger: bool) -> None:
    if not 1 <= matrix.r <= (matrix.m if rows_of_larger else min(matrix.n, matrix.m)):
        raise ValueError(f"rank must be from 1 to min(n, m); got {matrix.r} for {matrix.n} × {matrix.m}")
    if matrix.r > MAX_RANK:
        raise ValueError(f"rank must be at most {MAX_RANK}; got {matrix.r}")
    if matrix.m > MAX_COLUMNS or matrix.n >= 2**31:
        raise ValueError(
            f"a matrix may have 2³¹ − 1 rows and {MAX_COLUMNS} columns at most; got {matrix.n} × {matrix.m}"
        )


def _longest_first(tiles: Sequence[TileRow]) -> list[TileRow]:
    """Order programs such that short ones fill what the long ones leave of the time."""
    return sorted(tiles, key=lambda tile: tile.start - tile.end)


def _places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where each starts when they lie one behind the other, and where the last ends."""
    ends = [0, *itertools.accumulate(sizes)]
    return ends[:-1], ends[-1]


def _sums(factors: Sequence[tuple[int, int]], parts: Sequence[int], splits: Sequence[int]) -> list[PackRow]:
    """Rows of a pack table: factors of (elements, offset), the offset of their parts, and how many there are."""
    return [
        PackRow(part + start, numel, count, offset + start, min(COPY_BLOCK, numel - start), tensor=0)
        for (numel, offset), part, count in zip(factors, parts, splits, strict=True)
        for start in range(0, numel, COPY_BLOCK)
    ]
