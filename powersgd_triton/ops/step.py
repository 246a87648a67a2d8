"""The state of one step that all of its buckets share, on the device: its number, its verdict and its loss scale."""

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

LossScaleSource = torch.amp.GradScaler | Callable[[], float | Tensor | None]

ROWS = 1024
"""Number of steps whose scalars on the device are created together, instead of in some launches a step."""

LARGEST_SCALE = 2.0**60
"""Scales are clamped to [1 / LARGEST_SCALE, LARGEST_SCALE], so that a scale of 0 does not turn errors into NaN."""


class Step:
    """The step under way. It is open from its first bucket until ``Engine`` ends or voids it.

    What kernels need of a step lies on the device: its verdict and its number. Each step has scalars of its own. But
    from the capture of a CUDA graph on, whose replays use the same memory, ``start`` sets the same scalars anew.

    Attributes:
        ended: Number of steps ended since the workers were compared. Loading a checkpoint does not change it.
        keys: What has come in the open step and comes once in a step. Empty if no step is open.
        last: Whether the newest bucket is the step's last one. None if the adapter does not know. Each bucket is then
            finished before the next one comes, and the step ends when a key comes again.
        workers: Number of workers whose messages are summed.
        uneven: Whether workers wrote different parts of the averages, in a dtype that an average may not fit.
        loss_scale: The loss scale that the errors follow. None if the loss is not scaled.
        captured: Whether a step was captured, so that replays may use what is pending.
        undecided: Whether the last step has ended, but may still turn out not to be applied.
    """

    def __init__(self) -> None:
        self._iteration = self.ended = 0
        self.keys: frozenset[Hashable] = frozenset()
        self.last: bool | None = None
        self.workers = 1
        self.uneven = self.captured = self.undecided = False
        self.loss_scale: LossScale | None = None
        # (row, verdict, number) of the open step and of the last step that had some. Both are views of the row.
        self._scalars: tuple[Tensor, Tensor, Tensor] | None = None
        self._last_scalars: tuple[Tensor, Tensor, Tensor] | None = None
        # Rows for the next steps, the next one last.
        self._rows: list[Tensor] = []
        self._first_row: tuple[torch.device, int] | None = None

    @property
    def iteration(self) -> int:
        """Number of ended steps. Random directions depend on it. Replays of a CUDA graph are not counted."""
        return self._iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._iteration = value
        self.captured = False

    def start(self, *, captured: bool) -> tuple[Tensor, Tensor] | None:
        """Begin a step, ``captured`` in a CUDA graph or not, before its first bucket.

        If the steps share their scalars, return (verdict of the last step, a copy of it to use from now on).
        RuntimeError: No step has come before the captured one.
        """
        if captured and self._last_scalars is None:
            raise RuntimeError("take some steps in which gradients are compressed before a step is captured")
        self.captured |= captured
        if not self.captured or self._last_scalars is None:
            return None
        self._scalars = row, verdict, _ = self._last_scalars
        before = row.clone()
        # [verdict, number] ← [1, number + 1], in one launch.
        torch.addcmul(self._ones, row, self._indices, out=row)
        return verdict, before[0]

    def verdict(self, device: torch.device) -> Tensor:
        """Return a scalar on ``device`` that all buckets of a step share: 1, or 0 once a bucket is not finite."""
        return self._scalars_on(device)[1]

    def number(self, device: torch.device) -> Tensor:
        """Return ``iteration`` as a scalar on ``device``. In a replay it is the number of the replayed step."""
        return self._scalars_on(device)[2]

    def _scalars_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if self._scalars is None:
            if not self._rows or self._first_row != (device, self.iteration):
                ones, numbers = torch.ones(ROWS, dtype=torch.int64, device=device), torch.arange(ROWS, device=device)
                self._rows = list(reversed(torch.stack([ones, numbers + self.iteration], dim=1).unbind()))
                self._ones, self._indices = ones[:2], numbers[:2]
            row = self._rows.pop()
            self._scalars = self._last_scalars = row, row[0], row[1]
            self._first_row = device, self.iteration + 1
        return self._scalars

    def decides(self, verdict: Tensor | None) -> bool:
        """Return whether this is the verdict of the open step, so that it may still change."""
        return verdict is not None and self._scalars is not None and verdict is self._scalars[1]

    def scale(self, device: torch.device) -> Tensor | None:
        """Return the step's loss scale, an fp32 scalar. None if the loss is not scaled."""
        return None if self.loss_scale is None else self.loss_scale.current(device)

    def overflow(self, device: torch.device) -> Tensor | None:
        """Return the verdict, to be set to 0 if an average does not fit its dtype. None without a loss scale.

        Without one, such an average must not void the step: no scaler would reduce it, nor would any later one fit.
        """
        return None if self.loss_scale is None else self.verdict(device)

    def void(self, *, stays_open: bool, captured: bool = False) -> None:
        """Discard the open step: its products are not subtracted. With ``stays_open`` it remains to be ended.

        If it was ``captured``, nothing has run on the device, and the verdict there is still that of the step before.
        """
        if self._scalars is not None and not captured:
            self._scalars[1].zero_()
        if not stays_open:
            self.forget()
        elif self.loss_scale is not None:
            self.loss_scale.forget()

    def end(self) -> None:
        """Close the step and count it."""
        self.forget()
        self._iteration += 1
        self.ended += 1

    def forget(self) -> None:
        """Close the step without counting it."""
        self.keys, self.last, self.uneven = frozenset(), None, False
        self._scalars = None
        if self.loss_scale is not None:
            self.loss_scale.forget()


