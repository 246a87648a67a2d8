"""What holds for every input: conservation, orthonormal factors, recovery from zero and from non-finite gradients."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton import Compressor, PowerSGDConfig

SHAPES = {
    "square": (40, 40), "tall": (90, 7), "wide": (5, 80), "conv": (64, 3, 3, 3), "row": (1, 50), "column": (50, 1),
    "bias": (40,), "scalar": (), "empty": (0, 5), "twin": (40, 40),
}  # fmt: skip


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("batch_by_shape", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rank", [1, 3, 64])
def test_nothing_is_lost(rank: int, dtype: torch.dtype, batch_by_shape: bool) -> None:
    compressor = Compressor(PowerSGDConfig(rank=rank, min_compression_rate=0, batch_by_shape=batch_by_shape), SHAPES)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    out = {name: torch.full(shape, float("nan"), dtype=compute) for name, shape in SHAPES.items()}
    owed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    largest = 0.0
    steps = 10
    for step in range(steps):
        given = gradients(step, dtype)
        compressed = compressor.compress(given)
        compressor.decompress(compressed, out=out)
        for P, _ in compressed.factors().values():
            assert (P.mT @ P - torch.eye(P.shape[1])).abs().max() < 1e-5
        for name, gradient in given.items():
            owed[name] += gradient.double() - out[name].double()
        largest = max([largest, *(float(error.abs().max()) for error in compressor.error().values())])
    error = compressor.error()
    # Each step rounds M, the product of up to 64 terms and the difference, all of the size of M.
    tolerance = 8 * steps * torch.finfo(compute).eps * (largest + 5)
    for name, difference in owed.items():
        assert (difference - error.get(name, torch.zeros(()))).abs().sum() <= tolerance * difference.numel()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_non_finite_gradient_is_reported_and_forgotten(bad: float) -> None:
    compressor = Compressor(PowerSGDConfig(rank=2), {"a": (30, 40), "b": (20, 40), "c": (7,)})

    def step(number: int, poison: bool = False) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        given = {
            name: torch.randn(s, generator=generator) for name, s in (("a", (30, 40)), ("b", (20, 40)), ("c", (7,)))
        }
        if poison:
            given["a"][3, 4] = bad
        out = compressor.decompress(compressor.compress(given))
        assert isinstance(out, dict)
        return out

    for number in range(3):
        step(number)
    before = compressor.error()
    poisoned = step(3, poison=True)
    assert not poisoned["a"].isfinite().any()
    assert poisoned["c"].isfinite().all()
    for name, error in compressor.error().items():
        # M = G + E is rounded once when G enters it, and the difference once.
        assert (error - before[name]).abs().max() <= 2 * torch.finfo(torch.float32).eps * (before[name].abs().max() + 5)
    assert all(gradient.isfinite().all() for gradient in step(4).values())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_sleeping_layer_wakes_up_and_gets_what_it_is_owed(rank: int) -> None:
    compressor = Compressor(PowerSGDConfig(rank=rank), {"asleep": (48, 64), "awake": (48, 64)})
    generator = torch.Generator().manual_seed(0)
    owed = torch.randn(48, rank, generator=generator) @ torch.randn(rank, 64, generator=generator)
    received = torch.zeros(48, 64)
    for step in range(105):
        given = {
            "asleep": torch.zeros(48, 64) if step < 5 else owed.clone(),
            "awake": torch.randn(48, 64, generator=generator),
        }
        compressor.decompress(compressor.compress(given), out=given)
        assert all(gradient.isfinite().all() for gradient in given.values())
        received += given["asleep"]
        if step < 5:
            assert not received.any()
        if step == 7:
            assert received.any()
    assert (received - 100 * owed).norm() <= 1e-4 * (100 * owed).norm()
