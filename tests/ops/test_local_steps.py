"""What local steps do to a parameter, in C and in torch."""

import itertools

import pytest
import torch
from torch import Tensor

from powersgd_triton.ops import host, local_steps
from powersgd_triton.ops.local_steps import Parameter, go_on, subtract
from tests.support.checks import on_threads

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


def test_subtract():
    groups = [drawn(shape, 4) for shape in SHAPES]
    for has_copy in (True, False):
        extremes = subtract([(start, own, out, copy if has_copy else None) for start, own, out, copy in groups])
        for start, own, out, copy in groups:
            assert torch.equal(out, start - own)
            assert not has_copy or torch.equal(copy, own)
        largest = max(float(out.abs().max()) for _, _, out, _ in groups if out.numel())
        assert max(float(extreme.abs()) for extreme in extremes) == largest
    for (start, own, out, _), place in itertools.product(groups[1:], (0, -1)):
        for value in (torch.nan, torch.inf, -torch.inf):
            spoiled = own.clone()
            spoiled.view(-1)[place] = value
            assert not torch.stack(subtract([(start, spoiled, out, None)])).isfinite().all(), (place, value)
    torch.set_default_dtype(torch.float64)
    try:
        assert not torch.stack(subtract([(start, own * torch.nan, out, None)])).isfinite().any()
    finally:
        torch.set_default_dtype(torch.float32)


def values_of(parameters: list[Parameter]) -> list[Tensor]:
    found = dict(go_on(dict(zip("abcd", parameters, strict=False)), KEEP))
    return [found[name] for name in sorted(found)]


def test_go_on():
    for has_begun, has_error in itertools.product((True, False), repeat=2):
        groups = [drawn(shape, 4) for shape in SHAPES]
        expected = [s + has_begun * (own - begun) - KEEP * has_error * error for own, s, begun, error in groups]
        before = [shared.clone() for _, shared, _, _ in groups]
        values = values_of([(o, s, b if has_begun else None, e if has_error else None) for o, s, b, e in groups])
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
        for (own, shared, _, _), value, old in zip(groups, values, before, strict=True):
            assert torch.equal(shared, old)
            assert value.data_ptr() == (own if has_begun or has_error else shared).data_ptr()


def test_threads_divide_all_elements():
    for _ in on_threads(1, 3, 8):
        test_subtract()
        test_go_on()


def test_other_dtypes_and_strides(way: str):
    """These are torch's, beside others of the library."""
    own, shared, begun, error = drawn((6, 4), 4)
    expected = shared + own.bfloat16() - begun - KEEP * error
    half = own.bfloat16()
    values = values_of([(half, shared, begun, error), (own.clone(), shared, begun, error)])
    torch.testing.assert_close(values, [expected, shared + own - begun - KEEP * error])
    assert torch.equal(half, own.bfloat16())
    for other in (own.t().contiguous().t(), own.double()):
        assert local_steps._piece(shared, other) is None
        out = torch.empty_like(shared)
        subtract([(shared, other, out, begun)])
        assert torch.equal(out, shared - own)
        assert torch.equal(begun, own)
    assert (local_steps._piece(shared, own) is None) == (way == "torch")
    with pytest.raises(RuntimeError, match="size"):
        values_of([(torch.zeros(9, 4), shared, begun, error)])
