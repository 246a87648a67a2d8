"""DeepSpeed: what the adapter asks of an engine and its optimizer, in all supported releases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.ops.step import LossScaleSource


def averaging_group(engine: Any) -> Any:
    """Return the process group over which an engine averages gradients."""
    return engine.mpu.get_data_parallel_group() if engine.pipeline_parallelism else engine.seq_data_parallel_group


def loss_scale_source(engine: Any) -> LossScaleSource:
    """Return the engine's scaler, or a function that returns its loss scale."""
    optimizer = engine.optimizer
    for owner, name in ((engine, "torch_autocast_z0_gradscaler"), (optimizer, "torch_autocast_gradscaler")):
        scaler: torch.amp.GradScaler | None = getattr(owner, name, None)
        if scaler is not None:
            return scaler

    def current() -> float | None:
        if getattr(optimizer, "custom_loss_scaler", False):
            return float(optimizer.external_loss_scale)
        # Stage 0 keeps it in ``loss_scale_config``, the other stages have a property.
        scale = getattr(getattr(optimizer, "loss_scale_config", optimizer), "cur_scale", None)
        return None if scale is None else float(scale)

    return current


def is_bf16_optimizer(optimizer: Any) -> bool:
    """Return whether this is DeepSpeed's BF16_Optimizer, which accumulates gradients in fp32 and all-reduces them."""
    return type(optimizer).__name__ == "BF16_Optimizer"


def masters_of(optimizer: Any) -> Any:
    """Return the fp32 partitions that this worker updates at ZeRO stages 1 and 2, and with BF16_Optimizer, by group."""
    bf16 = is_bf16_optimizer(optimizer)
    return optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return a parameter's shape, even if ZeRO 3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def run_within(owner: Any, method: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Replace an object's method by one that runs it within a context."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    setattr(owner, method, within)
