"""Gradients in which noise is louder than the signal: what the noise hides from the basis is sent all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig

RATE = 0.01


def _compressor(shape: tuple[int, int], rank: int, seed: int, explore_every: int = 16) -> Compressor:
    config = PowerSGDConfig(rank=rank, min_compression_rate=0, seed=seed, explore_every=explore_every)
    return Compressor(config, {"X": shape})


def _descend(compressor: Compressor, X: Tensor, gradient: Tensor) -> None:
    average = torch.empty_like(X)
    compressor.decompress(compressor.compress({"X": gradient}), {"X": average})
    X -= RATE * average


def _hidden_signal(sigma: float, rank: int, seed: int, steps: int, **options: int) -> float:
    """Minimize x² / 2 for X = diag(x, …), with noise of size sigma in ``rank`` other elements of the diagonal.

    After Xie, Chen, Yuan (arXiv:2509.11254).
    """
    compressor = _compressor((rank + 1, rank + 1), rank, seed, **options)
    generator = torch.Generator().manual_seed(seed)
    X = torch.zeros(rank + 1, rank + 1)
    X[0, 0] = 1
    for _ in range(steps):
        signs = torch.randint(2, (rank,), generator=generator) * 2.0 - 1
        _descend(compressor, X, torch.diag(torch.cat([X[0, :1], sigma * signs])))
    return abs(float(X[0, 0]))


@pytest.mark.parametrize("rank", [1, 3])
def test_a_signal_that_noise_hides_from_the_basis_is_sent(rank: int) -> None:
    assert _hidden_signal(1000.0, rank, seed=0, steps=1200) <= 0.05


def test_without_exploration_the_signal_is_never_sent() -> None:
    assert _hidden_signal(1000.0, 1, seed=0, steps=300, explore_every=0) >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 500.0, 1000.0])
def test_a_hidden_signal_is_sent_at_any_size_of_the_noise(sigma: float, rank: int, seed: int) -> None:
    assert _hidden_signal(sigma, rank, seed, steps=4000) <= 0.05


@pytest.mark.parametrize("rank", [1, 4])
def test_noise_of_ten_times_the_spectrum_does_not_hide_a_signal(rank: int) -> None:
    """The singular vectors of the noise are orthogonal to those of the signal, and stay the same in all steps."""
    compressor, generator = _compressor((24, 32), rank, seed=0), torch.Generator().manual_seed(1)
    left = torch.linalg.qr(torch.randn(24, 24, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0]
    signal, noise = slice(0, 2), slice(2, 2 + rank)
    spectrum = torch.arange(1, 25).rsqrt()
    X = left[:, signal] * spectrum[signal] @ right[:, signal].T
    start = float(X.norm())
    for _ in range(1200):
        signs = torch.randint(2, (rank,), generator=generator) * 2.0 - 1
        loud = left[:, noise] * (10 * spectrum[:rank] * signs) @ right[:, noise].T
        seen = left[:, signal].T @ X @ right[:, signal]
        _descend(compressor, X, left[:, signal] @ seen @ right[:, signal].T + loud)
    assert float((left[:, signal].T @ X @ right[:, signal]).norm()) <= 0.01 * start


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_gradient_of_the_rank_of_the_basis_is_sent_completely_in_each_step(iterations: int) -> None:
    """The column that explores keeps enough of the direction that it had."""
    config = PowerSGDConfig(rank=3, min_compression_rate=0, iterations=iterations)
    compressor, generator = Compressor(config, {"X": (40, 60)}), torch.Generator().manual_seed(0)
    G = torch.randn(40, 3, generator=generator) @ torch.randn(3, 60, generator=generator)
    average = torch.empty_like(G)
    for step in range(40):
        compressor.decompress(compressor.compress({"X": G}), {"X": average})
        if step > 2:
            assert torch.allclose(average, G, rtol=0, atol=2e-4 * float(G.abs().max()))
