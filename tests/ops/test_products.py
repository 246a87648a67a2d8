"""Products in C: what ``test_reference.py``, which compares their values, does not ask."""

import ctypes
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton.ops import blocks, products
from powersgd_triton.ops.host import library
from powersgd_triton.ops.products import (
    backproject,
    compensate_backproject,
    compensate_project,
    reconstruct,
    subtract_product,
)
from powersgd_triton.ops.reference import compensate_backproject_reference, compensate_project_reference
from tests.support.checks import on_threads
from tests.support.kernel_cases import INF, NAN

pytestmark = pytest.mark.skipif(
    not hasattr(library(), "powersgd_multiply"), reason="needs GCC 12 or later at installation"
)
COUNT, N, M = 3, 517, 270
PROJECT = compensate_project, compensate_project_reference
BACKPROJECT = compensate_backproject, compensate_backproject_reference


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def stages(r: int, G: Tensor, errors: Tensor) -> list[Tensor]:
    """What all stages write."""
    left, right, basis = new(COUNT, N, r), new(COUNT, M, r), new(COUNT, M, r) + 1
    P, Q, average = torch.empty_like(left), torch.empty_like(right), torch.empty_like(G)
    compensate_project([G], [errors], [(left, right, True)], [basis], out=[P])
    backproject([errors], [left], out=[Q])
    reconstruct([(left, right)], out=[average])
    return [errors, P, Q, average]


@pytest.mark.parametrize("r", [1, 4, 7, 16, 21])
def test_bits_depend_neither_on_threads_nor_on_where_matrices_lie(r: int):
    results = []
    for threads in on_threads(1, 2, 3):
        G = new(COUNT, N + threads, M)[:, threads:]
        results.append(stages(r, G.copy_(new(COUNT, N, M)), new(COUNT, N, M) * 2))
    for result in results[1:]:
        assert all(map(torch.equal, results[0], result))


def test_groups_in_one_call_have_the_bits_of_each_alone():
    shapes = [(1, 3, 900, 4), (2, 517, 270, 4), (1, 9, 5, 3), (3, 65, 40, 21), (1, 700, 33, 2)]

    def run(chosen: list[tuple[int, int, int, int]]) -> list[list[Tensor]]:
        G, M = ([new(count, n, m) + i for count, n, m, _ in chosen] for i in (0, 1))
        lefts, rights = ([new(shape[0], shape[i], shape[3]) for shape in chosen] for i in (1, 2))
        P, Q, average = ([torch.full_like(x, NAN) for x in like] for like in (lefts, rights, G))
        product = [(left, right, True) for left, right in zip(lefts, rights, strict=True)]
        compensate_project(G, M, product, rights, out=P)
        backproject(M, P, out=Q)
        reconstruct(list(zip(P, Q, strict=True)), out=average)
        return [list(group) for group in zip(M, P, Q, average, strict=True)]

    alone = [run([shape])[0] for shape in shapes]
    for _ in on_threads(1, 2, 3, 8):
        for found, expected in zip(run(shapes), alone, strict=True):
            assert all(map(torch.equal, found, expected))


@pytest.mark.skipif(products.most_columns() <= products.FEW, reason="needs AVX2")
@pytest.mark.parametrize("r", [9, 16, 21, 64])
def test_averages_and_errors_have_the_same_bits_with_vectors_of_any_width(r: int, monkeypatch: pytest.MonkeyPatch):
    """A job's processors may differ. Where there is AVX-512, this also runs the code for those without it."""
    code: Any = library()
    given = (new(COUNT, N, M), new(COUNT, N, M) * 2)

    def multiply(stages: Any, _count: int, _threads: int) -> None:
        for stage in stages:
            strips = -(-stage.m // 256) if stage.kind == products.BACKPROJECT else stage.n
            code.powersgd_panels(ctypes.byref(stage), ctypes.c_int64(0), ctypes.c_int64(stage.count * strips))

    usual = stages(r, given[0], given[1].clone())
    monkeypatch.setattr(code, "powersgd_multiply", multiply)
    narrow = stages(r, given[0], given[1].clone())
    for name, found, expected in zip(("errors", "P", "Q", "average"), narrow, usual, strict=True):
        assert name in "PQ" or torch.equal(found, expected), name
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("k", "r"), [(1, 1), (4, 4), (7, 7), (21, 21), (4, 16), (16, 4), (9, 64), (64, 17)])
def test_a_run_that_loads_errors_goes_on_with_the_same_bits(k: int, r: int):
    whole, parts = (new(COUNT, N, M) for _ in range(2))
    left, right, basis, G = new(COUNT, N, k), new(COUNT, M, k), new(COUNT, M, r) + 1, new(COUNT, N, M) + 1
    found = torch.full((2, COUNT, N, r), NAN)
    compensate_project([G], [whole], [(left, right, True)], [basis], out=[found[0]])
    subtract_product(parts, left, right, True)
    compensate_project([G], [parts], [None], [basis], out=[found[1]])
    assert torch.equal(whole, parts)
    assert torch.equal(*found)


