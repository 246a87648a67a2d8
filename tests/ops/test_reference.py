"""The operations in plain torch and in C against fp64 truth, and the blocks in which torch walks through matrices.

Bounds are forward errors (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5): a sum of k
products in arithmetic with unit roundoff u is off by at most γ_k = k u / (1 − k u) times the sum of absolute values,
whatever the order of summation.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton.ops import blocks, products, reference
from tests.support.checks import DTYPES
from tests.support.kernel_cases import GROWTH, NAN, Memory, assert_within

SIZES = [
    (1, 1, 1),
    (1, 9, 1),
    (9, 1, 1),
    (7, 5, 2),
    (16, 33, 4),
    (65, 12, 8),
    (20, 17, 13),
    (7, 1029, 3),
    (517, 270, 5),
    (70, 1100, 37),
]


def rounding(terms: int, dtype: torch.dtype) -> float:
    """γ of so many operations in the arithmetic of a gradient's dtype: fp64 for fp64, else fp32."""
    u = torch.finfo(wide(dtype)).eps / 2
    return terms * u / (1 - terms * u)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def spaced(values: Tensor) -> list[Tensor]:
    """Matrices in one storage, with five elements between them."""
    memory = Memory([matrix.numel() for matrix in values], values.dtype, torch.device("cpu"), gap=5)
    return [view.view(values.shape[1:]) for view in memory.fill(list(values)).views]


class Case:
    """B matrices of n × m with random factors."""

    def __init__(self, n: int, m: int, r: int, dtype: torch.dtype, batch: int = 3) -> None:
        generator = torch.Generator().manual_seed(n * 1000 + m * 10 + r)

        def new(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(wide(dtype))

        self.G, self.M = spaced(new(batch, n, m).to(dtype)), spaced(new(batch, n, m))
        self.P, self.Q, self.basis = new(batch, n, r), new(batch, m, r), new(batch, m, r)


def stack(matrices: list[Tensor]) -> Tensor:
    """fp64 copy [B, n, m]."""
    return torch.stack(matrices).double()


def block_bytes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(blocks, "block_bytes", lambda _: size)


# The operations -----------------------------------------------------------------------------------------------------


# Bytes of a block: some rows of one matrix; or several matrices, in some cases two of the three or all of them.
over_blocks = pytest.mark.parametrize("size", [64, 5000])


def both(name: str) -> pytest.MarkDecorator:
    """In torch, and in C for the dtypes and numbers of columns that the library takes."""

    def in_c(*arguments: Any, **named: Any) -> None:
        """For one group."""
        groups = [[tuple(arguments)]] if name == "reconstruct" else [[each] for each in arguments]
        lists = {key: [value] for key, value in named.items() if key == "out"}
        getattr(products, name)(*groups, **named | lists)

    return pytest.mark.parametrize("compute", [getattr(reference, f"{name}_reference"), in_c], ids=["torch", "C"])


@both("compensate_project")
@over_blocks
@pytest.mark.parametrize("dtype", DTYPES)
def test_compensate_project(compute: Any, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch):
    block_bytes(monkeypatch, size)
    for (n, m, r), (applied, growth) in itertools.product(SIZES, ((None, 1.0), (0.0, GROWTH), (1.0, GROWTH))):
        case = Case(n, m, r, dtype)
        G, M, P, Q, basis = stack(case.G), stack(case.M), case.P.double(), case.Q.double(), case.basis.double()
        out = torch.full_like(case.P, NAN)
        pending = None if applied is None else (case.P, case.Q, torch.tensor(applied))
        compute(case.G, case.M, pending, case.basis, growth=torch.tensor(growth, dtype=out.dtype), out=out)

        product = P @ Q.mT if applied else torch.zeros_like(M)
        truth = G + growth * (M - product)
        # r products and their sum, one subtraction, one multiplication, one addition.
        terms = growth * ((P.abs() @ Q.abs().mT if applied else 0) + M.abs()) + G.abs()
        error = rounding(r + 3, dtype) * terms
        assert_within(torch.stack(case.M), truth, error)
        slack = rounding(m, dtype) * ((terms + error) @ basis.abs())
        assert_within(out, truth @ basis, error @ basis.abs() + slack)
        assert torch.equal(stack(case.G), G)
        # Without error feedback.
        compute(case.G, None, None, case.basis, out=out.fill_(NAN))
        assert_within(out, G @ basis, rounding(m, dtype) * (G.abs() @ basis.abs()))


@both("backproject")
@over_blocks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_backproject(compute: Any, threads: int, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch):
    block_bytes(monkeypatch, size)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for n, m, r in SIZES:
        case = Case(n, m, r, dtype)
        P = case.P.double()
        for matrices in (case.M, case.G):
            out, again = torch.full_like(case.Q, NAN), torch.full_like(case.Q, NAN)
            compute(matrices, case.P, out=out)
            compute(matrices, case.P, out=again)
            M = stack(matrices)
            assert_within(out, M.mT @ P, rounding(n, dtype) * (M.abs().mT @ P.abs()))
            assert torch.equal(out, again)


@both("reconstruct")
@over_blocks
@pytest.mark.parametrize("dtype", DTYPES)
def test_reconstruct(compute: Any, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch):
    block_bytes(monkeypatch, size)
    for n, m, r in SIZES:
        case = Case(n, m, r, dtype)
        out, again = (spaced(torch.full((3, n, m), NAN, dtype=dtype)) for _ in range(2))
        compute(case.P, case.Q, out=out)
        compute(case.P, case.Q, out=again)
        P, Q = case.P.double(), case.Q.double()
        bound = rounding(r, dtype) * (P.abs() @ Q.abs().mT)
        # Narrow dtypes are rounded to once: half a unit in the last place, at least half the smallest denormal.
        info = torch.finfo(dtype)
        half = info.eps / 2 * ((P @ Q.mT).abs() + bound) + info.smallest_normal * info.eps / 2
        assert_within(torch.stack(out), P @ Q.mT, bound + (0 if dtype == wide(dtype) else half))
        assert torch.equal(torch.stack(out), torch.stack(again))


def test_without_the_library_a_product_that_was_not_applied_stays_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "library", lambda: None)
    monkeypatch.setattr(products, "most_columns", lambda: 0)
    M, P, Q = torch.ones(2, 5, 3), torch.ones(2, 5, 4), torch.ones(2, 3, 4)
    for applied in (False, torch.tensor(0.0)):
        products.subtract_product(M, P, Q, applied)
    assert torch.equal(M, torch.ones(2, 5, 3))


