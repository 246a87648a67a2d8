"""Schemes: what is sent of a bucket, one file each. ``core.scheme`` has their interface."""

from __future__ import annotations

from typing import Any

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.schemes.low_rank import LowRank
from powersgd_triton.schemes.quantized import Quantized


def new_engine(config: PowerSGDConfig, *arguments: Any, quantized: bool = False, **named: Any) -> Engine:
    """Return an engine with the scheme that a configuration asks for. The other arguments are those of ``Engine``.

    TypeError: ``config`` is not a configuration. ValueError: its budget is too small for the tensors, or it has codes,
    and the adapter does not say that it can send ``quantized`` tensors.
    """
    if not isinstance(config, PowerSGDConfig):
        raise TypeError(f"config must be a PowerSGDConfig; got {type(config).__name__}")
    if config.codes is None:
        return Engine(LowRank(), config, *arguments, **named)
    if not quantized:
        raise ValueError(
            f"codes are for local steps, powersgd_triton.integrations.local_steps; got codes={config.codes!r} for "
            "gradients, which lose less as factors of as many bytes: give rank or compression"
        )
    return Engine(Quantized(), config, *arguments, **named)
