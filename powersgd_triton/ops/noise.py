"""Random numbers of stochastic rounding: the same ones on all devices."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from powersgd_triton.layout.constants import PERIOD
from powersgd_triton.ops.orthogonalize import mix


def starts_of_spans(spans: int, part: int, seed: int) -> Tensor:
    """Return where each PERIOD elements of a part begin in the random numbers, int64 [spans]."""
    starts: Tensor = mix(mix(torch.arange(spans) + (part % 4096 << 20)) ^ seed) % PERIOD
    return starts


@functools.cache
def random_numbers(device: torch.device, mantissa: bool) -> Tensor:
    """Return the numbers below 2¹⁶ in a pseudo-random order, twice, int32; or 2⁻¹⁶ times them from 128 on, fp32."""
    x = torch.arange(PERIOD, dtype=torch.int32)
    # A permutation: each operation is one to one on 16 bits.
    for shift, factor in ((8, 0x88B5), (7, 0xDB2D), (9, 1)):
        x = x.bitwise_xor(x.bitwise_right_shift(shift)).mul_(factor).bitwise_and_(0xFFFF)
    x = torch.cat([x, x]).to(device)
    # Sums with codes have 16 bits behind the point: quotients are rounded to these, not cut.
    return x if mantissa else x * 2.0**-16 + 128
