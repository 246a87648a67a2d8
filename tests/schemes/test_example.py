"""The example of the documentation that is to be read: it does what the package does."""

import functools
import runpy
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.distributed import make_test
from tests.support.programs import ROOT, output_of

EXAMPLE = ROOT / "docs" / "examples" / "powersgd_simple.py"
MATRICES = [(30, 20), (12, 40), (16, 9)]
VECTOR = 7
STEPS = 8
# Relative difference that rounding may add in each step: some units of the last place.
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14}


def named(matrices: list[Tensor]) -> dict[str, Tensor]:
    return {str(index): matrix for index, matrix in enumerate(matrices)}


def averages_and_errors_are_those_of_the_package(worker: int, world_size: int, *, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    config = PowerSGDConfig(rank=4, min_compression_rate=0, explore_every=0, start_iter=0)
    simple: Any = runpy.run_path(str(EXAMPLE))["SimplePowerSGD"](MATRICES, rank=4)
    shapes: dict[str, Any] = {**dict(zip("012", MATRICES, strict=True)), "vector": (VECTOR,)}
    compressor = Compressor(config, shapes)
    # Both begin with the example's bases, and without errors.
    compressor.compress({name: torch.ones(shape) for name, shape in shapes.items()})
    state = compressor.state_dict()
    for name, basis in named(simple.bases).items():
        state["matrices"][name] = {"basis": basis, "error": torch.zeros(shapes[name])}
    compressor.load_state_dict(state)
    generator = torch.Generator().manual_seed(worker)
    # With directions that stay, like those of real gradients. Of pure noise, differences grow from step to step.
    signals = [torch.randn(n, 4, generator=generator) @ torch.randn(4, m, generator=generator) for n, m in MATRICES]
    for step in range(STEPS):
        given = [signal + 0.3 * torch.randn(signal.shape, generator=generator) for signal in signals]
        vector = torch.randn(VECTOR, generator=generator)
        expected = compressor.decompress(compressor.compress({**named(given), "vector": vector}))
        averages, (mean,) = simple.average(given, [vector])
        assert isinstance(expected, dict)
        found = {**named(averages), "vector": mean}
        errors = compressor.error()
        for name, matrix in [*found.items(), *named(simple.errors).items()]:
            wanted = expected.pop(name) if name in expected else errors[name]
            distance = (matrix - wanted).norm() / wanted.norm()
            assert distance <= (step + 1) * ROUNDING[dtype], (step, name, float(distance))


CASES = {str(dtype): functools.partial(averages_and_errors_are_those_of_the_package, dtype=dtype) for dtype in ROUNDING}
test_two_workers = make_test(CASES, 2)


@pytest.mark.slow
def test_the_example_finds_the_minimum() -> None:
    said = output_of("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE)
    distances = [float(line.split()[-1]) for line in said.splitlines()]
    assert len(distances) == 5
    assert distances[0] == 1
    assert distances[-1] < 1e-3
