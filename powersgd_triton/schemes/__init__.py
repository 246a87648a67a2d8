"""Schemes: what is sent of a bucket, one file each. ``core.scheme`` has their interface."""

from __future__ import annotations

from typing import Any

import torch

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.scheme import Scheme
from powersgd_triton.ops.backends import select_backend
from powersgd_triton.schemes.low_rank import LowRank
from powersgd_triton.schemes.mixed import Mixed
from powersgd_triton.schemes.quantized import Quantized


def new_engine(
    config: PowerSGDConfig,
    communicator: Communicator,
    tensors: Any,
    device: torch.device | None = None,
    **options: Any,
) -> Engine:
    """Return an engine with the scheme that a configuration asks for. The other arguments are those of ``Engine``.

    TypeError: ``config`` is not a configuration. ValueError: its budget is too small for the tensors, or its backend
    cannot be used on the device.
    """
    if not isinstance(config, PowerSGDConfig):
        raise TypeError(f"config must be a PowerSGDConfig; got {type(config).__name__}")
    if device is not None:
        # Not only in the first step, after all have heard that compression is on.
        select_backend(config, device)
    scheme: Scheme = Quantized() if config.quantize is not None else Mixed(config) if config.bypass else LowRank()
    return Engine(scheme, config, communicator, tensors, device, **options)