class LossScale:
    """The factor by which the loss, and hence every gradient, is scaled. Read once a step, without synchronization.

    The source is a ``torch.amp.GradScaler``, or a function that returns a positive number, a tensor with one element,
    or None if the loss is not scaled. A tensor that is not positive and finite leaves the last scale in force.
    TypeError: It is neither a scaler nor a function.
    """

    def __init__(self, source: LossScaleSource) -> None:
        if not isinstance(source, torch.amp.GradScaler) and not callable(source):
            raise TypeError(f"expected a torch.amp.GradScaler or a function; got {type(source).__name__}")
        self.source = source
        self._number: tuple[float, torch.device, Tensor] | None = None
        # The last scale that a tensor gave and that was positive and finite.
        self._last: Tensor | None = None
        # This step's scale, and its quotient by each earlier scale that a bucket's error buffer still contains.
        self._scale: Tensor | None = None
        self._growths: list[tuple[Tensor | None, Tensor]] = []

    def current(self, device: torch.device) -> Tensor | None:
        """Return this step's scale, as ``read`` does."""
        if self._scale is None:
            self._scale = self.read(device)
        return self._scale

    def growth(self, before: Tensor | None, device: torch.device) -> Tensor | None:
        """Return this step's scale / ``before``, by which an error buffer is multiplied. None for 1."""
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
        self._scale, self._growths = None, []

    def read(self, device: torch.device) -> Tensor | None:
        """Return the scale as an fp32 scalar on ``device`` that does not change later. None if the loss is not scaled.

        The same number gives the same tensor. TypeError: The function returned something else than a number, a tensor
        or None. ValueError: It returned a number that is not positive and finite, or a tensor of several elements.
        """
        value: Any
        if not isinstance(self.source, torch.amp.GradScaler):
            value = self.source()
        else:
            # get_scale() would wait for the device. The scale is None before the first loss is scaled.
            value = self.source._scale if self.source.is_enabled() else None
        if value is None:
            return None
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"a loss scale must be one number; got a tensor of shape {tuple(value.shape)}")
            scale = value.detach().reshape(()).to(device, torch.float32, non_blocking=True)
            # A scale that is not positive and finite would make errors NaN for ever, and the host does not wait to see
            # it. The step's gradients are not finite then, or zero, and errors keep the last scale.
            last = scale.new_ones(()) if self._last is None else self._last.to(device, non_blocking=True)
            good = scale.isfinite() & (scale > 0)
            self._last = torch.where(good, scale.clamp(1 / LARGEST_SCALE, LARGEST_SCALE), last)
            return self._last
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"a loss scale must be a number, a tensor or None; got {type(value).__name__}")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a loss scale must be positive and finite; got {value}")
        if self._number is None or self._number[:2] != (value, device):
            clamped = min(max(value, 1 / LARGEST_SCALE), LARGEST_SCALE)
            self._number = value, device, torch.full((), clamped, dtype=torch.float32, device=device)
        return self._number[2]


class HostCopy:
    """A copy on the host of a tensor that the current stream has written. Making it does not wait for the device.

    A tensor on the CPU is kept, so it must not change.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether the copy is done, so that reading it does not wait."""
        return self._event is None or self._event.query()

    def numbers(self) -> Any:
        """Return the numbers as nested lists. The host waits until the copy is done."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
