"""Buckets in guarded memory for the tests of the kernels, and bounds for their rounding errors.

Bounds are those of ``tests/ops/test_reference.py``: a sum of k products is off by at most γ_k times the sum of absolute
values, whatever the order of summation.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from powersgd_triton.kernels.configurations import architecture, select_configuration
from powersgd_triton.kernels.table import BucketTable, Matrix, Pointers
from tests.support.device import INTERPRETED
from tests.support.thinned import label

NAN, INF = float("nan"), float("inf")
# 40 ends within a second panel of columns. More than 64 would only run what 64 runs, for more panels.
RANKS = [1, 2, 3, 4, 8, 16, 17, 32, 40, 64]
GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]
ERRORS = [torch.float32, torch.bfloat16]
GROWTH = 0.75
"""How much a loss scale grew; no power of two, so that it rounds."""
Shape = tuple[int, int, int]
Shapes = Callable[[int], list[Shape]]

BYPASS = [1, 0, 1500, 3]
"""Elements of bypass tensors: none, within a block of the packing and in several."""

MARGIN = 16
"""Guards before and behind everything; of any dtype they keep the alignment to 16 bytes."""

UNWRITTEN = 0xFF
"""Of bytes: as a bf16 scale, NaN."""

GUARDS = {
    torch.float64: (torch.int64, 0x7FF8_0000_0012_3456),
    torch.float32: (torch.int32, 0x7FC1_2345),
    torch.bfloat16: (torch.int16, 0x7FD5),
    torch.float16: (torch.int16, 0x7E55),
    torch.uint8: (torch.uint8, UNWRITTEN),
}
"""NaNs that no arithmetic makes: reading one spoils a result, and writing one is seen."""


def over_dtypes(argument: str, dtypes: Sequence[torch.dtype | None]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(argument, dtypes, ids=label)


class Memory:
    """Tensors one behind the other, with ``gap`` guards between them: ``views``, one-dimensional and NaN at first.

    ``flat`` is all of them and the guards between; ``offsets`` are elements in it."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, gap: int = 0) -> None:
        self.offsets = list(itertools.accumulate((size + gap for size in sizes), initial=0))[:-1]
        numel = sum(sizes) + gap * max(0, len(sizes) - 1)
        integers, pattern = GUARDS[dtype]
        self._bits = torch.full((numel + 2 * MARGIN,), pattern, dtype=integers, device=device)
        self._is_guard = torch.ones(numel + 2 * MARGIN, dtype=torch.bool, device=device)
        for start, size in zip(self.offsets, sizes, strict=True):
            self._is_guard[MARGIN + start : MARGIN + start + size] = False
        self._pattern = pattern
        self.flat = self._bits.view(dtype)[MARGIN : MARGIN + numel]
        self.views = [self.flat[start : start + size] for start, size in zip(self.offsets, sizes, strict=True)]
        self.poison()

    def poison(self) -> None:
        for view in self.views:
            view.fill_(NAN if view.is_floating_point() else UNWRITTEN)

    def fill(self, values: Sequence[Tensor]) -> "Memory":
        for view, value in zip(self.views, values, strict=True):
            view.copy_(value.reshape(-1))
        return self

    def cpu(self) -> list[Tensor]:
        """Copies of the tensors."""
        return [view.cpu().clone() for view in self.views]

    def double(self) -> list[Tensor]:
        return [view.cpu().to(torch.float64, copy=True) for view in self.views]

    def guarded(self) -> bool:
        """Whether nothing was written beside the tensors."""
        return bool((self._bits[self._is_guard] == self._pattern).all())