@pytest.mark.parametrize("r", [4, 9, 21])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_reaches_its_row_of_the_product_and_no_error(value: float, r: int):
    G, errors = new(COUNT, N, M), new(COUNT, N, M)
    G[1, 5, M - 1] = G[2, 0, 3] = value
    expected, _, Q, _ = stages(r, torch.where(G.isfinite(), G, 0), errors.clone())
    before = errors.clone()
    errors, P, again, _ = stages(r, G, errors)
    assert torch.equal(errors, expected)
    assert torch.equal(Q, again)
    spoiled = torch.zeros(COUNT, N, dtype=torch.bool)
    spoiled[1, 5] = spoiled[2, 0] = True
    assert torch.equal(P.isfinite(), ~spoiled.unsqueeze(2).expand_as(P))
    # From the left, it reaches that of its column.
    product = new(COUNT, N, r), new(COUNT, M, r), True
    compensate_backproject([G], [before], [product], [P.nan_to_num_(1.0)], out=[Q])
    assert torch.equal(before, expected)
    assert (~Q.isfinite()).nonzero()[:, :2].unique(dim=0).tolist() == [[1, M - 1], [2, 3]]


@pytest.mark.parametrize("r", [4, 9, 65])
def test_only_what_the_library_takes_is_changed_by_it(r: int, monkeypatch: pytest.MonkeyPatch):
    """It takes fp32. Gradients may have other dtypes, since the errors do not show which they had."""
    taken: list[bool] = []
    add = products._add

    def noted(*arguments: Any, **named: Any) -> bool:
        taken.append(add(*arguments, **named))
        return taken[-1]

    monkeypatch.setattr(products, "_add", noted)
    monkeypatch.setattr(blocks, "block_bytes", lambda _: 1 << 16)
    few, fp32 = r <= products.most_columns(), torch.float32
    cases: list[tuple[Any, torch.dtype, bool]] = [
        (new(COUNT, N, M), fp32, few),
        (list(new(COUNT, N, M)), fp32, few),
        (new(COUNT, N, M).bfloat16(), fp32, few),
        (new(COUNT, N, M + 1)[..., :-1], fp32, few),
        (new(COUNT, N, M), torch.bfloat16, False),
        (new(COUNT, N, M).double(), torch.float64, False),
    ]
    for (G, dtype, takes), left in itertools.product(cases, (False, True)):
        factors = torch.float64 if dtype == torch.float64 else fp32
        first, second, basis = new(COUNT, N, r).to(factors), new(COUNT, M, r).to(factors), new(COUNT, M, r).to(factors)
        compute, expect = BACKPROJECT if left else PROJECT
        rows = first if left else basis
        found, expected = torch.full((2, *(second if left else first).shape), NAN, dtype=factors)
        errors = [new(COUNT, N, M).to(dtype) for _ in range(2)]
        compute([G], [errors[0]], [(first, second, True)], [rows], out=[found])
        assert any(taken[:1]) == takes
        taken.clear()
        expect(G, errors[1], (first, second, True), rows, out=expected)
        torch.testing.assert_close(errors[0], errors[1])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
