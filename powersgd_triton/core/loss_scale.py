"""The factor by which a loss, hence every gradient, is scaled in 16-bit training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LossScaleSource = torch.amp.GradScaler | Callable[[], float | Tensor | None]

LARGEST = 2.0**60
"""Scales are kept between its inverse and this, so that a scaler that fell to 0 does not turn errors into NaN."""


class LossScale:
    """Reads the current loss scale without waiting for a device.

    Args:
        source: a ``torch.amp.GradScaler`` (or a subclass, such as FSDP1's ``ShardedGradScaler``), or a function that
            returns the scale: a positive number, a tensor with one element, or None where the loss is not scaled.

    Raises:
        TypeError: ``source`` is neither.
    """

    def __init__(self, source: LossScaleSource) -> None:
        if not isinstance(source, torch.amp.GradScaler) and not callable(source):
            raise TypeError(f"expected a torch.amp.GradScaler or a function; got {type(source).__name__}")
        self._source = source
        self._number: tuple[float, torch.device] | None = None
        self._number_on_device: Tensor | None = None

    def read(self, device: torch.device) -> Tensor | None:
        """The scale as an fp32 scalar on ``device`` that stays as it is; None where the loss is not scaled.

        The same number gives the same tensor.

        Raises:
            TypeError: the function returned something else.
            ValueError: it returned a number that is not positive and finite, or a tensor of several elements.
        """
        value = self._value()
        if value is None:
            return None
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"a loss scale must be one number; got a tensor of shape {tuple(value.shape)}")
            scale = value.detach().reshape(()).to(device, torch.float32, non_blocking=True)
            return scale.clamp(1 / LARGEST, LARGEST)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"a loss scale must be a number, a tensor or None; got {type(value).__name__}")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a loss scale must be positive and finite; got {value}")
        if self._number != (value, device):
            self._number = (value, device)
            self._number_on_device = torch.full((), min(max(value, 1 / LARGEST), LARGEST), device=device)
        return self._number_on_device

    def _value(self) -> Any:
        if isinstance(self._source, torch.amp.GradScaler):
            # get_scale() would wait for the device. None before the first loss was scaled, or where it is disabled.
            return self._source._scale if self._source.is_enabled() else None
        return self._source()
