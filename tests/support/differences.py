"""Messages of differences: their scales, what they stand for, and tensors to be sent in them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.wire_format import BLOCK, QUANTIZED, SCALE_BYTES
from powersgd_triton.ops.differences import apply_reference, encode_reference

SCALED = {name: width for name, width in QUANTIZED.items() if width.scaled}
STOCHASTIC = {name: width for name, width in QUANTIZED.items() if width.stochastic}
BF16, FP8 = QUANTIZED["bf16"], QUANTIZED["fp8"]
widths = pytest.mark.parametrize("width", QUANTIZED.values(), ids=QUANTIZED)
scaled = pytest.mark.parametrize("width", SCALED.values(), ids=SCALED)
stochastic = pytest.mark.parametrize("width", STOCHASTIC.values(), ids=STOCHASTIC)
seeds = pytest.mark.parametrize("seed", [None, 3])


def scales_of(content: Tensor, numel: int) -> Tensor:
    """The scale of each element, in fp64."""
    scales = content[: SCALE_BYTES * -(-numel // BLOCK)].view(torch.bfloat16)
    return scales.double().repeat_interleave(BLOCK)[:numel]


def heavy_tailed(numel: int, seed: int = 0) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return x * x.abs() ** 3


def decoded(content: Tensor, width: Any, numel: int, apply: Callable[..., None] = apply_reference) -> Tensor:
    """What a message stands for, in fp32."""
    out = torch.zeros(1, numel)
    apply(Decoding(content[None], width, out))
    return out[0]


def sent(
    target: Tensor, width: Any, seed: int | None = None, encode: Callable[..., None] = encode_reference, **fields: Any
) -> Tensor:
    """The message of a tensor. Further fields are those of ``Encoding``."""
    content = torch.zeros(width.difference_bytes(len(target))[1], dtype=torch.uint8)
    encode(Encoding(target, width=width, out=content, seed=seed, **{"base": None, **fields}))
    return content
