"""One step of all buckets, for all adapters."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator, Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.buckets import Buckets, BucketState, Shapes
from powersgd_triton.core.capture import Capture
from powersgd_triton.core.clock import RECONSTRUCT
from powersgd_triton.core.facts import Tensors
from powersgd_triton.core.residuals import Residuals
from powersgd_triton.core.saved_state import LoadReport, SavedState
from powersgd_triton.core.schedule import Part, Schedule
from powersgd_triton.core.scheme import Average, Scheme, Task
from powersgd_triton.core.streams import has_streams
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan

logger = logging.getLogger("powersgd_triton")

Write = Callable[[Average], None]
Ranges = Mapping[str, tuple[int, Tensor]]


class Listener(Protocol):
    """What watches steps. ``end_step`` may be collective."""

    def end_step(self) -> None: ...

    def void(self) -> None: ...

    def obstacle(self) -> str | None:
        """Return why a step cannot be captured in a CUDA graph, if it cannot."""

    def watch(self, task: Task) -> Task:
        """Return a bucket's task, possibly with a wrapper of its memory that notes what is done with it."""


class Engine:
    """Averages one model's gradients over the workers, in compressed form, bucket by bucket.

    An adapter translates its framework's gradients into buckets. For each bucket it calls ``begin``, and then
    ``average``, or ``average_exactly`` if the step is not ``compressing``. All workers must pass the same buckets in
    the same order, since the order of the buckets is the order of the collectives.

    Args:
        scheme: What is sent of a bucket. Use ``schemes.new_engine``, which chooses it.
        config: Configuration of the compression.
        communicator: Collectives of the workers that average with each other.
        tensors: Returns {name: shape} of all tensors that this worker compresses or averages and that are known so far.
        device: Device of the gradients. None if it is not known before they come.
        buckets: Number of buckets of a step, if the adapter knows it and they are not joined. A budget counts their
            messages.

    Raises:
        ValueError: The configuration's budget is too small for the tensors.

    Attributes:
        plan: The ranks in force, if ranks are planned.
        step: State of the step under way.
        residuals: What the worker has not sent, by name.
        buckets: The buckets, and what was compared with the other workers.
        schedule: The buckets that wait or are under way.
        listeners: What else happens when a step ends, in this order.
        begun: The layouts of the newest step's buckets.
        numel: [elements before, after compression] over all buckets averaged in compressed form so far.
        sent: Bytes sent so far.
        itemsize: Bytes of an element of the newest gradient that was averaged exactly.
    """

    def __init__(
        self,
        scheme: Scheme,
        config: PowerSGDConfig,
        communicator: Communicator,
        tensors: Callable[[], Tensors],
        device: torch.device | None = None,
        buckets: int | None = None,
    ) -> None:
        self.tensors, self._scheme = tensors, scheme
        self.plan, self.step = RankPlan(config), Step()
        if config.planned:
            self.plan.connect(communicator.world_size, buckets)
            self.plan.begin(tensors())
        self.residuals, self.schedule = Residuals(self.plan), Schedule()
        self.buckets = Buckets(scheme, communicator, tensors, self.plan, self.residuals, self.step, device)
        self._capture = Capture(self.plan, self.residuals, self.step)
        self.listeners: list[Listener] = []
        self.begun: list[Layout] = []
        self.numel, self.sent, self.itemsize = [0, 0], 0, 4

    @property
    def config(self) -> PowerSGDConfig:
        """The configuration in force."""
        return self.plan.config

    @property
    def communicator(self) -> Communicator:
        """Collectives of the workers that average with each other."""
        return self.buckets.communicator

    @property
    def compressing(self) -> bool:
        """Whether the step is compressed. The first ``config.start_iter`` steps are exact."""
        if self.plan.exact:
            # No matrix has a rank any more, but errors of a loaded state are still to be added to gradients.
            return self.residuals.has_errors(self.step)
        return self.step.iteration >= self.config.start_iter and self.plan.compresses

    # A step ----------------------------------------------------------------------------------------------------------

    def begin(
        self,
        key: Hashable,
        shapes: Shapes,
        device: torch.device,
        *,
        keys: Iterable[Hashable] = (),
        last: bool | None = None,
        compress: bool = True,
    ) -> BucketState:
        """Add a bucket to the open step, or to a new one. Collective when the bucket comes for the first time.

        Args:
            key: What identifies the bucket's tensors.
            shapes: Returns {name: shape} of the bucket's tensors. It is called once for each key.
            device: Device of its gradients.
            keys: What comes once in a step: when a key comes again, a new step begins. Default: the tensors' names.
            last: Whether the bucket is the step's last one. None if the adapter does not know. The step then ends when
                a key comes again, or with ``end_step``.
            compress: Whether its matrices are compressed if they are large enough.

        Returns:
            The bucket.

        Raises:
            DisagreementError: Workers have different configurations or tensors. Nothing was changed.
            RuntimeError: The step is captured in a CUDA graph, which is not possible for it. Nothing was changed.
            Exception: The tensors cannot be laid out, on this worker or on another one. Nothing was changed.

        On CUDA, the last bucket's call also continues older buckets. If that fails, the step is void.
        """
        bucket, step = self.buckets.find(key, shapes, device, compress=compress), self.step
        keys = frozenset(keys) or bucket.layout.names
        if not step.keys.isdisjoint(keys):
            self.finish()
            if step.keys:
                # The open step was interrupted before its last bucket came, for example in the backward pass.
                self.void()
        settled = functools.partial(self.buckets.is_settled, bucket)
        self._capture.start(device, (listener.obstacle() for listener in self.listeners), settled)
        self.begun = [*(self.begun if step.keys else []), bucket.layout]
        step.keys |= keys
        step.last, step.workers = last, self.communicator.world_size
        if last and self.schedule and has_streams(device):
            # Before the engine's stream waits for this bucket's gradients. Else the message that the bucket before
            # sends next would leave only after the backward pass. (On the CPU the gradients are ready, and the host
            # would wait for messages while it could compute.)
            with _voids(self, device, wait=False, join=False):
                self.schedule.advance()
        return bucket

    def average(
        self,
        bucket: BucketState,
        gradients: Mapping[str, Tensor],
        *,
        ranges: Ranges | None = None,
        write: Write | None = None,
        done: Callable[[], None] | None = None,
        join: bool = False,
    ) -> None:
        """Average a bucket's gradients in compressed form. End the step if the bucket is its last one.

        Args:
            bucket: Result of ``begin``.
            gradients: {name: contiguous tensor}. Overwritten with the averages; do not use them before.
            ranges: Parts of the averages to write, see ``Average.write_ranges``. The gradients then stay as they are.
            write: Function to call instead of writing, with the average.
            done: Function to call when the averages are written.
            join: Whether the bucket may wait for the step's next ones, to be averaged together with them. ``begin``
                must have been told whether it is the last one.
        """
        schedule, step, device = self.schedule, self.step, next(iter(gradients.values())).device
        with _voids(self, device):
            if join and not schedule.fits(gradients):
                self._start(schedule.take())
            layouts = schedule.wait(Part(bucket, gradients, done))
            if not join or step.last or self.buckets.are_large(layouts):
                self._start(schedule.take(), ranges, write)
                if step.last is not False:
                    # No later bucket is expected.
                    schedule.finish()
        if step.last:
            self.end_step()

    def _start(self, parts: Sequence[Part], ranges: Ranges | None = None, write: Write | None = None) -> None:
        """Start averaging buckets as one."""
        step = self.step
        gradients = {name: gradient for part in parts for name, gradient in part.gradients.items()}
        bucket = self.buckets.join([part.bucket for part in parts])
        layout, device = self.buckets.ranked(bucket), next(iter(gradients.values())).device
        task = Task(layout, gradients, step, self.config, self.communicator, self.residuals)
        task = self.buckets.prepare(bucket, task)
        for listener in self.listeners:
            task = listener.watch(task)
        sent = self._scheme.sent_numel(layout, self.config, step.iteration)
        self.numel[0] += layout.numel
        self.numel[1] += sent
        self.sent += 4 * sent
        if ranges is not None and step.loss_scale is not None:
            # An average may overflow in fp16 although its factors are finite. Only the worker that writes it sees that.
            step.uneven |= any(gradient.dtype == torch.float16 for gradient in gradients.values())

        def finish(average: Average) -> None:
            self.schedule.clock.mark(RECONSTRUCT)
            if write is not None:
                write(average)
            elif ranges is not None:
                average.write_ranges(ranges, step.overflow(device))
            else:
                average.write(gradients, step.overflow(device))
            for part in parts:
                if part.done is not None:
                    part.done()

        self.schedule.advance(self._scheme.average(task), finish)

    def average_exactly(self, buffer: Tensor, *, done: Callable[[], None] | None = None) -> None:
        """Average a bucket's flat buffer exactly, in place. End the step if the bucket is its last one."""
        self.itemsize = buffer.element_size()

        def run() -> Generator[Work, None, None]:
            self.sent += buffer.nbytes
            yield self.communicator.all_reduce(buffer)
            buffer.div_(self.communicator.world_size)

        with _voids(self, buffer.device):
            self.schedule.advance(run(), lambda _: None if done is None else done())
            if self.step.last is not False:
                self.schedule.finish()
        if self.step.last:
            self.end_step()

    def advance(self) -> None:
        """Advance the buckets under way by one collective each, while something else is computed."""
        assert self.buckets.device is not None, "a bucket was begun"
        with _voids(self, self.buckets.device):
            self.schedule.advance()

    def end_step(self, *, applied: bool | None = None) -> Tensor | None:
        """End the open step. Collective if workers have to agree on the verdict, on their state, or on ranks.

        Args:
            applied: Whether the optimizer applies the step, if the adapter knows. A step not applied is sent again.

        Returns:
            A scalar on the device, 1 if the step counts and 0 if not. None if no step was open.

        Raises:
            DisagreementError: Workers differ; see ``PowerSGDConfig.check_every``.
        """
        step, device, verdict = self.step, self.buckets.device, None
        with self.residuals.streams.everywhere():
            if step.keys and device is not None:
                with _voids(self, device):
                    self.schedule.finish()
                verdict = step.verdict(device)
                if applied is False:
                    verdict.zero_()
                elif applied is None and self.compressing:
                    # Workers that share sums have the same verdict. Workers of ``others`` may have seen another
                    # gradient overflow. If the step is uneven, each worker knows only whether its own part of the
                    # averages fits.
                    for other in [*self.communicator.others, *([self.communicator] if step.uneven else [])]:
                        other.minimum(verdict)
            step.end()
            # Counted by ``ended``: the iteration is one of the things in which workers may differ.
            every = self.config.check_every
            if every and step.ended % every == 0:
                self.buckets.check()
            if self.config.planned:
                self.plan.end_step(step.iteration, self.buckets.in_use(), self.communicator)
            for listener in self.listeners:
                listener.end_step()
        return verdict

    def finish(self) -> None:
        """End the open step if the adapter does not know its last bucket. All of its buckets are finished by now."""
        if self.step.keys and self.step.last is None:
            self.end_step()

    def void(self, *, stays_open: bool = False) -> None:
        """Discard the open step. The errors keep the gradients that were compressed, and the next step sends them.

        With ``stays_open`` it remains to be ended, since workers of other groups may not have heard of it.
        """
        self.schedule.clear()
        for listener in self.listeners:
            listener.void()
        with self.residuals.streams.everywhere():
            self.step.void(stays_open=stays_open, captured=self._capture.undo())
        self.buckets.release()

    # Between steps ---------------------------------------------------------------------------------------------------

    def connect(self, communicator: Communicator) -> None:
        """Average with other workers from the next step on. They are compared before that step."""
        if self.step.keys:
            self.void()
        self.step.ended = 0
        self.buckets.invalidate(communicator)

    def adopt(self, saved: SavedState, report: LoadReport) -> LoadReport:
        """Continue from a state that was checked. A matrix takes over its part when its gradient comes first.

        A step that is open is dropped, since the state replaces everything.
        """
        self.void()
        self.plan.load_state_dict(saved.plan)
        self.step.iteration = saved.iteration
        self.residuals.load(saved)
        # Other ranks may need other buckets.
        self.buckets.invalidate()
        logger.info("Loaded PowerSGD state of step %s: %s", saved.iteration, report)
        return report

    def forget(self) -> None:
        """Set all errors to zero, and drop a step that is open."""
        if self.step.keys:
            self.void()
        self.residuals.forget_errors()


@contextlib.contextmanager
def _voids(engine: Engine, device: torch.device, *, wait: bool = True, join: bool = True) -> Iterator[None]:
    """Run the block on the engine's stream of a device. Void the step if it raises an exception."""
    with engine.residuals.streams.on(device, wait=wait, join=join):
        try:
            yield
        except BaseException:
            engine.void(stays_open=bool(engine.communicator.others))
            raise
