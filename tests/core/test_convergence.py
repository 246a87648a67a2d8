"""Averages send what noise hides from the basis. They may lack a direction, and never amplify one.

Bases are orthonormal, and averages exact at full rank. Gradients of real models have a decaying spectrum, fewer
directions than the rank, or both.
"""

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import everything, step
from tests.support.lockstep import Fleet
from tests.support.orthonormal import ORTHONORMAL, departure
from tests.support.thinned import slow

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


def test_a_signal_that_noise_hides_from_the_basis_is_sent() -> None:
    assert hidden_signal(1000.0, 3, seed=0, steps=1200) <= 0.05
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


LARGER = 1 + 1e-5
"""How much larger than the compensated gradient an average may be, as a factor of their norms."""

TINY = 2.0**-126
"""What rounding may add to each element where numbers are denormal."""

SPECTRA = ["flat", *(f"1e-{decades}" for decades in (1, 2, 4, 6, 8, 10, 12)), "clusters", "giant", "denormal", "twins"]


def matrix(n: int, m: int, k: int, spectrum: str, generator: torch.Generator) -> Tensor:
    """A random n × m matrix of rank k in fp32."""

    def orthonormal(rows: int) -> Tensor:
        Q: Tensor = torch.linalg.qr(torch.randn(rows, k, dtype=torch.float64, generator=generator))[0]
        return Q

    values = torch.ones(k, dtype=torch.float64)
    if spectrum.startswith("1e-"):
        values = torch.logspace(0, -float(spectrum[3:]), k, dtype=torch.float64)
    elif spectrum == "clusters":
        values[k // 2 :] = 1e-5
    elif spectrum == "giant":
        values[:1] = 1e12
    elif spectrum == "denormal":
        values *= 1e-38
    G = (orthonormal(n) * values @ orthonormal(m).T).float()
    if spectrum == "twins":
        # Columns, and rows, that are equal to the last bit.
        G[:, m // 2 :] = G[:, : m - m // 2].clone()
        G[n // 2 :] = G[: n - n // 2].clone()
    return G


@dataclasses.dataclass
class Case:
    """Matrices [n, m] of rank k with spectra, in one bucket."""

    matrices: list[tuple[int, int, int, str]]
    rank: int
    workers: int = 1
    algorithm: str = "standard"
    steps: int = 10

    @classmethod
    def draw(cls, seed: int, largest: int, ranks: tuple[int, ...]) -> "Case":
        chance = random.Random(seed)
        matrices = []
        for _ in range(chance.choice([1, 1, 3])):
            n, m = (chance.choice([1, largest // 3, largest, chance.randint(1, largest)]) for _ in range(2))
            k = chance.choice([0, min(n, m), min(n, m) // 2, chance.randint(0, min(n, m))])
            matrices.append((n, m, k, chance.choice(SPECTRA)))
        algorithm = chance.choice(["standard", "standard", "alternating"])
        return cls(matrices, chance.choice(ranks), chance.choice([1, 1, 3]), algorithm)

    def check(self) -> None:
        config = everything(self.rank, algorithm=self.algorithm, backend="torch", explore_every=3)
        names = [str(index) for index in range(len(self.matrices))]
        shapes = {name: (n, m) for name, (n, m, _, _) in zip(names, self.matrices, strict=True)}
        fleet = Fleet(config, shapes, self.workers)
        generator = torch.Generator().manual_seed(1)
        for number in range(self.steps):
            given = [
                {name: matrix(*made, generator) for name, made in zip(names, self.matrices, strict=True)}
                for _ in range(self.workers)
            ]
            errors = fleet.errors()
            (run,) = fleet.step(given, [names])
            bucket = run.backend.bucket
            for name in names:
                (segment,) = (segment for segment in run.layout.segments if segment.name == name)
                zero = torch.zeros(segment.n, segment.m)
                M = [G[name].double() + E.get(name, zero).double() for G, E in zip(given, errors, strict=True)]
                mean, average = torch.stack(M).mean(dim=0), run.averages[0][name].double()
                tiny = TINY * mean.numel()
                assert average.norm() <= LARGER * mean.norm() + tiny, (number, name, average.norm() / mean.norm())
                # The alternating algorithm sees only what lies in one basis, which need not be square.
                if number == 0 and segment.rank == min(segment.n, segment.m) and self.algorithm == "standard":
                    scale = sum(float(one.norm()) for one in M) / self.workers
                    assert (average - mean).norm() <= 1e-5 * scale + tiny, (name, (average - mean).norm() / scale)
            left, right = run.bases[-1]
            for basis in [*bucket.left(left), *bucket.right(right)]:
                assert departure(basis) <= ORTHONORMAL, number
            assert not any(int(count.sum()) for count in bucket.zeroed)


TABLE = [
    (n, k, rank, f"1e-{decades}")
    for n, k, rank in ((256, 128, 256), (256, 64, 256), (128, 100, 128), (256, 64, 128), (96, 80, 96), (100, 90, 100))
    for decades in (0, 2, 4, 6, 8, 12)
]
"""Square gradients with fewer directions than the rank, whose products hold rounding errors in the others."""


@pytest.mark.parametrize(("n", "k", "rank", "spectrum"), TABLE)
def test_fewer_directions_than_the_rank(n: int, k: int, rank: int, spectrum: str):
    Case([(n, n, k, spectrum)], rank, steps=2).check()


@pytest.mark.parametrize("seed", [*range(12), *slow(range(12, 600))])
def test_random_spectra(seed: int):
    Case.draw(seed, 300 if seed % 4 == 0 else 100, (1, 2, 4, 16, 33, 64, 100, 256)).check()
