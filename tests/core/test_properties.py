"""Recovery from zero and from non-finite gradients."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import gradients, step


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_non_finite_gradient_is_reported_and_forgotten(bad: float) -> None:
    shapes = {"a": (30, 40), "b": (20, 40), "c": (7,)}
    compressor = Compressor(PowerSGDConfig(rank=2), shapes)
    for number in range(3):
        step(compressor, gradients(number, shapes))
    before, given = compressor.error(), gradients(3, shapes)
    given["a"][3, 4] = bad
    poisoned = step(compressor, given)
    assert not poisoned["a"].isfinite().any()
    assert poisoned["c"].isfinite().all()
    for name, error in compressor.error().items():
        # M = G + E is rounded once when G enters it, and the difference once.
        assert (error - before[name]).abs().max() <= 2 * torch.finfo(torch.float32).eps * (before[name].abs().max() + 5)
    assert all(gradient.isfinite().all() for gradient in step(compressor, gradients(4, shapes)).values())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_sleeping_layer_wakes_up_and_gets_what_it_is_owed(rank: int) -> None:
    compressor = Compressor(PowerSGDConfig(rank=rank), {"asleep": (48, 64), "awake": (48, 64)})
    generator = torch.Generator().manual_seed(0)
    owed = torch.randn(48, rank, generator=generator) @ torch.randn(rank, 64, generator=generator)
    received = torch.zeros(48, 64)
    for number in range(105):
        awake = torch.randn(48, 64, generator=generator)
        given = {"asleep": owed.clone() if number >= 5 else torch.zeros(48, 64), "awake": awake}
        compressor.decompress(compressor.compress(given), out=given)
        assert all(gradient.isfinite().all() for gradient in given.values())
        received += given["asleep"]
        if number < 5:
            assert not received.any()
        if number == 7:
            assert received.any()
    assert (received - 100 * owed).norm() <= 1e-4 * (100 * owed).norm()
