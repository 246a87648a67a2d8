"""Gradients in which noise is louder than the signal: what the noise hides from the basis is sent all the same."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton import Compressor
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
