"""The schedule of a step, written once for all adapters."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.comm.agreement import compare
from powersgd_triton.comm.communicator import Communicator, wait
from powersgd_triton.comm.exchange import sum_over_workers
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.facts import common_facts, factor_facts, rank_facts
from powersgd_triton.core.memory import Memory
from powersgd_triton.core.saved_state import LoadReport, SavedState, Size
from powersgd_triton.layout.layout import Layout, products
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.ranges import reconstruct_ranges
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan

logger = logging.getLogger("powersgd_triton")


class Engine:
    """Averages one model's gradients over the workers, in compressed form, bucket by bucket.

    An adapter translates its framework's gradients into buckets. For each of them it calls ``begin``, and then
    ``average`` or, where ``begin`` returned False, an exact average. The engine alone begins, ends and voids steps,
    checks that the workers agree, and plans ranks. All workers must bring the same buckets in the same order, since
    that is the order of the collectives.

    Args:
        config: what to compress and how.
        communicator: whom to average with.
        tensors: gives {name: shape} of all tensors that this worker compresses or averages, as far as they are known.

    Raises:
        TypeError: ``config`` is no configuration.
        ValueError: the configuration's budget is too small for the tensors.

    Attributes:
        memory: errors and bases by name.
        plan: the ranks, where they are planned.
        step: what belongs to the step under way.
        numel: [elements before, elements after compression] over all compressed steps so far.
    """

    def __init__(
        self, config: PowerSGDConfig, communicator: Communicator, tensors: Callable[[], Mapping[str, Sequence[int]]]
    ) -> None:
        if not isinstance(config, PowerSGDConfig):
            raise TypeError(f"config must be a PowerSGDConfig; got {type(config).__name__}")
        self.config, self.communicator, self.tensors = config, communicator, tensors
        self.plan, self.step = RankPlan(config), Step()
        if config.planned:
            self.plan.begin(tensors())
        self.memory = Memory(config, self.plan)
        # Where the workers' facts are compared; None until they were, before the first step.
        self._device: torch.device | None = None
        self._under_way: collections.deque[Iterator[None]] = collections.deque()
        self.numel = [0, 0]

    def begin(self, layout: Layout, device: torch.device, *, last: bool | None = None) -> bool:
        """Take a bucket into the open step, or into a new one. Collective at the first call.

        Args:
            layout: the bucket's tensors; the same object whenever it is the same bucket.
            device: of its gradients.
            last: whether the bucket is the step's last one. None where the adapter cannot tell: the step then ends when
                one of its tensors comes again, or with ``end_step``.

        Returns:
            Whether the bucket is to be compressed. The first ``config.start_iter`` steps are exact.

        Raises:
            DisagreementError: workers have different configurations or tensors. Nothing was changed.
        """
        if self._device is None:
            self._check_agreement(device, factors=False)
            self._device = device
        if not self.step.names.isdisjoint(layout.names):
            # Every gradient comes once in a step, so this is the next one.
            self.finish()
            if self.step.names:
                # The open step was given up before its last bucket came.
                self._void()
        self.step.names |= layout.names
        self.step.last = last
        return self.step.iteration >= self.config.start_iter

    def run(self, layout: Layout, gradients: Mapping[str, Tensor], write: Callable[[Backend], None]) -> Iterator[None]:
        """One bucket's part of a step (Vogels et al. 2019, Algorithms 1 and 2). Yields while a collective is under way.

        Args:
            layout: the bucket's tensors.
            gradients: {name: contiguous tensor}, not changed by anyone before ``write`` is called.
            write: called at the end with the bucket's backend, which then can reconstruct the averages.
        """
        config, step, communicator = self.config, self.step, self.communicator
        step.workers = communicator.world_size
        # The one place where planned ranks come into a layout. A new plan gives a new layout, hence new factors, which
        # take over the errors and what fits of the bases.
        layout = self.plan.layout(layout)
        backend = self.memory.bind(layout, gradients, step)
        self.numel[0] += layout.numel
        self.numel[1] += layout.sent_numel(config, step.iteration)
        # A tensor that is no longer compressed is averaged exactly. Its remaining error is added to its gradient once.
        gradients = self.memory.add_remaining(layout, gradients, step)
        if not config.warm_start:
            backend.orthogonalize_bases(step, redraw=True)
        for repetition in range(config.iterations):
            # The standard algorithm makes both products, the alternating one makes one of them by turns.
            projects, backprojects = products(config, step.iteration, repetition)
            if projects:
                # Compensate and project: M = G + E, P = M Q. Here error feedback happens: the error buffer holds the M
                # of the step before, and P̂ Qᵀ of that step is subtracted and G added in one pass over memory.
                message = backend.project(gradients, step, repetition)
                # Sum: P ← Σ P over the workers. The tensors that are not compressed travel in the same message.
                yield from sum_over_workers(backend, message, communicator)
            if backprojects:
                # Orthogonalize and backproject: P̂ = orthogonalize(P), Q = Mᵀ P̂. All workers compute the same bits of
                # P̂ from the same sum, so that it need not be sent again. (In the alternating algorithm P̂ is the
                # orthogonalized P of the turn before, and compensating is done here.)
                message = backend.backproject(gradients, step, repetition)
                # Sum: Q̄ = mean of Q. This worker's own Q stays: what it sent, P̂ Qᵀ, is what its error must lose.
                yield from sum_over_workers(backend, message, communicator)
            # Q̄ becomes the basis of the next projection. Where a sum was not finite, which all workers see alike,
            # nothing is subtracted from M, the basis stays, and the verdict of the step becomes 0.
            backend.commit(gradients, step, repetition)
        # Reconstruct: Ĝ = P̂ Q̄ᵀ. The step ends once its last bucket is written, see ``average`` and ``end_step``.
        write(backend)

    def average(
        self,
        layout: Layout,
        gradients: Mapping[str, Tensor],
        *,
        ranges: Mapping[str, tuple[int, Tensor]] | None = None,
        write: Callable[[Backend], None] | None = None,
    ) -> None:
        """Average a bucket's gradients, compressed. Ends the step if the bucket is its last one.

        Args:
            layout: as given to ``begin``.
            gradients: {name: contiguous tensor}, overwritten with the averages; no one else touches them before.
            ranges: parts of the averages to be written instead, see ``reconstruct_ranges``; the gradients stay.
            write: called instead, with the bucket's backend, which then has the averaged factors.
        """
        step, device = self.step, next(iter(gradients.values())).device
        if ranges is not None and step.loss_scale is not None:
            # In fp16 an average may not fit though its factors do, and only who writes that part sees it.
            step.uneven |= any(gradient.dtype == torch.float16 for gradient in gradients.values())

        def reconstruct(backend: Backend) -> None:
            if ranges is None:
                backend.reconstruct(gradients, step.overflow(device))
            else:
                reconstruct_ranges(backend.bucket, ranges, step.overflow(device))

        self._advance(self.run(layout, gradients, write or reconstruct), device)

    def average_exactly(self, buffer: Tensor, *, done: Callable[[], None] | None = None) -> None:
        """Average a bucket's flat buffer in place, exactly. Ends the step if the bucket is its last one."""

        def run() -> Iterator[None]:
            work = self.communicator.all_reduce(buffer)
            yield
            wait(work)
            buffer.div_(self.communicator.world_size)
            if done is not None:
                done()

        self._advance(run(), buffer.device)

    def _advance(self, bucket: Iterator[None], device: torch.device) -> None:
        """Start a bucket's ``run``, and move those before it one collective on.

        On the CPU their messages travel while the backward pass goes on. On other devices, and where no further bucket
        is known to come, all stages are done at once: there the host only enqueues.
        """
        to_the_end = self.step.last is not False or device.type != "cpu"
        try:
            next(bucket)
            older, self._under_way = self._under_way, collections.deque()
            self._under_way.extend(steps for steps in older if next(steps, self) is not self)
            self._under_way.append(bucket)
            while to_the_end and self._under_way:
                steps = self._under_way.popleft()
                if next(steps, self) is not self:
                    self._under_way.append(steps)
        except BaseException:
            # A peer may be gone: nothing that is on its way is waited for.
            self._void()
            raise
        if self.step.last:
            self.end_step()

    def end_step(self, *, applied: bool | None = None) -> None:
        """End the open step. Collective where there is something to ask other workers.

        Args:
            applied: whether the optimizer applies the step, where the adapter knows. If not, all of it is sent again.

        Raises:
            DisagreementError: see ``PowerSGDConfig.check_every``.
        """
        step = self.step
        if step.names and self._device is not None and step.iteration >= self.config.start_iter:
            if applied is None:
                # Who shares sums sees the same; others may have seen another gradient overflow. Who writes a part of an
                # average sees whether that part fits.
                for other in [*self.communicator.others, *([self.communicator] if step.uneven else [])]:
                    other.minimum(step.verdict(self._device))
            elif not applied:
                step.verdict(self._device).zero_()
        step.end()
        every = self.config.check_every
        if every and step.ended % every == 0 and self._device is not None:
            self._check_agreement(self._device, factors=True)
        if self.config.planned:
            self.plan.end_step(step.iteration, self.memory.buckets(), self.communicator)

    def finish(self) -> None:
        """End the open step where the adapter cannot tell its last bucket: all buckets that came are done."""
        if self.step.names and self.step.last is None:
            self.end_step()

    def _void(self) -> None:
        """The open step is never applied: the errors keep the gradients that came, for the next step to send."""
        self._under_way.clear()
        self.step.void()
        self.memory.drop_buckets()

    def connect(self, communicator: Communicator) -> None:
        """Average with other workers from the next step on; they are compared before it."""
        self.communicator, self._device = communicator, None

    def _check_agreement(self, device: torch.device, *, factors: bool) -> None:
        """Compare what all workers must have in common, on request also the bits of their factors. Collective."""
        tensors = self.tensors()
        common = common_facts(self.config, tensors, self.step.iteration)
        replicated = rank_facts(self.config, tensors, self.plan)
        compare(
            common, replicated | (factor_facts(self.memory.buckets()) if factors else {}), self.communicator, device
        )

    def state_dict(self, mean: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
        """Mean error, bases, step and plan as plain tensors and numbers. Collective.

        ``mean``: averages a tensor over the workers; None for an all-reduce.
        """
        self.finish()
        return self.memory.save(self.step, mean or self.communicator.mean).to_dict(self.config)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        tensors: Mapping[str, Size] | None,
        *,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        owner: tuple[int, int] | None = None,
    ) -> LoadReport:
        """Go on from a saved state. Matrices take over their parts when their gradients come for the first time.

        Args:
            state_dict: from ``state_dict``. Its rank may be another one.
            tensors: size of every tensor, where all are known; None for those that came so far.
            strict: whether all matrices must be in both, the state and this model.
            rename: {saved name: name here}.
            owner: (index, world size) of the worker whose own errors are in the state; None for mean errors.

        Returns:
            What has become of the state's matrices.

        Raises:
            ValueError: the state is of another format, configuration or model. Nothing was changed.
        """
        feedback = self.config.error_feedback
        saved = SavedState.parse(state_dict, needs_errors=feedback, rename=rename)
        known = self.memory.sizes if tensors is None else tensors
        report = saved.compare(known, complete=tensors is not None, strict=strict, feedback=feedback)
        self.plan.load_state_dict(saved.plan)
        self.step.iteration = saved.iteration
        self.step.forget()
        self.memory.load(saved.used(report, strict=strict, owner=owner))
        logger.info("Loaded PowerSGD state of step %s: %s", saved.iteration, report)
        return report

    def layout(self) -> Layout:
        """All tensors in one layout, with the ranks that they have now."""
        return self.plan.ranked(Layout.build(self.tensors(), self.config))
