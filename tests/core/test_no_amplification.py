"""An average may lack a direction; it never amplifies one. Orthonormal bases, and exact averages at full rank.

Gradients of real models have a decaying spectrum, fewer directions than the rank, or both.
"""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import pytest
import torch
from torch import Tensor

from powersgd_triton import PowerSGDConfig
from powersgd_triton.ops import blocks
from tests.support.lockstep import Fleet
from tests.support.orthonormal import ORTHONORMAL, departure

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
    backend: str = "torch"
    steps: int = 10

    @classmethod
    def draw(cls, seed: int, largest: int, ranks: tuple[int, ...], backend: str) -> Case:
        chance = random.Random(seed)
        matrices = []
        for _ in range(chance.choice([1, 1, 3])):
            n, m = (chance.choice([1, largest // 3, largest, chance.randint(1, largest)]) for _ in range(2))
            k = chance.choice([0, min(n, m), min(n, m) // 2, chance.randint(0, min(n, m))])
            matrices.append((n, m, k, chance.choice(SPECTRA)))
        algorithm = chance.choice(["standard", "standard", "alternating"])
        return cls(matrices, chance.choice(ranks), chance.choice([1, 1, 3]), algorithm, backend)

    def check(self) -> None:
        config = PowerSGDConfig(
            rank=self.rank, min_compression_rate=0, algorithm=self.algorithm, backend=self.backend, explore_every=3
        )
        names = [str(index) for index in range(len(self.matrices))]
        shapes = {name: (n, m) for name, (n, m, _, _) in zip(names, self.matrices, strict=True)}
        fleet = Fleet(config, shapes, self.workers)
        generator = torch.Generator().manual_seed(1)
        for step in range(self.steps):
            given = [
                {name: matrix(*made, generator) for name, made in zip(names, self.matrices, strict=True)}
                for _ in range(self.workers)
            ]
            errors = fleet.errors()
            (run,) = fleet.step(given, [names])
            assert run.backend is not None
            bucket = run.backend.bucket
            for name in names:
                (segment,) = (segment for segment in run.layout.segments if segment.name == name)
                zero = torch.zeros(segment.n, segment.m)
                M = [G[name].double() + E.get(name, zero).double() for G, E in zip(given, errors, strict=True)]
                mean, average = torch.stack(M).mean(dim=0), run.averages[0][name].double()
                tiny = TINY * mean.numel()
                assert average.norm() <= LARGER * mean.norm() + tiny, (step, name, average.norm() / mean.norm())
                # The alternating algorithm sees only what lies in one basis, which need not be square.
                if step == 0 and segment.rank == min(segment.n, segment.m) and self.algorithm == "standard":
                    scale = sum(float(one.norm()) for one in M) / self.workers
                    assert (average - mean).norm() <= 1e-5 * scale + tiny, (name, (average - mean).norm() / scale)
            left, right = run.bases[-1]
            for basis in [*bucket.left(left), *bucket.right(right)]:
                assert departure(basis) <= ORTHONORMAL, step
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


@pytest.mark.parametrize("seed", [*range(24), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24, 600))])
def test_random_spectra(seed: int):
    Case.draw(
        seed, largest=300 if seed % 4 == 0 else 100, ranks=(1, 2, 4, 16, 33, 64, 100, 256), backend="torch"
    ).check()


@pytest.mark.parametrize("seed", range(6))
def test_random_spectra_in_small_blocks(seed: int):
    with mock.patch.object(blocks, "block_bytes", return_value=1 << 12):
        Case.draw(1000 + seed, largest=120, ranks=(1, 4, 64, 120), backend="torch").check()


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 60))])
def test_random_spectra_in_kernels(seed: int):
    case = Case.draw(2000 + seed, largest=48, ranks=(1, 4, 16, 33, 40), backend="triton")
    dataclasses.replace(case, steps=3).check()


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k", "rank", "spectrum"), [row for row in TABLE if row[0] <= 128])
def test_fewer_directions_than_the_rank_in_kernels(n: int, k: int, rank: int, spectrum: str):
    Case([(n, n, k, spectrum)], rank, backend="triton", steps=1).check()
