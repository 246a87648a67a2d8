"""Products in C: what ``test_reference.py``, which compares their values, does not ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton.ops import products
from powersgd_triton.ops.host import library
from powersgd_triton.ops.products import backproject, compensate_project, reconstruct, subtract_product
from powersgd_triton.ops.reference import compensate_project_reference
from tests.support.kernel_cases import INF, NAN

pytestmark = pytest.mark.skipif(not hasattr(library(), "powersgd_multiply"), reason="not built here")
COUNT, N, M = 3, 517, 270


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def stages(r: int, G: Tensor, errors: Tensor, growth: float = 1.0) -> list[Tensor]:
    """What all stages write."""
    left, right, basis = new(COUNT, N, r), new(COUNT, M, r), new(COUNT, M, r) + 1
    P, Q, average = torch.empty_like(left), torch.empty_like(right), torch.empty_like(G)
    compensate_project(G, errors, (left, right, True), basis, growth=torch.tensor(growth), out=P)
    backproject(errors, left, out=Q)
    reconstruct(left, right, out=average)
    return [errors, P, Q, average]


@pytest.mark.parametrize("r", [1, 4, 7])
def test_bits_depend_neither_on_threads_nor_on_where_matrices_lie(r: int):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            G = new(COUNT, N + threads, M)[:, threads:]
            results.append(stages(r, G.copy_(new(COUNT, N, M)), new(COUNT, N, M) * 2))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, results[0], result))


@pytest.mark.parametrize("r", [1, 4, 7])
def test_a_run_that_loads_errors_goes_on_with_the_same_bits(r: int):
    whole, parts = (new(COUNT, N, M) for _ in range(2))
    left, right, basis, G = new(COUNT, N, r), new(COUNT, M, r), new(COUNT, M, r) + 1, new(COUNT, N, M) + 1
    found = torch.full((2, COUNT, N, r), NAN)
    compensate_project(G, whole, (left, right, True), basis, out=found[0])
    subtract_product(parts, left, right, True)
    compensate_project(G, parts, None, basis, out=found[1])
    assert torch.equal(whole, parts)
    assert torch.equal(*found)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_reaches_its_row_of_the_product_and_no_error(value: float):
    G, errors = new(COUNT, N, M), new(COUNT, N, M)
    G[1, 5, M - 1] = G[2, 0, 3] = value
    expected, _, Q, _ = stages(4, torch.where(G.isfinite(), G, 0), errors.clone())
    errors, P, again, _ = stages(4, G, errors)
    assert torch.equal(errors, expected)
    assert torch.equal(Q, again)
    spoiled = torch.zeros(COUNT, N, dtype=torch.bool)
    spoiled[1, 5] = spoiled[2, 0] = True
    assert torch.equal(P.isfinite(), ~spoiled.unsqueeze(2).expand_as(P))


def test_errors_follow_a_loss_scale():
    G, errors = new(COUNT, N, M), new(COUNT, N, M)
    found, expected = (stages(4, G, errors * scale, growth)[0] for scale, growth in ((1, 4.0), (4, 1.0)))
    # The product is subtracted before errors are scaled.
    product = new(COUNT, N, 4) @ new(COUNT, M, 4).mT
    torch.testing.assert_close(found, expected - 3 * product, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("r", [4, 9])
def test_only_what_the_library_takes_is_changed_by_it(r: int, monkeypatch: pytest.MonkeyPatch):
    """It takes few columns in fp32, of matrices whose rows lie one after the other."""
    taken: list[bool] = []
    multiply = products._multiply
    monkeypatch.setattr(products, "_multiply", lambda *a, **k: taken.append(multiply(*a, **k)) or taken[-1])
    cases: list[tuple[Any, bool]] = [
        (new(COUNT, N, M), r <= products.MOST_COLUMNS),
        (list(new(COUNT, N, M)), r <= products.MOST_COLUMNS),
        (new(COUNT, N, M).double(), False),
        (new(COUNT, N, M).bfloat16(), False),
        (new(COUNT, N, M + 1)[..., :-1], False),
    ]
    for G, takes in cases:
        dtype = torch.float64 if getattr(G, "dtype", None) == torch.float64 else torch.float32
        basis, found, expected = new(COUNT, M, r).to(dtype), *torch.full((2, COUNT, N, r), NAN, dtype=dtype)
        errors = [new(COUNT, N, M).to(dtype) for _ in range(2)]
        compensate_project(G, errors[0], None, basis, out=found)
        compensate_project_reference(G, errors[1], None, basis, out=expected)
        assert taken == [takes]
        taken.clear()
        torch.testing.assert_close(errors[0], errors[1])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
