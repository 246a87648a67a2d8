"""Train the demo's model with DeepSpeed at any ZeRO stage, configured by ``ds_config.json`` beside this file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

CONFIGURATION = Path(__file__).with_name("ds_config.json")


def configuration(stage: int, section: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the content of ``ds_config.json`` for a stage.

    Args:
        stage: ZeRO stage.
        section: Fields to change in the section "powersgd". None switches it off.
    """
    content: dict[str, Any] = json.loads(CONFIGURATION.read_text(encoding="utf-8"))
    content["zero_optimization"]["stage"] = stage
    content["powersgd"].update({"enabled": False} if section is None else section)
    return content


def make_engine(
    model: nn.Module, config: Mapping[str, Any], device: torch.device, learning_rate_factor: Callable[[int], float]
) -> Any:
    """Return a DeepSpeed engine for the model, with compression as configured. The process group must exist.

    Args:
        model: Model on the CPU or on the device.
        config: DeepSpeed's configuration.
        device: Device of this worker.
        learning_rate_factor: Maps a step's number to the factor of the learning rate.
    """
    rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # Set what a launcher would have set.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(device.index or 0), WORLD_SIZE=str(workers))
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    from powersgd_triton.integrations import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # On the CPU, DeepSpeed would compile this operation before the first step. The demo does not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=dict(config),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, learning_rate_factor),
    )
    return engine
