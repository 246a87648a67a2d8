"""What belongs to one step and is shared by all of its buckets: its number, its verdict and its loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

LossScaleSource = torch.amp.GradScaler | Callable[[], float | Tensor | None]

VERDICTS = 1024
"""Verdicts are made in batches of this size: one launch on the device for so many steps, instead of one a step."""

LARGEST_SCALE = 2.0**60
"""Scales are clamped to [1 / this, this], so that a scaler that fell to 0 does not turn errors into NaN."""


class Step:
    """The step under way.

    A step is open from its first bucket until it is ended or void. ``Engine`` opens, ends and voids it.

    Attributes:
        iteration: number of steps that were ended. Random directions are drawn from it.
        ended: the same, but never changed by a loaded checkpoint; equal on all workers.
        names: tensors whose gradients have come in the open step; empty where no step is open.
        last: whether the newest bucket is the step's last one. None where the adapter cannot tell: every bucket is
            finished before the next one comes, and the step ends when a gradient comes again.
        workers: number of workers whose messages are summed.
        uneven: whether workers wrote different parts of the averages, in a dtype in which an average may not fit.
        loss_scale: what the errors follow; None where the loss is not scaled.
    """

    def __init__(self) -> None:
        self.iteration = self.ended = 0
        self.names: set[str] = set()
        self.last: bool | None = None
        self.workers = 1
        self.uneven = False
        self.loss_scale: LossScale | None = None
        self._verdict: Tensor | None = None
        self._fresh: dict[torch.device, Iterator[Tensor]] = {}

    def verdict(self, device: torch.device) -> Tensor:
        """Scalar on ``device``: 1, set to 0 by a bucket that is not finite. The buckets of a step share it."""
        if self._verdict is None:
            self._verdict = next(self._fresh.setdefault(device, _ones(device)))
        return self._verdict

    def decides(self, verdict: Tensor | None) -> bool:
        """Whether this is the verdict of the open step, in which it may still change."""
        return verdict is not None and verdict is self._verdict

    def overflow(self, device: torch.device) -> Tensor | None:
        """The verdict, to be set to 0 where an average does not fit its dtype; None where that must not void the step.

        It voids the step only where the errors follow a loss scale. Without one, no scaler would shrink the gradients
        in response, the carried gradient would not shrink either, and no later step would fit.
        """
        return None if self.loss_scale is None else self.verdict(device)

    def void(self) -> None:
        """The open step is never applied: its products are not subtracted from the error buffers."""
        if self._verdict is not None:
            self._verdict.zero_()
        self.forget()

    def end(self) -> None:
        """What follows belongs to the next step."""
        self.forget()
        self.iteration += 1
        self.ended += 1

    def forget(self) -> None:
        """Close the step without counting it."""
        self.names, self.last, self.uneven = set(), None, False
        self._verdict = None
        if self.loss_scale is not None:
            self.loss_scale.forget()


def _ones(device: torch.device) -> Iterator[Tensor]:
    while True:
        yield from torch.ones(VERDICTS, device=device).unbind()


class LossScale:
    """The factor by which a loss, hence every gradient, is scaled. It is read once a step and never waits for a device.

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
        # This step's scale, and a quotient for each other scale that some bucket's error buffer still has.
        self._scale: Tensor | None = None
        self._growths: list[tuple[Tensor | None, Tensor]] = []

    def current(self, device: torch.device) -> Tensor | None:
        """This step's scale, an fp32 scalar; None where the loss is not scaled. Raises as ``read``."""
        if self._scale is None:
            self._scale = self.read(device)
        return self._scale

    def growth(self, before: Tensor | None, device: torch.device) -> Tensor | None:
        """This step's scale / ``before``: what an error buffer is multiplied by; None for 1."""
        scale = self.current(device)
        if before is scale:
            return None
        for known, growth in self._growths:
            if known is before:
                return growth
        if scale is None:
            assert before is not None
            growth = before.reciprocal()
        else:
            growth = scale if before is None else scale / before
        self._growths.append((before, growth))
        return growth

    def forget(self) -> None:
        """The step is over."""
        self._scale, self._growths = None, []

    def read(self, device: torch.device) -> Tensor | None:
        """The scale as an fp32 scalar on ``device`` that does not change later; None where the loss is not scaled.

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
            return scale.clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"a loss scale must be a number, a tensor or None; got {type(value).__name__}")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a loss scale must be positive and finite; got {value}")
        if self._number != (value, device):
            self._number = (value, device)
            clamped = min(max(value, 1 / LARGEST_SCALE), LARGEST_SCALE)
            self._number_on_device = torch.full((), clamped, device=device)
        return self._number_on_device

    def _value(self) -> Any:
        if isinstance(self._source, torch.amp.GradScaler):
            # get_scale() would wait for the device. None before the first loss was scaled, or where it is disabled.
            return self._source._scale if self._source.is_enabled() else None
        return self._source()
