"""Schemes: what is sent of a bucket, one file each. ``core.scheme`` has their interface."""

from typing import Any

import torch

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import SPARSE, PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.ops.backends import select_backend
from powersgd_triton.schemes.mixed import Mixed


def new_engine(
    config: PowerSGDConfig,
    communicator: Communicator,
    tensors: Any,
    device: torch.device | None = None,
    *,
    rounds: bool = False,
    **options: Any,
) -> Engine:
    """Return an engine with the scheme of its configuration. The other arguments are those of ``Engine``.

    It averages gradients, or what ``rounds`` of local steps have changed. TypeError: ``config`` is not a configuration.
    ValueError: its budget is too small for the tensors, its backend cannot be used on the device, or its format not for
    gradients.
    """
    if not isinstance(config, PowerSGDConfig):
        raise TypeError(f"config must be a PowerSGDConfig; got {type(config).__name__}")
    if config.quantize == SPARSE and not rounds:
        raise ValueError(
            "quantize='sparse' is for LocalSteps: of gradients in every step, most would be sent many steps late; "
            'give compression=… without quantize, or quantize="ternary"'
        )
    if device is not None:
        # Not only in the first step, after all have heard that compression is on.
        select_backend(config, device)
    engine = Engine(Mixed(), config, communicator, tensors, device, **options)
    # Exchanges of local steps are rare, and memory counts more.
    engine.residuals.whole.in_place, engine.plan.copies = rounds, communicator.copies
    return engine
