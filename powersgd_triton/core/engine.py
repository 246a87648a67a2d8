"""The life of a step: what adapters call for each bucket of gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator, Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.buckets import Buckets, BucketState, Shapes
from powersgd_triton.core.capture import Capture
from powersgd_triton.core.facts import Tensors
from powersgd_triton.core.residuals import Residuals
from powersgd_triton.core.schedule import Part, Schedule
from powersgd_triton.core.scheme import Average, Listener, Ranges, Scheme
from powersgd_triton.core.streams import has_streams
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan


class Engine:
    """Averages one model's gradients over the workers, in compressed form, bucket by bucket.

    An adapter translates its framework's gradients into buckets. For each bucket it calls ``begin``, and then
    ``average``, or ``average_exactly`` if the step is not ``compressing``. All workers must pass the same buckets in
    the same order, since the order of the buckets is the order of the collectives.

    Args:
        scheme: What is sent of a bucket. ``schemes.new_engine`` chooses it.
        config: Configuration of the compression.
        communicator: Collectives of the workers that average with each other.
        tensors: Returns {name: shape} of all tensors that this worker compresses or averages and that are known so far.
        device: Device of the gradients. None if it is not known before they come.
        buckets: Number of buckets of a step, if it is known and buckets are not joined. A budget counts their messages.

    Raises:
        ValueError: The configuration's budget is too small for the tensors.

    Attributes:
        plan: The configuration in force, and the ranks if they are planned.
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
        self.plan, self.step, self.schedule = RankPlan(config), Step(), Schedule()
        if config.planned:
            self.plan.connect(communicator.world_size, buckets)
            self.plan.begin(tensors())
        self.residuals = Residuals(self.plan)
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

        Raises:
            DisagreementError: Workers have different configurations or tensors. Nothing was changed.
            RuntimeError: The step is captured in a CUDA graph, which is not possible for it. Nothing was changed.
            Exception: The tensors cannot be laid out, on this worker or on another one. Nothing was changed.
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
            with self._working(device, wait=False, join=False):
                self.schedule.advance()
        return bucket

    def average(
        self,
        bucket: BucketState,
        gradients: Mapping[str, Tensor],
        *,
        ranges: Ranges | None = None,
        write: Callable[[Average], None] | None = None,
        done: Callable[[], None] | None = None,
        join: bool = False,
    ) -> None:
        """Average a bucket's gradients in compressed form. End the step if the bucket is its last one.

        Args:
            bucket: Result of ``begin``.
            gradients: {name: contiguous tensor}. Overwritten with the averages; do not use them before.
            ranges: Parts of the averages to write, see ``Average``. The gradients then stay as they are.
            write: Function to call with the average instead of writing it.
            done: Function to call when the averages are written.
            join: Whether the bucket may wait, to be averaged together with the next ones. ``begin`` must have been told
                whether it is the last one.
        """
        schedule = self.schedule
        with self._starting(next(iter(gradients.values())).device):
            if join and not schedule.fits(gradients):
                self._start(schedule.take())
            waiting = schedule.wait(Part(bucket, gradients, done))
            if not join or self.step.last or self.buckets.are_large(waiting):
                self._start(schedule.take(), ranges, write)

    def _start(
        self, parts: Sequence[Part], ranges: Ranges | None = None, write: Callable[[Average], None] | None = None
    ) -> None:
        """Start averaging buckets as one, and advance the older ones."""
        step, gradients = self.step, {name: tensor for part in parts for name, tensor in part.gradients.items()}
        task = self.buckets.prepare([part.bucket for part in parts], gradients)
        for listener in self.listeners:
            task = listener.watch(task)
        sent = self._scheme.sent_numel(task.layout, self.config, step.iteration)
        self.numel[:] = self.numel[0] + task.layout.numel, self.numel[1] + sent
        self.sent += 4 * sent
        if ranges is not None and step.loss_scale is not None:
            # An average may overflow in fp16 although its factors are finite. Only the worker that writes it sees that.
            step.uneven |= any(gradient.dtype == torch.float16 for gradient in gradients.values())

        def finish(average: Average) -> None:
            overflow = step.overflow(task.device)
            if write is not None:
                write(average)
            elif ranges is not None:
                average.write_ranges(ranges, overflow)
            else:
                average.write(gradients, overflow)
            for part in parts:
                if part.done is not None:
                    part.done()

        self.schedule.advance(self._scheme.average(task), finish)

    def average_exactly(self, buffer: Tensor, *, done: Callable[[], None] | None = None) -> None:
        """Average a bucket's flat buffer exactly, in place. End the step if the bucket is its last one."""

        def run() -> Generator[Work, None, None]:
            yield self.communicator.all_reduce(buffer)
            buffer.div_(self.communicator.world_size)

        self.itemsize = buffer.element_size()
        self.sent += buffer.nbytes
        with self._starting(buffer.device):
            self.schedule.advance(run(), lambda _: None if done is None else done())

    def advance(self) -> None:
        """Advance the buckets under way by one collective each, while something else is computed."""
        assert self.buckets.device is not None, "a bucket was begun"
        with self._working(self.buckets.device):
            self.schedule.advance()

    def end_step(self, *, applied: bool | None = None) -> Tensor | None:
        """End the open step. Collective if workers have to agree on the verdict, on their state, or on ranks.

        Args:
            applied: Whether the optimizer applies the step, if the adapter knows. A step not applied is sent again.

        Returns:
            A scalar on the device, 0 if the step does not count. None if no step was open.

        Raises:
            DisagreementError: Workers differ; see ``PowerSGDConfig.check_every``.
        """
        step, device, verdict = self.step, self.buckets.device, None
        with self.residuals.streams.everywhere():
            if step.keys and device is not None:
                with self._working(device):
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
            self.buckets.end_step()
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

    def connect(self, communicator: Communicator) -> None:
        """Average with other workers from the next step on. They are compared before that step."""
        if self.step.keys:
            self.void()
        self.step.ended = 0
        self.buckets.invalidate(communicator)

    @contextlib.contextmanager
    def _working(self, device: torch.device, *, wait: bool = True, join: bool = True) -> Iterator[None]:
        """Run the block on the engine's stream of a device. Void the step if it raises an exception."""
        with self.residuals.streams.on(device, wait=wait, join=join):
            try:
                yield
            except BaseException:
                self.void(stays_open=bool(self.communicator.others))
                raise

    @contextlib.contextmanager
    def _starting(self, device: torch.device) -> Iterator[None]:
        """Start a bucket in the block. If no later one is expected, finish all. End the step after its last one."""
        with self._working(device):
            yield
            if self.step.last is not False:
                self.schedule.finish()
        if self.step.last:
            self.end_step()
