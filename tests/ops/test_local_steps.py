"""What local steps do to a parameter, in C and in torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from powersgd_triton.ops import host, local_steps
from powersgd_triton.ops.local_steps import go_on, subtract

SHAPES = ((0,), (1,), (7, 5), (301, 300))
KEEP = 0.9


@pytest.fixture(params=["C", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "C" and host.library() is None:
        pytest.skip("the library in C was not built")
    monkeypatch.setattr(local_steps, "library", lambda: host.library() if request.param == "C" else None)
    return str(request.param)


def drawn(shape: tuple[int, ...], number: int) -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(number)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_subtract(shape: tuple[int, ...]):
    start, own, out, copy = drawn(shape, 4)
    for given in (copy, None):
        extremes = subtract(start, own, out=out, copy=given)
        assert torch.equal(out, start - own)
        assert max((float(extreme.abs()) for extreme in extremes), default=0.0) == max(
            out.abs().flatten().tolist() or [0]
        )
    assert torch.equal(copy, own)
    for place, value in itertools.product((0, -1), (torch.nan, torch.inf, -torch.inf) if own.numel() else ()):
        spoiled = own.clone()
        spoiled.view(-1)[place] = value
        assert not torch.stack(subtract(start, spoiled, out=out)).isfinite().all(), (place, value)
    torch.set_default_dtype(torch.float64)
    try:
        extremes = subtract(start, own * torch.nan, out=out)
        assert not own.numel() or not torch.stack(extremes).isfinite().any()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_go_on(shape: tuple[int, ...]):
    for has_begun, has_error in itertools.product((True, False), repeat=2):
        own, shared, begun, error = drawn(shape, 4)
        expected = shared + has_begun * (own - begun) - KEEP * has_error * error
        before = shared.clone()
        value = go_on(own, shared, begun if has_begun else None, error if has_error else None, KEEP)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(shared, before)
        assert value.data_ptr() == (own if has_begun or has_error else shared).data_ptr()


def test_other_dtypes_and_strides(way: str):
    """These are torch's."""
    own, shared, begun, error = drawn((6, 4), 4)
    expected = shared + own.bfloat16() - begun - KEEP * error
    half = own.bfloat16()
    torch.testing.assert_close(go_on(half, shared, begun, error, KEEP), expected)
    assert torch.equal(half, own.bfloat16())
    for other in (own.t().contiguous().t(), own.double()):
        assert local_steps._library(shared, other) is None
        out = torch.empty_like(shared)
        subtract(shared, other, out=out, copy=begun)
        assert torch.equal(out, shared - own)
        assert torch.equal(begun, own)
    assert (local_steps._library(shared, own) is None) == (way == "torch")
    with pytest.raises(RuntimeError, match="size"):
        go_on(torch.zeros(9, 4), shared, begun, error, KEEP)