class Bytes(Memory):
    """Bytes ``view`` [*shape]; all as ``UNWRITTEN`` at first."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        super().__init__([math.prod(shape)], torch.uint8, device)
        self.view = self.flat.view(shape)


class Bucket:
    """Matrices (n, m, r) and bypass tensors of so many elements, with random values, in guarded memory.

    ``gap`` elements lie between tensors, ``factor_gap`` between factors. M holds error buffers; without ``error`` it
    holds none, as without error feedback.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        device: torch.device,
        *,
        bypass: Sequence[int] = (),
        gradient: torch.dtype = torch.float32,
        error: torch.dtype | None = torch.float32,
        gap: int = 5,
        factor_gap: int = 3,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shapes, self.bypass, self.device = list(shapes), list(bypass), device
        self._factor_gap = factor_gap
        sizes = [n * m for n, m, _ in shapes]
        # Elements of each P, and of the bypass tensors behind them; and of each Q.
        self.row_sizes, self.column_sizes = [*(n * r for n, _, r in shapes), *bypass], [m * r for _, m, r in shapes]
        self.G = Memory([*sizes, *bypass], gradient, device, gap).fill(self.random([*sizes, *bypass]))
        self.M = None if error is None else Memory(sizes, error, device, gap).fill(self.random(sizes))
        self.first, self.P_hat = self.rows(), self.rows().fill(self.random(self.row_sizes))
        self.second, self.Q, self.basis = (self.columns() for _ in range(3))
        for factors in (self.Q, self.basis):
            factors.fill(self.random(self.column_sizes))
        self.rank = max((r for _, _, r in shapes), default=1)
        self.launches = select_configuration(architecture(device), self.rank)
        first, count = self.first.offsets, len(shapes)
        places = zip(shapes, first[:count], self.second.offsets, itertools.count(1), strict=False)
        self.table = BucketTable(
            [Matrix(*shape, p, q, key) for shape, p, q, key in places],
            list(zip(bypass, first[count:], itertools.repeat(0))),
            self.launches.reconstruct.tile,
            self.launches.backproject.tile,
            device,
        )
        self.finite = torch.ones((), dtype=torch.int32, device=device)

    @functools.cached_property
    def left_basis(self) -> Memory:
        """Factors [n, r] that the left half of the alternating algorithm multiplies by."""
        return self.rows().fill(self.random(self.row_sizes))

    def random(self, sizes: Sequence[int]) -> list[Tensor]:
        return [torch.randn(size, generator=self.generator) for size in sizes]

    def rows(self, dtype: torch.dtype = torch.float32) -> Memory:
        """Memory like that of the first message, NaN."""
        return Memory(self.row_sizes, dtype, self.device, self._factor_gap)

    def columns(self) -> Memory:
        """Memory like that of the second message, NaN."""
        return Memory(self.column_sizes, torch.float32, self.device, self._factor_gap)

    def parts(self, numel: int) -> Memory:
        return Memory([numel], torch.float32, self.device)

    def scalar(self, value: float) -> Tensor:
        return torch.full((), value, device=self.device)

    def pointers_G(self) -> Pointers:
        return self.table.pointers(self.G.views)

    def pointers_M(self) -> Pointers | None:
        return None if self.M is None or not self.shapes else self.table.pointers(self.M.views, bypass=False)

    def matrices(self, memory: Memory) -> list[Tensor]:
        """fp64 copies [n, m]."""
        return [x.view(n, m) for x, (n, m, _) in zip(memory.double(), self.shapes, strict=False)]

    def row_factors(self, memory: Memory) -> list[Tensor]:
        """fp64 copies [n, r]."""
        return [x.view(n, r) for x, (n, _, r) in zip(memory.double(), self.shapes, strict=False)]

    def column_factors(self, memory: Memory) -> list[Tensor]:
        """fp64 copies [m, r]."""
        return [x.view(m, r) for x, (_, m, r) in zip(memory.double(), self.shapes, strict=True)]

    def guarded(self) -> bool:
        memories = [self.G, self.first, self.P_hat, self.second, self.Q, self.basis, self.M]
        return all(memory.guarded() for memory in memories if memory is not None)


def small(rank: int) -> list[Shape]:
    """A matrix that ends within its tiles, and one of another rank."""
    return [(rank + 3, rank + 30, rank), (6, 5, min(rank, 2))]


def mixed(rank: int) -> list[Shape]:
    """Matrices of several shapes and ranks: borders of tiles in both directions, split sums, one row, one column."""
    low = min(rank, 3)
    return [(max(rank, 130), max(rank, 70), rank), (3, 300, low), (300, 3, low), (1, 9, 1), (9, 1, 1)]


def uniform(rank: int) -> list[Shape]:
    """Matrices of several shapes and one rank, for which the kernels are specialized."""
    return [(max(rank, 131), rank, rank), (rank + 1, max(rank, 33), rank)]


def rounding(terms: int, device: torch.device) -> float:
    """γ of a sum of so many products of fp32 values.

    On a GPU each factor of a product is split into two tf32 values, which leaves 4/3 · 2⁻²² of it, and the product of
    the smaller halves is dropped: 11/3 · 2⁻²². Then three sums are accumulated, and tensor cores truncate.
    """
    if INTERPRETED:
        return terms * 2.0**-24 / (1 - terms * 2.0**-24)
    return 3 * terms * 2.0**-23 / (1 - 3 * terms * 2.0**-23) + 11 / 3 * 2.0**-22


def assert_within(actual: Tensor, truth: Tensor, bound: Tensor) -> None:
    difference = (actual.double() - truth).abs()
    assert actual.isfinite().all()
    assert (difference <= bound).all(), f"off by {difference.max():.3e}; {(difference / bound).max():.2f} × the bound"


def stored(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound of what is lost by rounding fp32 values of at most ``size`` once to ``dtype``.

    Half a unit in the last place, at least half the smallest denormal; a whole one to bf16 in the interpreter, which
    truncates.
    """
    if dtype == torch.float32:
        return torch.zeros_like(size)
    info = torch.finfo(dtype)
    units = 1.0 if dtype == torch.bfloat16 and INTERPRETED else 0.5
    return units * (info.eps * size + info.smallest_normal * info.eps)
