"""The life of a step: what adapters call for each bucket of gradients."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.exchange import mean_in_place
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.buckets import Buckets, BucketState, Part, Shapes, write_average
from powersgd_triton.core.capture import BeforeCapture, check_capture, restore, start
from powersgd_triton.core.residuals import Residuals
from powersgd_triton.core.schedule import Schedule
from powersgd_triton.core.scheme import Average, Listener, Ranges, Scheme
from powersgd_triton.core.streams import has_streams, is_captured
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import Tensors
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan


class Engine:
    """Averages one model's gradients over the workers, in compressed form, bucket by bucket.

    For each bucket an adapter calls ``begin``, and then ``average``, or ``average_exactly`` if the step is not
    ``compressing``. All workers must pass the same buckets in the same order.

    Args:
        scheme: What is sent of a bucket. ``schemes.new_engine`` chooses it.
        config: Configuration of the compression. Its budget may be too small for the tensors: ValueError.
        communicator: Collectives of the workers that average with each other.
        tensors: Returns {name: shape} of all tensors of this worker that are known so far.
        device: Device of the gradients, if it is known.
        buckets: Number of buckets of a step, if it is known and buckets are not joined. A budget counts their messages.

    Attributes:
        given: The configuration as it was given.
        listeners: What else happens when a step ends, in this order.
        begun: The layouts of the newest step's buckets.
        numel: [elements before, after compression] of the buckets averaged so far, without those averaged exactly.
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
        self.tensors, self.given = tensors, config
        self.plan, self.step, self.schedule = RankPlan(config), Step(), Schedule()
        if config.planned:
            self.plan.connect(communicator.world_size, buckets)
            self.plan.begin(tensors())
        self.residuals = Residuals(self.plan, tensors)
        self.buckets = Buckets(scheme, communicator, tensors, self.residuals, self.step, device)
        self.listeners, self.begun, self._before = list[Listener](), list[Layout](), BeforeCapture()
        self.numel, self.sent, self.itemsize = [0, 0], 0, 4

    @property
    def config(self) -> PowerSGDConfig:
        """The configuration in force."""
        return self.plan.config

    @property
    def iteration(self) -> int:
        """Number of ended steps."""
        return self.step.iteration

    @property
    def communicator(self) -> Communicator:
        return self.buckets.communicator

    @property
    def compressing(self) -> bool:
        """Whether the step is compressed. The first ``config.start_iter`` steps are exact."""
        if self.plan.exact:
            # No matrix has a rank any more, but errors of a loaded state are still to be added to gradients.
            return self.residuals.has_errors()
        return self.step.iteration >= self.config.start_iter and self.plan.compresses

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
            keys: What comes once in a step: when one comes again, a new step begins. Default: the tensors' names.
            last: Whether the bucket is the step's last one. None if the adapter does not know; see ``finish``.
            compress: Whether its matrices are compressed if they are large enough.

        Raises:
            DisagreementError: Workers have different configurations or tensors. Nothing was changed.
            RuntimeError: The step is captured in a CUDA graph, which is not possible for it. Nothing was changed.
            Exception: The tensors cannot be laid out, on this worker or on another one. Nothing was changed.
        """
        bucket, step = self.buckets.find(key, shapes, device, compress=compress), self.step
        keys = frozenset(keys or bucket.layout.shapes)
        if not step.keys.isdisjoint(keys):
            self.finish()
            if step.keys:
                # The open step was interrupted before its last bucket came, for example in the backward pass.
                self.void()
            # The end of a step may change which matrices are compressed.
            bucket = self.buckets.find(key, shapes, device, compress=compress)
        if captured := is_captured(device):
            check_capture(self.plan, step, self.listeners, settled=self.buckets.is_settled(bucket))
        if not step.keys:
            self._before = start(self.residuals, step, captured=captured)
        self.begun = [*(self.begun if step.keys else []), bucket.layout]
        step.keys, step.last, step.workers = step.keys | keys, last, self.communicator.world_size
        if last and self.schedule and has_streams(device):
            # Before the stream waits for this bucket's gradients. Else the message that the bucket before sends next
            # would leave only after the backward pass. (On the CPU the gradients are ready.)
            self.advance(device, wait=False, join=False)
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
            join: Whether the bucket may wait for the next ones. ``begin`` must have been told if it is the last one.
        """
        last, part = self.step.last, Part(bucket, gradients, ranges, write, done)
        with self._working(next(iter(gradients.values())).device):
            for parts in self.schedule.ready(part, self.buckets.are_large if join and not last else None):
                task = self.buckets.prepare(parts)
                for listener in self.listeners:
                    task = listener.watch(task)
                sent = self.buckets.scheme.sent_numel(task.layout, self.config, self.step.iteration)
                self.numel[:] = self.numel[0] + task.layout.numel, self.numel[1] + sent
                self.sent += 4 * sent
                run, take = self.buckets.scheme.average(task), functools.partial(write_average, task, parts)
                self.schedule.advance(run, take, finish=last is not False and parts[-1] is part)
        if last:
            self.end_step()

    def average_exactly(self, buffer: Tensor, *, done: Callable[[], None] | None = None) -> None:
        """Average a bucket's flat buffer exactly, in place. End the step if the bucket is its last one."""
        self.itemsize, last = buffer.element_size(), self.step.last
        self.sent += buffer.nbytes
        with self._working(buffer.device):
            run = mean_in_place(buffer, self.communicator)
            self.schedule.advance(run, lambda _: None if done is None else done(), finish=last is not False)
        if last:
            self.end_step()

    def advance(self, device: torch.device, *, wait: bool = True, join: bool = True) -> None:
        """Advance the buckets under way by one collective each, while something else is computed; see ``Streams``."""
        with self._working(device, wait=wait, join=join):
            self.schedule.advance()

    def end_step(self, *, applied: bool | None = None) -> Tensor | None:
        """End the open step. Collective if workers have to agree on the verdict, on their state, or on ranks.

        ``applied`` says whether the optimizer applies the step, if the adapter knows: a step not applied is sent again.
        Return a scalar on the device, 0 if the step does not count, or None if no step was open. DisagreementError:
        Workers differ; see ``PowerSGDConfig.check_every``.
        """
        step, device, verdict, communicator = self.step, self.buckets.device, None, self.communicator
        with self.residuals.streams.everywhere():
            if step.keys and device is not None:
                with self._working(device):
                    self.schedule.advance(finish=True)
                verdict = step.verdict(device)
                if applied is False:
                    verdict.zero_()
                elif applied is None and self.compressing:
                    # Workers that share sums have the same verdict, unless each has looked at its own part of the
                    # averages. Those of ``others`` may have seen another gradient overflow.
                    for workers in [*communicator.others, *([communicator] if step.uneven else [])]:
                        workers.minimum(verdict)
            step.end()
            if not self.residuals.whole.late:
                self.residuals.whole.settle(step)
            self.buckets.end_step()
            if self.config.planned:
                self.plan.end_step(step.iteration, self.buckets.in_use(), self.communicator)
            for listener in self.listeners:
                listener.end_step()
        return verdict

    def finish(self) -> None:
        """End the open step if the adapter does not know its last bucket. Its buckets are finished by now."""
        if self.step.keys and self.step.last is None:
            self.end_step()

    def void(self, *, stays_open: bool = False) -> None:
        """Discard the open step: errors keep what was compressed. ``stays_open`` if others will still end it."""
        self.schedule.clear()
        for listener in self.listeners:
            listener.void()
        with self.residuals.streams.everywhere():
            stays_open &= bool(self.step.keys)
            if stays_open and self.buckets.device is not None:
                self.step.verdict(self.buckets.device)  # so that the others hear of it
            captured, self._before = restore(self._before), {}
            self.step.void(stays_open=stays_open, captured=captured)
            self.residuals.whole.settle(self.step)
        # A captured step has run nothing, and no pinned memory may be freed while a graph is captured.
        if not captured:
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
