"""The interface between the engine, which decides when something is sent, and a scheme, which decides what."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator, Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.residuals import Residuals
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.backend import STAGES, Backend
from powersgd_triton.ops.backend import Average as Average
from powersgd_triton.ops.backend import Ranges as Ranges
from powersgd_triton.ops.reference import note_overflow
from powersgd_triton.ops.step import Step


@dataclasses.dataclass(frozen=True)
class Task:
    """One bucket's part of one step. Its layout has the ranks in force.

    The gradients, {name: contiguous tensor}, do not change before the average is written. ``memory`` is what
    ``Scheme.prepare`` returned for the bucket. ``found`` is for what the scheme finds out about it once, and stays if a
    step is void. ``ranges`` are all that this worker needs of the average, if not None.
    """

    layout: Layout
    gradients: Mapping[str, Tensor]
    step: Step
    config: PowerSGDConfig
    communicator: Communicator
    residuals: Residuals
    memory: Any = None
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    ranges: Ranges | None = None

    @property
    def device(self) -> torch.device:
        return next(iter(self.gradients.values())).device


class Scheme(Protocol):
    """What is sent of a bucket, and what stays on the worker.

    A scheme adds the residuals to the gradients, and leaves what it has not sent in the residuals. So nothing is lost:
    with W workers, Σ_w (gradient + residual) before a step is W · average + Σ_w residual after it. Where a sum is not
    finite, it sets the step's verdict to 0. Averages have the same bits on all workers.
    """

    def prepare(self, task: Task) -> Any:
        """Return what the bucket needs between steps, if it has no memory yet. It may fail on one worker."""

    def average(self, task: Task) -> Generator[Work, None, Average]:
        """Average a bucket. The caller waits for each yielded collective before resuming."""

    def sent_numel(self, layout: Layout, config: PowerSGDConfig, iteration: int) -> int:
        """Return the elements that step ``iteration`` sends of a bucket, in fp32 elements of equal bytes."""


class Listener:
    """What watches steps, such as telemetry. These methods do nothing; a listener overrides what it needs."""

    def watch(self, task: Task) -> Task:
        """Return a bucket's task, possibly ``watched``."""
        return task

    def end_step(self) -> None:
        """Take the end of a step. It may be collective."""

    def void(self) -> None:
        """Take that the open step does not count."""

    def obstacle(self) -> str | None:
        """Return why a step cannot be captured in a CUDA graph, if it cannot."""
        return None


def watched(task: Task, before: Callable[[str], None], after: Callable[..., None]) -> Task:
    """Return a task whose backend, if any, calls ``before(stage)`` and ``after(stage, *arguments)``; see ``STAGES``."""
    if not hasattr(task.memory, "bucket"):
        return task
    return dataclasses.replace(task, memory=_Watched(task.memory, before, after))


class _Watched:
    def __init__(self, backend: Backend, before: Callable[[str], None], after: Callable[..., None]) -> None:
        self._backend, self._before, self._after = backend, before, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        return functools.partial(self._run, name, found) if name in STAGES else found

    def _run(self, name: str, stage: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._before(name)
        result = stage(*arguments, **options)
        self._after(name, *arguments)
        return result


@dataclasses.dataclass(frozen=True)
class FlatAverage:
    """An average of whole tensors, flat and in a layout's order."""

    layout: Layout
    flat: Tensor

    def reconstruct(self, out: Mapping[str, Tensor], overflow: Tensor | None) -> None:
        self.reconstruct_ranges({name: (0, tensor.view(-1)) for name, tensor in out.items()}, overflow)

    def reconstruct_ranges(self, out: Ranges, overflow: Tensor | None) -> None:
        segments = [segment for segment in self.layout.segments if segment.name in out]
        targets = [out[segment.name][1] for segment in segments]
        starts = [segment.offset + out[segment.name][0] for segment in segments]
        sources = [self.flat[start:][: target.numel()] for start, target in zip(starts, targets, strict=True)]
        if targets:
            # In one call: otherwise the host takes longer than the device.
            torch._foreach_copy_(targets, sources)
        if overflow is not None and self.flat.numel():
            largest = torch.stack(torch.aminmax(self.flat))
            for dtype in {target.dtype for target in targets} - {torch.float32}:
                note_overflow(largest.to(dtype), overflow)
