"""The schedule of a step, written once for all adapters."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.comm.codes import average_in_codes
from powersgd_triton.comm.communicator import Communicator, Work, wait
from powersgd_triton.comm.exchange import Schedule, share_of_sum, sum_over_workers, waits
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.capture import Capture
from powersgd_triton.core.clock import BACKPROJECT, COMMIT, EXCHANGE, MESSAGES, PROJECT, RECONSTRUCT, TELEMETRY, Clock
from powersgd_triton.core.facts import Tensors
from powersgd_triton.core.memory import Memory
from powersgd_triton.core.peers import Peers, Read, Shapes
from powersgd_triton.core.saved_state import LoadReport, SavedState
from powersgd_triton.core.streams import has_streams
from powersgd_triton.core.telemetry import Telemetry
from powersgd_triton.core.tuning import Tuning
from powersgd_triton.core.waiting import Waiting
from powersgd_triton.layout.layout import Layout, products
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.ranges import reconstruct_ranges
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan

logger = logging.getLogger("powersgd_triton")


class Engine:
    """Averages one model's gradients over the workers, in compressed form, bucket by bucket.

    An adapter translates its framework's gradients into buckets. For each bucket it calls ``begin``, and then
    ``average``, or an exact average if the step is not ``compressing``. Only the engine begins, ends and voids steps,
    checks that the workers agree, and plans ranks. All workers must pass the same buckets in the same order, since the
    order of the buckets is the order of the collectives.

    Args:
        config: Configuration of the compression.
        communicator: Collectives of the workers that average with each other.
        tensors: Returns {name: shape} of all tensors that this worker compresses or averages and that are known so far.
        device: Device of the gradients. None if it is not known before they come.
        buckets: Number of buckets of a step, if the adapter knows it and they are not joined. A budget counts their
            messages.
        codes: Whether the adapter can send tensors in codes.

    Raises:
        TypeError: ``config`` is not a configuration.
        ValueError: The configuration's budget is too small for the tensors, or it has codes that the adapter cannot
            send.

    Attributes:
        memory: Errors and bases by name.
        peers: The workers, and what was compared with them.
        plan: The ranks in force, if ranks are planned.
        step: State of the step under way.
        numel: [elements before, after compression] over all buckets given to ``run`` so far.
        sent: Bytes sent so far by ``run`` and ``average_exactly``.
        clock: Times the steps that telemetry measures.
        telemetry: What measures and reports steps. None if nobody has asked.
    """

    def __init__(
        self,
        config: PowerSGDConfig,
        communicator: Communicator,
        tensors: Callable[[], Tensors],
        device: torch.device | None = None,
        buckets: int | None = None,
        *,
        codes: bool = False,
    ) -> None:
        if not isinstance(config, PowerSGDConfig):
            raise TypeError(f"config must be a PowerSGDConfig; got {type(config).__name__}")
        if config.codes is not None and not codes:
            raise ValueError(
                f"codes are for local steps, powersgd_triton.integrations.local_steps; got codes={config.codes!r} for "
                "gradients, which lose less as factors of as many bytes: give rank or compression"
            )
        self.tensors = tensors
        self.plan, self.step = RankPlan(config), Step()
        if config.planned:
            self.plan.connect(communicator.world_size, buckets)
            self.plan.begin(tensors())
        self.memory = Memory(self.plan)
        self.peers = Peers(communicator, tensors, self.plan, self.memory, self.step, device)
        self._capture = Capture(self.plan, self.memory, self.step)
        # Each with the collective that it waits for.
        self._under_way: collections.deque[tuple[Schedule, Work]] = collections.deque()
        self._waiting = Waiting()
        self._tuning = self._new_tuning()
        self.numel, self.sent = [0, 0], 0
        self.clock = Clock()
        self.telemetry: Telemetry | None = None

    @property
    def config(self) -> PowerSGDConfig:
        """The configuration in force."""
        return self.plan.config

    @property
    def communicator(self) -> Communicator:
        """Collectives of the workers that average with each other."""
        return self.peers.communicator

    @property
    def compressing(self) -> bool:
        """Whether the step is compressed. The first ``config.start_iter`` steps are exact."""
        if self.plan.exact:
            # No matrix has a rank any more, but errors of a loaded state are still to be added to gradients.
            return self.memory.has_errors(self.step)
        return self.step.iteration >= self.config.start_iter and self.plan.compresses

    def begin(
        self,
        key: Hashable,
        shapes: Shapes,
        device: torch.device,
        *,
        keys: Iterable[Hashable] = (),
        last: bool | None = None,
    ) -> Layout:
        """Add a bucket to the open step, or to a new one. Collective when the bucket comes for the first time.

        Args:
            key: What identifies the bucket's tensors.
            shapes: Returns {name: shape} of the bucket's tensors. It is called once for each key.
            device: Device of its gradients.
            keys: What comes once in a step: when a key comes again, a new step begins. Default: the tensors' names.
            last: Whether the bucket is the step's last one. None if the adapter does not know. The step then ends when
                a key comes again, or with ``end_step``.

        Returns:
            The bucket's layout.

        Raises:
            DisagreementError: Workers have different configurations or tensors. Nothing was changed.
            RuntimeError: The step is captured in a CUDA graph, which is not possible for it. Nothing was changed.
            Exception: The tensors cannot be laid out, on this worker or on another one. Nothing was changed.

        On CUDA, the last bucket's call also continues older buckets. If that fails, the step is void.
        """
        layout = self.peers.layout(key, shapes, device)
        keys = frozenset(keys) or layout.names
        if not self.step.keys.isdisjoint(keys):
            self.finish()
            if self.step.keys:
                # The open step was interrupted before its last bucket came, for example in the backward pass.
                self._void()
        self._capture.start(layout, device, reported=self.telemetry is not None)
        if self._tuning is not None:
            self._tuning.begin(layout, first=not self.step.keys)
        self.step.keys |= keys
        self.step.last = last
        if last and self._under_way and has_streams(device):
            # Before the engine's stream waits for this bucket's gradients. Else the message that the bucket before
            # sends next would leave only after the backward pass. (On the CPU the gradients are ready, and the host
            # would wait for messages while it could compute.)
            with self.memory.streams.on(device, wait=False, join=False), self._or_void():
                self._advance_older()
        return layout

    def bind(self, layout: Layout, gradients: Mapping[str, Tensor]) -> Backend:
        """Return the backend of a bucket. Collective when the bucket comes for the first time.

        If memory for it cannot be allocated, the step is void.
        """
        with self.memory.streams.on(next(iter(gradients.values())).device), self._or_void():
            return self.peers.bind(layout, gradients)

    def run(self, backend: Backend, gradients: Mapping[str, Tensor], write: Callable[[Backend], None]) -> Schedule:
        """Run one bucket's part of a step (Vogels et al. 2019, Algorithms 1, 2). Yield each collective that is started.

        Whoever goes on with it waits for the collective before.

        Args:
            backend: Result of ``bind``.
            gradients: {name: contiguous tensor}. They must not change before ``write`` is called.
            write: Function that is called last, with the bucket's backend, which can then reconstruct the averages.
        """
        config, step, communicator, mark = self.config, self.step, self.communicator, self.clock.mark
        step.workers, layout = communicator.world_size, backend.bucket.layout
        sent = layout.sent_numel(config, step.iteration)
        self.numel[0] += layout.numel
        self.numel[1] += sent
        self.sent += 4 * sent
        # A tensor that is no longer compressed is averaged exactly. Its remaining error is added to its gradient once.
        gradients = self.memory.add_remaining(layout, gradients, step)
        yield from self.memory.move_rows(backend.bucket, communicator)
        if communicator.inside is not None:
            # The workers of a node sum their gradients, and each compresses its share of the sum.
            gradients = yield from share_of_sum(backend.bucket, gradients, communicator.inside)
        if not config.warm_start:
            mark(PROJECT)
            backend.orthogonalize_bases(step, redraw=True)
        for repetition in range(config.iterations):
            # The standard algorithm computes both products. The alternating algorithm computes one of them by turns.
            projects, backprojects = products(config, step.iteration, repetition)
            if projects:
                mark(PROJECT)
                # Compensate and project: M = G + E, P = M Q. Error feedback happens here. The error buffer still holds
                # the last step's M. Subtracting that step's P̂ Qᵀ and adding G takes one pass over memory.
                message = backend.project(gradients, step, repetition)
                mark(MESSAGES)
                # Sum: P ← Σ P over the workers. Tensors that are not compressed are part of the step's first message.
                yield from sum_over_workers(backend, message, communicator)
            if backprojects:
                mark(BACKPROJECT)
                # Orthogonalize and backproject: P̂ = orthogonalize(P), Q = Mᵀ P̂. All workers compute the same bits of
                # P̂ from the same sum, so P̂ is not sent. (In the alternating algorithm P̂ comes from the turn before,
                # and this product compensates M.)
                message = backend.backproject(gradients, step, repetition)
                mark(MESSAGES)
                # Sum: Q̄ = mean of Q. Keep this worker's own Q: the worker sent P̂ Qᵀ, so its error must lose P̂ Qᵀ.
                yield from sum_over_workers(backend, message, communicator)
            mark(COMMIT)
            # Orthonormalize Q̄ as the basis of the next projection. If a sum is not finite, which is the same on all
            # workers, M gets back what it had, the basis stays, and the step's verdict becomes 0.
            backend.commit(gradients, step, repetition)
        if self.telemetry is not None:
            # Now M and what is subtracted from it are known, and without error feedback M is still in the gradients.
            mark(TELEMETRY)
            self.telemetry.measure(backend.bucket, gradients, step)
        mark(RECONSTRUCT)
        # Reconstruct: Ĝ = P̂ Q̄ᵀ. The step ends after its last bucket is written; see ``average`` and ``end_step``.
        write(backend)

    def run_coded(self, layout: Layout, gradients: Mapping[str, Tensor], done: Callable[[], None] | None) -> Schedule:
        """Average one bucket's whole tensors in codes, in place, as ``run`` does with factors. Then call ``done``."""
        step, mark = self.step, self.clock.mark
        sent = layout.sent_numel(self.config, step.iteration)
        self.numel[0] += layout.numel
        self.numel[1] += sent
        self.sent += 4 * sent
        mark(PROJECT)
        M = self.memory.compensated(layout, gradients, step)
        mark(MESSAGES)
        mean = yield from average_in_codes(M, self.config, self.communicator)
        mark(COMMIT)
        self.memory.keep(layout, M, step)
        mark(RECONSTRUCT)
        for segment in layout.segments:
            gradients[segment.name].view(-1).copy_(mean[segment.offset : segment.offset + segment.numel])
        if done is not None:
            done()

    def average(
        self,
        layout: Layout,
        gradients: Mapping[str, Tensor],
        *,
        ranges: Mapping[str, tuple[int, Tensor]] | None = None,
        write: Callable[[Backend], None] | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Average a bucket's gradients in compressed form. End the step if the bucket is its last one.

        Args:
            layout: Result of ``begin``, or another layout of the same tensors.
            gradients: {name: contiguous tensor}. Overwritten with the averages; do not use them before.
            ranges: Parts of the averages to write, see ``reconstruct_ranges``. The gradients then stay as they are.
            write: Function to call instead of writing, with the bucket's backend, which then has the averaged factors.
            done: Function to call when the averages are written.
        """
        step, device = self.step, next(iter(gradients.values())).device
        if self.config.codes is not None:
            self._advance(self.run_coded(layout, gradients, done), device)
            return
        if ranges is not None and step.loss_scale is not None:
            # An average may overflow in fp16 although its factors are finite. Only the worker that writes it sees that.
            step.uneven |= any(gradient.dtype == torch.float16 for gradient in gradients.values())

        def reconstruct(backend: Backend) -> None:
            if ranges is None:
                backend.reconstruct(gradients, step.overflow(device))
            else:
                reconstruct_ranges(backend.bucket, ranges, step.overflow(device))
            if done is not None:
                done()

        self._advance(self.run(self.bind(layout, gradients), gradients, write or reconstruct), device)

    def average_joined(self, layout: Layout, gradients: Mapping[str, Tensor], done: Callable[[], None]) -> None:
        """Do the same as ``average``, possibly later, together with the next buckets of the step.

        ``begin`` must have been told whether the bucket is the last one. ``done`` is called when the gradients are
        overwritten.
        """
        waiting, last = self._waiting, self.step.last
        if not waiting.takes(gradients):
            self.step.last = False
            self._average_waiting()
            self.step.last = last
        waiting.add(layout, gradients, done)
        if last or waiting.ready(self._is_large):
            self._average_waiting()

    def _is_large(self, layout: Layout) -> bool:
        return not waits(self.plan.layout(layout), self.config, self.communicator.world_size)

    def _average_waiting(self) -> None:
        layout, gradients, done = self._waiting.take()
        self.average(layout, gradients, done=done)

    def average_exactly(self, buffer: Tensor, *, done: Callable[[], None] | None = None) -> None:
        """Average a bucket's flat buffer exactly, in place. End the step if the bucket is its last one."""
        if self._tuning is not None:
            self._tuning.itemsize = buffer.element_size()

        def run() -> Schedule:
            self.sent += buffer.nbytes
            yield self.communicator.all_reduce(buffer)
            buffer.div_(self.communicator.world_size)
            if done is not None:
                done()

        self._advance(run(), buffer.device)

    def _advance(self, bucket: Schedule, device: torch.device) -> None:
        """Start a bucket's ``run``, and advance the older buckets by one collective.

        Messages then travel while later buckets are computed, and during the backward pass. With two collectives a
        bucket, the order is P₀ P₁ Q₀ P₂ Q₁ …, on the CPU as on CUDA, where the host only enqueues. (On CUDA, ``begin``
        of the last bucket P₃ starts Q₂ before it.) If no later bucket is expected, all buckets are finished.
        """
        with self.memory.streams.on(device):
            with self._or_void():
                # First: its kernels need not wait for the messages of the older ones.
                started = self._go_on(bucket)
                self._advance_older()
                self._under_way.extend(started)
                while self.step.last is not False and self._under_way:
                    self._under_way.extend(self._go_on(*self._under_way.popleft()))
            if self.step.last:
                self.end_step()

    def advance(self, *, finish: bool) -> bool:
        """Advance the buckets under way by one collective each, or finish them and the step.

        It is for steps whose buckets travel while something else is computed: ``begin`` was told that none is the last.

        Returns:
            Whether the step counts, as far as that is known.
        """
        assert self.peers.device is not None, "a bucket was begun"
        with self.memory.streams.on(self.peers.device):
            with self._or_void():
                self._advance_older()
                while finish and self._under_way:
                    self._under_way.extend(self._go_on(*self._under_way.popleft()))
            if not finish:
                return True
            verdict = self.step.verdict(self.peers.device)
            self.end_step()
            return bool(verdict)

    def _advance_older(self) -> None:
        """Advance each bucket under way by one collective."""
        older, self._under_way = self._under_way, collections.deque()
        for each in older:
            self._under_way.extend(self._go_on(*each))

    @contextlib.contextmanager
    def _or_void(self) -> Iterator[None]:
        """Void the step if the block raises an exception."""
        try:
            yield
        except BaseException:
            # A peer may be gone, so do not wait for collectives under way.
            self._void()
            raise

    def _go_on(self, bucket: Schedule, work: Work = None) -> list[tuple[Schedule, Work]]:
        """Wait for a bucket's collective, and run it up to the next one. Return both, or nothing if it is done."""
        mark = self.clock.mark
        mark(EXCHANGE)
        wait(work)
        mark(MESSAGES)
        going_on = [(bucket, started) for started in itertools.islice(bucket, 1)]
        mark(None)
        return going_on

    def end_step(self, *, applied: bool | None = None) -> None:
        """End the open step. Collective if workers have to agree on the verdict, on their state, or on ranks.

        Args:
            applied: Whether the optimizer applies the step, if the adapter knows. A step not applied is sent again.

        Raises:
            DisagreementError: Workers differ; see ``PowerSGDConfig.check_every``.
        """
        step, device = self.step, self.peers.device
        with self.memory.streams.everywhere():
            if step.keys and device is not None:
                if applied is False:
                    step.verdict(device).zero_()
                elif applied is None and self.compressing:
                    # Workers that share sums have the same verdict. Workers of ``others`` may have seen another
                    # gradient overflow. If the step is uneven, each worker knows only whether its own part of the
                    # averages fits.
                    for other in [*self.communicator.others, *([self.communicator] if step.uneven else [])]:
                        other.minimum(step.verdict(device))
            step.end()
            # Counted by ``ended``: the iteration is one of the things in which workers may differ.
            every = self.config.check_every
            if every and step.ended % every == 0:
                self.peers.check()
            if self.config.planned:
                self.plan.end_step(step.iteration, self.memory.buckets(), self.communicator)
            if self._tuning is not None and device is not None and self._tuning.end_step(device):
                self._tuning = None
                # Which matrices are compressed may depend on what was chosen.
                self.peers.forget()
                self._waiting = Waiting()
            times = self.clock.stop()
            # Last, since a user's function may raise an exception.
            if self.telemetry is not None and self.telemetry.end_step(step.iteration, self.sent, times):
                self.clock.start(device)

    def _new_tuning(self) -> Tuning | None:
        return Tuning(self.plan, self.peers, self.step, type(self)) if self.plan.measures else None

    def finish(self) -> None:
        """End the open step if the adapter does not know its last bucket. All of its buckets are finished by now."""
        if self.step.keys and self.step.last is None:
            self.end_step()

    def _void(self) -> None:
        """Discard the open step. The errors keep the gradients that were compressed, and the next step sends them."""
        self._under_way.clear()
        self._waiting.clear()
        self.clock.cancel()
        with self.memory.streams.everywhere():
            # Workers of other groups may not have heard of it and end the step, which is collective.
            self.step.void(stays_open=bool(self.communicator.others), captured=self._capture.undo())
        self.memory.drop_buckets()

    def connect(self, communicator: Communicator) -> None:
        """Average with other workers from the next step on. They are compared before that step."""
        if self.step.keys:
            self._void()
        self.step.ended = 0
        self._waiting = Waiting()
        self._tuning = self._new_tuning()
        self.peers.connect(communicator)

    def state_dict(self, mean: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
        """Return mean error, bases, step and plan. Collective. ``mean`` averages a tensor. Default: an all-reduce."""
        self.finish()
        return self.memory.save(self.step, mean or self.communicator.mean).to_dict(self.config)

    def load_state_dict(
        self, read: Read, *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> LoadReport:
        """Continue from a saved state. Collective. Unless all workers load the same, none of them does.

        Args:
            read: Returns the result of ``state_dict``, whose rank may differ, and the size of every tensor. If not all
                are known, the sizes are None, and the tensors seen so far are used. What it raises on one worker is
                an error on all.
            strict: Whether the state and this model must have the same matrices.
            rename: {saved name: name here}.

        Returns:
            What was used of the state, and what was not.

        Raises:
            ValueError: A worker's state has another format, or belongs to another configuration or model. Nothing was
                changed.
            DisagreementError: Workers have read different states, or do not all load one. Nothing was changed.
        """
        return self.adopt(*self.peers.read(read, strict=strict, rename=rename))

    def adopt(self, saved: SavedState, report: LoadReport) -> LoadReport:
        """Continue from a state that was checked. A matrix takes over its part when its gradient comes first.

        A step that is open is dropped, since the state replaces everything.
        """
        self.plan.load_state_dict(saved.plan)
        self._tuning = self._new_tuning()
        self.step.iteration = saved.iteration
        self.drop_step()
        # Other ranks may need other buckets.
        self._waiting = Waiting()
        self.memory.load(saved)
        self.peers.forget()
        logger.info("Loaded PowerSGD state of step %s: %s", saved.iteration, report)
        return report

    def forget(self) -> None:
        """Set all errors to zero, and drop a step that is open."""
        self.drop_step()
        self.memory.forget_errors()

    def drop_step(self) -> None:
        """Discard what is left of an open step."""
        self.step.forget()
        self._under_way.clear()
        self._waiting.clear()
        self.clock.cancel()

    def layout(self, tensors: Tensors | None = None) -> Layout:
        """Return tensors {name: shape} in one layout, with the ranks in force. Default: all tensors that are known."""
        return self.plan.ranked(Layout.build(self.tensors() if tensors is None else tensors, self.config))
