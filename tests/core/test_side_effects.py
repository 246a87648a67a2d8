"""The memory that a step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.ops import blocks
from tests.support.checks import DTYPES, gradients, live_bytes


@pytest.mark.parametrize(
    ("rank", "dtype", "start_iter"),
    [(1, torch.float32, 2), (8, torch.bfloat16, 0), (8, torch.float64, 0)],
)
def test_memory_is_one_buffer_and_the_factors(rank: int, dtype: torch.dtype, start_iter: int):
    shapes = {"a": (512, 300), "b": (512, 300), "c": (300, 128, 3), "bias": (512,)}
    before = live_bytes()
    compressor = Compressor(PowerSGDConfig(rank=rank, start_iter=start_iter), shapes)
    now = gradients(0, shapes, dtype)
    own = live_bytes() - before
    for _ in range(start_iter + 3):
        compressor.decompress(compressor.compress(now), out=now)
    extra = live_bytes() - before - own
    layout = compressor.layout
    width = 8 if dtype == torch.float64 else 4
    buffers = width * sum(segment.numel for segment in layout.compressed)
    # P and P̂; own Q, Q̄ and the basis; the bypass tensors in the first message.
    factors = width * (2 * layout.p_numel + 3 * layout.q_numel + layout.bypass_numel)
    assert buffers > 0
    assert extra <= 1.05 * buffers + factors, f"{(extra - factors) / buffers:.3f} × the compressed gradients"


class Allocations(TorchDispatchMode):
    """Storages that operations newly made: their bytes, and the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        found = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.made += [(storage.nbytes(), str(func)) for storage in found if storage.data_ptr() not in given]
        return result


@pytest.mark.parametrize("kind", ["finite", "zero", "non-finite"])
@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        *((dtype, {}) for dtype in DTYPES),
        *((torch.bfloat16, {field: False}) for field in ("error_feedback", "warm_start", "batch_by_shape")),
    ],
)
def test_nothing_full_size_is_allocated_in_a_step(
    dtype: torch.dtype, fields: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(blocks, "block_bytes", lambda _: 1 << 14)
    monkeypatch.setattr(blocks, "FEWEST_ROWS", 8)
    shapes = {"a": (256, 192), "b": (256, 192), "c": (160, 192), "bias": (64,)}
    compressor = Compressor(PowerSGDConfig(rank=2, **fields), shapes)
    now = gradients(0, shapes, dtype)
    for _ in range(2):
        compressor.compress(now)
    if kind == "zero":
        now["a"].zero_()
    elif kind == "non-finite":
        now["a"][5, 5] = float("inf")
    with Allocations() as seen:
        compressor.decompress(compressor.compress(now), out=now)
    # A block, of which fp64 may need two. Factors are smaller, the smallest matrix is larger.
    limit = 2 << 14
    assert limit < 160 * 192 * dtype.itemsize
    size, operation = max(seen.made)
    assert 0 < size <= limit, f"{operation} allocated {size} bytes"
