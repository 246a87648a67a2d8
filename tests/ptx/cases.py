"""What reaches most instructions of all kernels of a step. Not collected by itself: see ``plugin.py``.

Results are compared with fp64 truth or with the reference's bits. Findings fail a test too.
"""

import math

import pytest
import torch

from powersgd_triton import Compressor
from powersgd_triton.kernels.configurations import architecture, select_configuration
from powersgd_triton.kernels.wire import TritonWire
from powersgd_triton.layout.wire_format import FORMATS, WirePlan
from powersgd_triton.ops.wire import TorchWire
from tests.support.checks import CPU, everything
from tests.support.kernel_cases import INF, NAN, rounding
from tests.support.kernel_checks import Values, exchange
from tests.support.orthonormal import ORTHONORMAL, departure
from tests.support.thinned import slow

RANKS = (1, 4, 32, 40)
SHAPES: dict[str, tuple[int, ...]] = {
    # Whole and broken tiles, rows at multiples of 16 bytes and others, one row, and what bypasses compression.
    **{"aligned": (136, 64), "odd": (75, 69), "row": (1, 50), "short": (5, 9)},
    **{"bias": (7,), "long bias": (1030,), "scalar": ()},
}


def gradients(seed: int, dtype: torch.dtype, shift: int = 0, low: bool = False) -> Values:
    """Random values, each ``shift`` elements behind a multiple of 16 bytes; products of rank 2 and zeros if ``low``."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator)
        if low and len(shape) == 2:
            weak = torch.tensor([1, 1e-3]) if name == "aligned" else torch.zeros(2)
            left, right = (torch.randn(size, 2, generator=generator) for size in shape)
            values = left * weak @ right.T
        memory = torch.zeros(values.numel() + shift, dtype=dtype)
        memory[shift:] = values.reshape(-1).to(dtype)
        found[name] = memory[shift:].view(shape)
    return found


@pytest.mark.parametrize("algorithm", ["standard", "alternating"])
@pytest.mark.parametrize("dtype", ["float32", *slow(["bfloat16", "float16"])])
@pytest.mark.parametrize("rank", RANKS)
def test_nothing_is_lost(rank: int, dtype: str, algorithm: str):
    """Σ G = Σ Ĝ + E over steps that count, whatever the gradients: not finite, zero, of low rank."""
    error_dtype = "bfloat16" if dtype == "float16" else None
    fields = {"algorithm": algorithm, "error_dtype": error_dtype, "backend": "triton", "explore_every": 2}
    compressor = Compressor(everything(rank, **fields), SHAPES)
    matrices = [name for name, shape in SHAPES.items() if len(shape) == 2]
    total = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in matrices}
    size = dict.fromkeys(matrices, 0.0)
    not_finite = {1: ("aligned", NAN), 4: ("odd", INF)}
    for number in range(6):
        given = gradients(number, getattr(torch, dtype), shift=number % 2, low=number in (2, 3))
        if number in not_finite:
            name, value = not_finite[number]
            given[name][0, 1] = value
        compressed = compressor.compress(given)
        out = compressor.decompress(compressed)
        assert isinstance(out, dict)
        if number in not_finite:
            assert not any(out[name].isfinite().any() for name in ("odd", "aligned"))
            continue
        for name in matrices:
            left, right = (factor.double() for factor in compressed.factors()[name])
            assert min(departure(left[None]), departure(right[None])) <= ORTHONORMAL
            total[name] += given[name].double() - left @ right.T
            size[name] += float(given[name].double().norm() + 2 * left.norm() * right.norm())
    # Each step rounds M, which holds what all steps before left, and a product of r terms in it; once more for E.
    for name, error in compressor.error().items():
        stored = torch.finfo(torch.bfloat16).eps / 2 if error_dtype else 0.0
        bound = 6 * (rounding(rank + 3, CPU) + stored) * size[name]
        assert float((total[name] - error.double()).norm()) <= bound, name


@pytest.mark.parametrize("width", ["int4", *slow(["bfloat16", "float16", "int8"])])
@pytest.mark.parametrize("rank", RANKS)
def test_wire(rank: int, width: str):
    """Three workers send a narrow message."""
    workers, whole, broken = 3, [(2, 128, rank)], [(1, 133, rank), (1, 36, max(1, rank // 2)), (1, 5, min(rank, 3))]
    for factors, own in ((whole, True), (broken, True), (broken, False)):
        # Where all rows of the messages start at multiples of 16 bytes, kernels are compiled for it.
        plans = ((WirePlan.build(FORMATS[width], factors, bypass, 4, workers), bypass) for bypass in range(3300, 3400))
        plan, bypass = next((plan, bypass) for plan, bypass in plans if plan.size % 16 == 0)
        numel = sum(map(math.prod, factors))
        messages = list(torch.randn(workers, numel + bypass, generator=torch.Generator().manual_seed(rank)))
        kernels = TritonWire(plan, select_configuration(architecture(CPU), rank).wire, rank, CPU)
        got, expected = (
            exchange(wire, messages, numel, CPU, own) for wire in (kernels, TorchWire(plan, torch.float32, CPU))
        )
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
