"""Steps of a backend of kernels against fp64 compressors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import poisoned
from tests.support.kernel_cases import rounding

U = 2.0**-24
Values = dict[str, Tensor]


def on(device: torch.device, tensors: Mapping[str, Tensor]) -> Values:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def step(compressor: Compressor, given: Mapping[str, Tensor], device: torch.device | None = None) -> Values:
    """Averaged gradients of one step in fp32 (fp64 for fp64 gradients), from outputs that were NaN; on the CPU."""
    device = device or torch.device("cpu")
    wide = torch.float64 if next(iter(given.values())).dtype == torch.float64 else torch.float32
    out = on(device, poisoned({name: tensor.shape for name, tensor in given.items()}, wide))
    compressor.decompress(compressor.compress(on(device, given)), out=out)
    return on(torch.device("cpu"), out)


class Truth:
    """fp64 compressors: one with the gradients as they are, four with what rounding may make of them.

    The kernels may be twice as far from the truth as these are, since four are not all. Where errors are kept in bf16,
    M is rounded to it, and M may be a few times as large as G.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], config: PowerSGDConfig, device: torch.device) -> None:
        coarse = 4 * torch.finfo(torch.bfloat16).eps if config.error_dtype == "bfloat16" else 0.0
        config = PowerSGDConfig.from_dict({**config.to_dict(), "backend": "torch", "error_dtype": None})
        self.compressors = [Compressor(config, shapes) for _ in range(5)]
        segments = self.compressors[0].layout.segments
        self._share = {s.name: rounding(s.n + s.m + 2 * s.rank, device) + coarse for s in segments}
        self._steps = 0

    def step(self, given: Mapping[str, Tensor]) -> tuple[Values, dict[str, float]]:
        """Ĝ and how far from it, in the Frobenius norm, one may be."""
        self._steps += 1
        exact, *others = self.compressors
        expected = step(exact, {name: tensor.double() for name, tensor in given.items()})
        bounds = {name: U * float(tensor.norm()) for name, tensor in expected.items()}
        for index, other in enumerate(others):
            generator = torch.Generator().manual_seed(10 * self._steps + index)
            inputs = {
                name: G.double() * (1 + self._share[name] * (2 * torch.rand(G.shape, generator=generator).double() - 1))
                for name, G in given.items()
            }
            for name, tensor in step(other, inputs).items():
                bounds[name] = max(bounds[name], 2 * float((tensor - expected[name]).norm()))
        return expected, bounds


def assert_close(got: Values, expected: Values, bounds: Mapping[str, float]) -> None:
    for name, tensor in expected.items():
        assert float((got[name].double() - tensor).norm()) <= bounds[name], name
