"""Gradients in which noise is louder than the signal: what the noise hides from the basis is sent all the same."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import everything, step

RATE = 0.01


def hidden_signal(sigma: float, rank: int, seed: int, steps: int, **options: int) -> float:
    """Minimize x² / 2 for X = diag(x, …), with noise of size sigma in ``rank`` other elements of the diagonal.

    After Xie, Chen, Yuan (arXiv:2509.11254).
    """
    X = torch.zeros(rank + 1, rank + 1)
    compressor = Compressor(everything(rank, seed=seed, **{"explore_every": 16, **options}), {"X": X.shape})
    generator = torch.Generator().manual_seed(seed)
    X[0, 0] = 1
    for _ in range(steps):
        signs = torch.randint(2, (rank,), generator=generator) * 2.0 - 1
        X -= RATE * step(compressor, {"X": torch.diag(torch.cat([X[0, :1], sigma * signs]))})["X"]
    return abs(float(X[0, 0]))


@pytest.mark.parametrize("rank", [1, 3])
def test_a_signal_that_noise_hides_from_the_basis_is_sent(rank: int) -> None:
    assert hidden_signal(1000.0, rank, seed=0, steps=1200) <= 0.05
    assert hidden_signal(1000.0, 1, seed=0, steps=300, explore_every=0) >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 500.0, 1000.0])
def test_a_hidden_signal_is_sent_at_any_size_of_the_noise(sigma: float, rank: int) -> None:
    assert all(hidden_signal(sigma, rank, seed, steps=4000) <= 0.05 for seed in (0, 1))


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_gradient_of_the_rank_of_the_basis_is_sent_completely_in_each_step(iterations: int) -> None:
    """The column that explores keeps enough of the direction that it had."""
    compressor = Compressor(everything(3, iterations=iterations), {"X": (40, 60)})
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(40, 3, generator=generator) @ torch.randn(3, 60, generator=generator)
    for number in range(40):
        average = step(compressor, {"X": G})["X"]
        assert number <= 2 or torch.allclose(average, G, rtol=0, atol=2e-4 * float(G.abs().max()))


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
