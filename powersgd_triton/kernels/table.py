"""The tables that tell each program of a kernel which part of which matrix is its own."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powersgd_triton.kernels import table_device as tables
from powersgd_triton.kernels.availability import DTYPES
from powersgd_triton.kernels.configurations import is_captured, multiprocessors
from powersgd_triton.kernels.splits import part_lengths, parts

MAX_COLUMNS = 2**24
"""Kernels compute offsets within a tile of up to 128 rows in 32 bits. All other offsets have 64 bits."""

COPY_BLOCK = 1024
"""Elements of a message that one program packs."""

ROLLBACK_BLOCK = 1 << 16
"""Elements of an error buffer that one program restores after a step that was not finite."""

MAX_CHUNKS = 64
"""One program adds the inner products of all chunks of a factor, so these must stay few."""

CHUNK_ROWS = 64
"""Rows of a factor's chunk are a multiple of this."""

MAX_SHARES = 64
"""Programs among which a chunk is divided at most: each chunk has as many, and most need few."""

POINTERS = 8
"""Number of sets of tensors whose places are remembered."""

SPARES = 4
"""Number of such sets that may be new in captures of CUDA graphs, one after the other."""


_Key = tuple[torch.dtype, int, tuple[int, ...]]
"""What distances on the device depend on: the dtype, the base modulo its size, and the distances of tensors."""


