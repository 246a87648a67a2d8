"""Parts of a bucket's averages equal what the whole reconstruction holds there."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.schemes import new_engine

SHAPES = {"a": (12, 7), "bias": (9,), "b": (12, 7), "c": (5, 3, 4), "small": (2, 2)}
# Whole, a part of a row, parts of two rows, rows, nothing, the end.
RANGES = [(0, 84), (9, 12), (5, 9), (14, 28), (20, 20), (80, 84)]


def reduced(dtype: torch.dtype, ranges: dict | None) -> dict[str, torch.Tensor]:
    config = PowerSGDConfig(rank=2, min_compression_rate=1)
    generator = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    engine = new_engine(config, Communicator(), lambda: SHAPES)
    bucket = engine.begin("all", lambda: SHAPES, torch.device("cpu"), last=True)
    assert {segment.name for segment in bucket.layout.compressed} == {"a", "b", "c"}
    engine.average(bucket, gradients, ranges=ranges)
    return gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranges_equal_the_whole(dtype: torch.dtype) -> None:
    """But for the last bits: other blocks are multiplied."""
    whole = reduced(dtype, None)
    for start, stop in RANGES:
        parts = {name: x.view(-1)[start:stop] for name, x in whole.items() if name != "b"}
        out = {n: (min(start, whole[n].numel()), torch.full_like(part, torch.nan)) for n, part in parts.items()}
        unchanged = reduced(dtype, out)
        for name, (_, part) in out.items():
            torch.testing.assert_close(part, parts[name], rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
        assert not torch.equal(unchanged["a"], whole["a"]), "the gradients were overwritten"