@both("reconstruct")
@over_blocks
@pytest.mark.parametrize("r", [1, 4])
def test_averages_have_the_same_bits_wherever_they_are_written(
    compute: Any, r: int, size: int, monkeypatch: pytest.MonkeyPatch
):
    """Workers may have their gradients at other distances. A zero has a sign, too."""
    block_bytes(monkeypatch, size)
    case = Case(16, 33, r, torch.float32)
    case.P[:, 3] = 0
    places = torch.empty(3, 16, 33), spaced(torch.empty(3, 16, 33)), [torch.empty(16, 33) for _ in range(3)][::-1]
    for out in places:
        matrices = blocks.together(list(out), 16, 33)
        compute(case.P, case.Q, out=matrices)
    bits = [torch.stack(list(out)).view(torch.int32) for out in places]
    assert all(torch.equal(bits[0], other) for other in bits[1:])


# Blocks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "view"),
    [
        ([0, 17, 34, 51], True),
        ([88], True),
        ([0, 12, 24, 40, 52], False),
        # Overlapping or descending.
        ([0, 6, 12], False),
        ([24, 12, 0], False),
    ],
)
def test_matrices_at_equal_distances_in_one_storage_are_one_view(starts: list[int], view: bool):
    memory = torch.arange(100.0)
    tensors = [memory[start : start + 12] for start in starts]
    for given, whole in ((tensors, view), ([*tensors, torch.zeros(2, 6)], False)):
        found = blocks.together(given, 4, 3)
        assert isinstance(found, Tensor) == whole
        for matrix, tensor in zip(found, given, strict=True):
            assert matrix.shape == (4, 3)
            assert matrix.data_ptr() == tensor.data_ptr()


def test_matrices_of_two_storages_are_no_view_whatever_their_addresses():
    """A storage may begin where the last one ends."""
    memory = torch.arange(24.0)
    halves = [torch.frombuffer(memory.numpy()[start : start + 12], dtype=torch.float32) for start in (0, 12)]
    assert halves[1].data_ptr() - halves[0].data_ptr() == 48
    assert isinstance(blocks.together(halves, 4, 3), list)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_each_thread_has_a_block_that_fits_its_cache_or_some_rows(threads: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    size = blocks.block_bytes(torch.device("cpu"))
    assert size == 2 * threads * max(blocks.cache_bytes(2), 1 << 20)
    for given in (torch.empty(1, 8192, 1024), torch.empty(512, 64, 256)):
        sizes = [blocks.load(given, *block, torch.float32).nbytes for block in blocks.blocks(given, torch.float32)]
        assert sum(sizes) == given.nbytes
        assert min(size, given.nbytes) / 2 < max(sizes) <= size
    few, wide = blocks.FEWEST_ROWS, torch.empty(1, 150, size // 4)
    rows = [blocks.load(wide, *block, torch.float32).shape[1] for block in blocks.blocks(wide, torch.float32)]
    assert rows == [few, few, 150 - 2 * few]


@pytest.mark.parametrize(("said", "size"), [("1024K\n", 1 << 20), ("512K\n", 1 << 19), ("", 0), (None, 0)])
def test_caches_are_as_large_as_the_system_says(said: str | None, size: int, tmp_path: Path, monkeypatch: Any):
    if said is not None:
        (tmp_path / "index2").mkdir()
        (tmp_path / "index2" / "size").write_text(said)
    monkeypatch.setattr(blocks, "CACHES", tmp_path)
    assert blocks.cache_bytes.__wrapped__(2) == size
