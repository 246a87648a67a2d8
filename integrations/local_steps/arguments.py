"""What LocalSteps is given: checks that need no other worker."""

from __future__ import annotations

import math

import torch

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.local_steps.local_tensors import LocalTensors
from powersgd_triton.planning.tuning import refuse_auto


def chosen_config(
    config: PowerSGDConfig | None, local: LocalTensors, optimizer: torch.optim.Optimizer | None
) -> PowerSGDConfig:
    """Return the configuration of the engine. None sends everything in fp32."""
    if config is not None and not isinstance(config, PowerSGDConfig):
        raise TypeError(f"config must be a PowerSGDConfig or None; got {type(config).__name__}")
    chosen = PowerSGDConfig(rank=_no_rank) if config is None else config
    if chosen.measures:
        refuse_auto(chosen, "an exchange of local steps")
        raise ValueError("max_overhead is a share of a step, and local steps have none: give max_rank")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    if local.flat and config is not None and chosen.codes is None:
        raise ValueError(
            "DeepSpeed's workers own parts of several parameters in a row, which are no matrices of low rank: "
            f'give codes, for example PowerSGDConfig(codes="ternary"), or None; got rank={config.rank}, '
            f"compression={config.compression}, bytes_per_step={config.bytes_per_step}"
        )
    if not any(map(math.prod, local.shapes.values())):
        raise ValueError("the model has no parameters that require gradients")
    return chosen


def _no_rank(_name: str, _shape: tuple[int, ...]) -> int:
    return 0