class Matrix(NamedTuple):
    """One n × m matrix of rank r. Its factors start at these elements of all P and Q. The key seeds random numbers."""

    n: int
    m: int
    r: int
    p_offset: int
    q_offset: int
    key: int

    def within(self, start: int, end: int) -> list["Matrix"]:
        """Return the matrices in which elements ``start`` to ``end`` lie in row-major order: rows, or parts of one."""
        first, behind = -(-start // self.m) * self.m, end // self.m * self.m
        bounds = [start, first, behind, end] if first < behind else [start, min(first, end), end]
        found = []
        for low, high in itertools.pairwise(bounds):
            row, column = divmod(low, self.m)
            if columns := min(high - low, self.m - column):
                places = self.p_offset + row * self.r, self.q_offset + column * self.r
                found.append(Matrix((high - low) // columns, columns, self.r, *places, self.key))
        return found


class FactorTable(NamedTuple):
    """The factors on one side, for orthogonalization. ``shares`` programs divide a chunk where nothing is added."""

    records: Tensor
    chunks: Tensor
    progress: Tensor
    shares: int

    @property
    def zeroed(self) -> Tensor:
        """[matrices]: number of columns that were set to 0 so far, because no pass had made them orthonormal."""
        return self.progress[:, tables.ProgressRow._fields.index("zeroed")]


class Pointers(NamedTuple):
    """Where tensors lie: the address of the first one, and on the device the distances from there, int64 [1, number].

    Both count bytes. The base is a number and not a pointer: for pointers to at most 2 GiB, Triton's AMD backend
    computes offsets in 32 bits.
    """

    dtype: torch.dtype
    base: int
    distances: Tensor


class BucketTable:
    """The tables of one bucket: its matrices and bypass tensors, in the order in which pointers to them are given.

    Args:
        matrices: The compressed matrices.
        bypass: (elements, offset in the message of P, offset in that of Q) of each tensor that is not compressed.
        row_tile, column_tile: Rows and columns of a tile in ``row_tiles`` and ``column_tiles``, powers of two.
        counts: Number of matrices of each tensor. None for 1 each.

    Attributes:
        records, row_tiles, column_tiles, rollback: See the rows of ``table_device``.
        pack_P, pack_Q, pack_left: What one program copies into a message. The first ``bypass_programs`` rows are for
            bypass tensors. In pack_P and pack_Q they belong to the message of P, in pack_left to that of Q.
        P, Q: Tables of the factors.
        p_parts_numel, q_parts_numel: Elements of the workspaces of the parts.

    ValueError: A matrix is beyond what the kernels can address.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        bypass: Sequence[tuple[int, int, int]],
        row_tile: tuple[int, int],
        column_tile: tuple[int, int],
        device: torch.device,
        counts: Sequence[int] | None = None,
    ) -> None:
        for x in matrices:
            if x.m > MAX_COLUMNS or x.n >= 2**31:
                raise ValueError(f"a matrix may have up to 2³¹ − 1 rows and {MAX_COLUMNS} columns; got {x.n} × {x.m}")
        self.matrices, self.bypass, self.device = tuple(matrices), tuple(bypass), device
        self.counts = [1] * len(matrices) if counts is None else counts
        firsts = itertools.accumulate(self.counts, initial=0)
        # (elements of a matrix, matrices) of each tensor.
        self._sizes = [(matrices[i].n * matrices[i].m, count) for i, count in zip(firsts, self.counts, strict=False)]
        self.rank = max((matrix.r for matrix in matrices), default=0)
        # Distances on the device and on the host, and those that CUDA graphs use, which are kept. What was copied while
        # a graph was captured is on the device only once this graph was replayed.
        self._distances: dict[_Key, tuple[Tensor, Tensor]] = {}
        self._captured: dict[_Key, tuple[Tensor, Tensor]] = {}
        # Memory for distances, also as an array. While a graph is captured, the host must not allocate pinned memory.
        self._spares: list[tuple[Tensor, Any]] = []
        self._prepare_spares()
        (rows, width_block), (height_block, columns) = row_tile, column_tile
        transposed = [Matrix(x.m, x.n, x.r, x.q_offset, x.p_offset, x.key) for x in matrices]
        widths, p_parts, self.p_parts_numel, sums_P = self._split(matrices, rows, width_block)
        heights, q_parts, self.q_parts_numel, sums_Q = self._split(transposed, columns, height_block)
        records = [
            tables.MatrixRow(x.n, x.m, x.r, P=x.p_offset, Q=x.q_offset, P_parts=p, Q_parts=q)
            for x, p, q in zip(matrices, p_parts, q_parts, strict=True)
        ]
        self.records = self._tensor(tables.MatrixRow, records)
        # A matrix's tiles are neighbours, and so are the programs that read the same factors.
        row_tiles = [
            tables.TileRow(index, first, *part)
            for index, (x, width) in enumerate(zip(matrices, widths, strict=True))
            for first, part in itertools.product(range(0, x.n, rows), parts(x.m, width))
        ]
        column_tiles = [
            tables.TileRow(index, first, *part)
            for index, (x, height) in enumerate(zip(matrices, heights, strict=True))
            for part, first in itertools.product(parts(x.n, height), range(0, x.m, columns))
        ]
        for tiles in (row_tiles, column_tiles):
            # The longest programs come first, so that short ones fill what these leave of the time.
            tiles.sort(key=lambda tile: tile.start - tile.end)
        self.row_tiles = self._tensor(tables.TileRow, row_tiles, torch.int32)
        self.column_tiles = self._tensor(tables.TileRow, column_tiles, torch.int32)
        with_P, with_Q = self._bypass_rows(0), self._bypass_rows(1)
        self.bypass_programs = len(with_P)
        self.pack_P = self._tensor(tables.PackRow, [*with_P, *sums_P])
        self.pack_Q = self._tensor(tables.PackRow, [*with_P, *sums_Q])
        self.pack_left = self._tensor(tables.PackRow, [*with_Q, *sums_Q])
        blocks = [
            tables.RollbackRow(index, start, min(x.n * x.m, start + ROLLBACK_BLOCK))
            for index, x in enumerate(matrices)
            for start in range(0, x.n * x.m, ROLLBACK_BLOCK)
        ]
        self.rollback = self._tensor(tables.RollbackRow, blocks)
        self.P, self.Q = self._factors(matrices), self._factors(transposed)

    def pointers(self, tensors: Sequence[Tensor], *, bypass: bool = True) -> Pointers:
        """Return where the matrices (and, with ``bypass``, the bypass tensors) lie now.

        They are checked, and their distances uploaded, only if these are new. Those of a buffer's parts never change.
        TypeError: They are not all of one of the dtypes fp32, bf16, fp16. ValueError: They are on another device, not
        contiguous, or not of the table's sizes. RuntimeError: A captured step has too many new distances.
        """
        # That of a tensor without elements is 0, wherever it lies.
        addresses = [tensor.data_ptr() for tensor in tensors]
        base = next(filter(None, addresses), 0)
        dtype = tensors[0].dtype if tensors else torch.float32
        # Elements lie at multiples of their size, and distances are checked.
        distances = tuple([address and address - base for address in addresses])
        key, captured = (dtype, base % dtype.itemsize, distances), is_captured(self.device)
        known = self._distances.pop(key, None)
        if known is not None or not captured:
            known = known or self._upload(tensors, dtype, distances, base, bypass)
            if len(self._distances) >= POINTERS:
                self._distances.pop(next(iter(self._distances)))
            self._distances[key] = known  # last in the dictionary: what was not used for longest is first
        elif key in self._captured:
            # Perhaps in another graph, which need not be replayed before this one.
            known = self._captured[key]
            known[0].copy_(known[1], non_blocking=True)
        else:
            known = self._upload(tensors, dtype, distances, base, bypass)
        if captured:
            self._captured[key] = known
        else:
            self._prepare_spares()
        return Pointers(dtype, base, known[0])

    def _upload(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, distances: Sequence[int], base: int, bypass: bool
    ) -> tuple[Tensor, Tensor]:
        """Check the tensors and upload how far they lie from the first one."""
        sizes = self._sizes + ([(numel, 1) for numel, *_ in self.bypass] if bypass else [])
        if len(tensors) != len(sizes):
            raise ValueError(f"expected {len(sizes)} tensors; got {len(tensors)}")
        for index, (tensor, (each, count)) in enumerate(zip(tensors, sizes, strict=True)):
            if tensor.dtype not in DTYPES or tensor.dtype != dtype:
                raise TypeError(f"tensors must all be float32, bfloat16 or float16; number {index} is {tensor.dtype}")
            if tensor.device != self.device:
                raise ValueError(f"tensors must be on {self.device}; number {index} is on {tensor.device}")
            if not tensor.is_contiguous() or tensor.numel() != count * each:
                raise ValueError(
                    f"tensor {index} must be contiguous with {count * each} elements; "
                    f"got shape {tuple(tensor.shape)} and stride {tensor.stride()}"
                )
        if any((base + distance) % dtype.itemsize for distance in distances):
            raise ValueError(f"tensors must start at multiples of their elements' {dtype.itemsize} bytes")
        # A tensor's matrices lie one after the other.
        starts = zip(distances, sizes, strict=True)
        distances = [start + i * each * dtype.itemsize for start, (each, count) in starts for i in range(count)]
        captured = is_captured(self.device)
        if not captured:
            host = on_host([distances], len(distances), torch.int64, self.device)
        elif self._spares:
            spare, numbers = self._spares.pop()
            # Now, and not when the graph is replayed.
            numbers[0, : len(distances)] = distances
            host = spare[:, : len(distances)]
        else:
            raise RuntimeError(
                "the gradients of this bucket lie apart from each other in another way than before: take a step with "
                "them that is not captured before the one that is"
            )
        # In the interpreter, too, a graph copies.
        return host.to(self.device, non_blocking=True, copy=captured), host

    def _prepare_spares(self) -> None:
        columns = len(self.matrices) + len(self.bypass)
        missing = range(SPARES - len(self._spares))
        spares = [on_host([[0] * columns], columns, torch.int64, self.device) for _ in missing]
        self._spares += [(spare, spare.numpy()) for spare in spares]

    def _split(
        self, matrices: Sequence[Matrix], tile: int, block: int
    ) -> tuple[list[int], list[int], int, list[tables.PackRow]]:
        """Return lengths of parts of P, places of the first ones, elements of all, and rows of a pack table."""
        lengths = part_lengths([(-(-x.n // tile), x.m, x.r) for x in matrices], block, multiprocessors(self.device))
        counts = [-(-x.m // length) for x, length in zip(matrices, lengths, strict=True)]
        sizes = [x.n * x.r for x in matrices]
        *places, end = itertools.accumulate((n * count for n, count in zip(sizes, counts, strict=True)), initial=0)
        rows = [
            tables.PackRow(place + start, numel, count, x.p_offset + start, min(COPY_BLOCK, numel - start), tensor=0)
            for x, numel, place, count in zip(matrices, sizes, places, counts, strict=True)
            for start in range(0, numel, COPY_BLOCK)
        ]
        return lengths, places, end, rows

    def _bypass_rows(self, message: int) -> list[tables.PackRow]:
        """Return rows of a pack table for the bypass tensors, in the message of P (0) or of Q (1)."""
        return [
            tables.PackRow(
                start, 0, 0, offsets[message] + start, min(COPY_BLOCK, numel - start), len(self.matrices) + index
            )
            for index, (numel, *offsets) in enumerate(self.bypass)
            for start in range(0, numel, COPY_BLOCK)
        ]

    def _factors(self, matrices: Sequence[Matrix]) -> FactorTable:
        """Return the table of the factors P."""
        records: list[tables.FactorRow] = []
        chunks: list[tables.ChunkRow] = []
        heights = [max(CHUNK_ROWS, -(-x.n // MAX_CHUNKS // CHUNK_ROWS) * CHUNK_ROWS) for x in matrices]
        for index, (x, height) in enumerate(zip(matrices, heights, strict=True)):
            mine = [tables.ChunkRow(index, row, min(x.n, row + height)) for row in range(0, x.n, height)]
            records.append(tables.FactorRow(x.n, x.r, x.p_offset, x.key, first_chunk=len(chunks), chunks=len(mine)))
            chunks += mine
        progress = torch.zeros(len(records), tables.PROGRESS.value, dtype=torch.int32, device=self.device)
        shares = min(MAX_SHARES, max(heights, default=CHUNK_ROWS) // CHUNK_ROWS)
        on_device = self._tensor(tables.FactorRow, records), self._tensor(tables.ChunkRow, chunks, torch.int32)
        return FactorTable(*on_device, progress, shares)

    def _tensor(self, row: Any, rows: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return a table on the device, by a copy that does not wait for it."""
        return on_host(rows, len(row._fields), dtype, self.device).to(self.device, non_blocking=True)


def on_host(rows: Sequence[Sequence[int]], columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table on the host, from where it can be copied to the device without waiting."""
    host = torch.tensor(rows, dtype=dtype, device="cpu").view(len(rows), columns)
    return host if device.type == "cpu" else host.pin_memory()
