"""The ranks in force under a byte budget. A step is measured, the host plans, and the plan is used a step later."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import AUTO, PowerSGDConfig
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.host_copy import HostCopy
from powersgd_triton.ranks.planner import Spectrum, allot, budget, largest_ranks, sent_bytes, starting_ranks

logger = logging.getLogger("powersgd_triton")


class Measurement:
    """Energies of the matrices of buckets on one device, after a step. They are copied to the host without waiting."""

    def __init__(self, buckets: Iterable[Bucket], communicator: Communicator) -> None:
        self._ranks = list[tuple[str, int]]()
        totals, columns = list[Tensor](), list[Tensor]()
        for bucket in buckets:
            # Of a matrix that the workers of a node share, each measures its own rows of the node's sum.
            zero = torch.zeros((), dtype=torch.float64, device=bucket.P_hat.device)
            squares = {
                piece.name: torch.linalg.vector_norm(error, dtype=torch.float64).square() / bucket.partition.workers
                for group, M in zip(bucket.own, bucket.M or [], strict=True)
                for piece, error in zip(group.segments, M, strict=True)
            }
            for group in bucket.layout.groups:
                self._ranks += [(segment.name, group.rank) for segment in group.segments]
                totals += [squares.get(segment.name, zero) for segment in group.segments]
            columns += [energy.flatten() for energy in _column_energies(bucket)]
        # All workers have the columns of the average. Of ‖M_w‖², each has its own.
        self._copy = HostCopy(torch.cat([communicator.mean(torch.stack(totals)), *columns]))

    def spectra(self) -> dict[str, Spectrum]:
        """Return what was measured. The host waits until the copy is done."""
        numbers = self._copy.numbers()
        totals, columns = numbers[: len(self._ranks)], iter(numbers[len(self._ranks) :])
        return {
            name: Spectrum(tuple(next(columns) for _ in range(rank)), total)
            for (name, rank), total in zip(self._ranks, totals, strict=True)
        }


def _column_energies(bucket: Bucket) -> list[Tensor]:
    """Return ‖l_k‖² ‖r_k‖² of the average's columns, fp64 [B, r] for each group. One factor is orthonormal."""
    found = [
        torch.zeros(len(g.segments), g.rank, device=bucket.P_hat.device, dtype=torch.float64)
        for g in bucket.layout.groups
    ]
    for P, Q in bucket.average:
        for energy, left, right in zip(found, bucket.left(P), bucket.right(Q), strict=True):
            energy += left.double().square().sum(dim=1) * right.double().square().sum(dim=1)
    return found


class RankPlan:
    """The rank of each matrix of a model, if the configuration has a budget. Without a budget it changes nothing.

    Attributes:
        given: The configuration as it was given.
        config: The configuration in force. It differs once ``settle`` was called.
        buckets: Number of buckets of a step, if they are not joined.
        tensors: All tensors that are known, {name: shape}.
        settled: What ``settle`` got. None before.
        ranks: {name: rank}.
        spectra: {name: Spectrum} of the last measurement. Empty before the first one.
        demands: {name: share of the sum of all ``Spectrum.demand``, averaged over plans}. Ranks are planned from it.
        pending: Measurement for the next plan.
    """

    def __init__(self, config: PowerSGDConfig) -> None:
        self.config, self.given, self._workers = config, config, 1
        self.settled: dict[str, Any] | None = None
        self.buckets: int | None = None
        self.tensors: dict[str, tuple[int, ...]] = {}
        self.ranks: dict[str, int] = {}
        self.spectra: dict[str, Spectrum] = {}
        self.demands: dict[str, float] = {}
        self.pending: Measurement | dict[str, Spectrum] | None = None

    @property
    def compresses(self) -> bool:
        """Whether steps are compressed. Not before ``compression="auto"`` is settled, nor if it chose an all-reduce."""
        return self.config.compression != AUTO

    def begin(self, tensors: Mapping[str, Sequence[int]]) -> None:
        """Make the first plan for a model's tensors, {name: shape}. ValueError: the budget is too small for them."""
        if self.config.planned:
            ranks = starting_ranks(tensors, self.config, self._workers, self.buckets) if self.compresses else {}
            self.tensors = {name: tuple(shape) for name, shape in tensors.items()}
            self._adopt(ranks)
            if ranks and set(ranks.values()) == {self.config.max_rank}:
                sent, allowed = sent_bytes(tensors, ranks, self.config), budget(tensors, self.config)
                text = "PowerSGD ranks are limited to %s columns: a step sends %s of the %s bytes that it may send"
                logger.info(text, self.config.max_rank, f"{sent:,.0f}", f"{allowed:,.0f}")

    @property
    def exact(self) -> bool:
        """Whether ``compression="auto"`` chose an all-reduce."""
        return self.settled is not None and not self.compresses

    @property
    def measures(self) -> bool:
        """Whether something is still to be settled."""
        return self.config.measures and self.settled is None

    def settle(self, fields: Mapping[str, Any]) -> None:
        """Replace fields of the configuration by what was chosen from measured times. A compression of None is exact.

        Ranks above a new limit fall to it.

        Raises:
            ValueError: The budget is too small. Nothing was changed.
        """
        if fields.get("compression", 1) is not None:
            config = dataclasses.replace(self.config, **fields, max_overhead=None)
            largest = largest_ranks(self.tensors, config)
            ranks = {name: min(rank, largest[name]) for name, rank in self.ranks.items()}
            if "compression" in fields:
                ranks = starting_ranks(self.tensors, config, self._workers, self.buckets)
            self.config = config
            self._adopt(ranks)
        self.settled = dict(fields)

    def connect(self, workers: int, buckets: int | None = None) -> None:
        """Plan for a number of workers, and of buckets if given. The ranks stay if they were measured and fit."""
        if buckets is not None:
            self.buckets = buckets
        if workers == self._workers:
            return
        self._workers = workers
        if self.config.planned and self.tensors and not (self.demands and self._fits(self.ranks)):
            self.begin(self.tensors)

    def _fits(self, ranks: Mapping[str, int]) -> bool:
        sent = sent_bytes(self.tensors, ranks, self.config, self._workers, self.buckets)
        return sent <= budget(self.tensors, self.config)

    def layout(self, layout: Layout) -> Layout:
        """Return a bucket's layout with the ranks in force."""
        if self.config.planned:
            self.tensors |= {s.name: s.shape for s in layout.segments if s.name not in self.tensors}
        return self._ranked(layout)

    def layout_of(self, tensors: Mapping[str, Sequence[int]]) -> Layout:
        """Return tensors {name: shape} in one layout, with the ranks in force."""
        return self._ranked(Layout.build(tensors, self.config))

    def _ranked(self, layout: Layout) -> Layout:
        if not self.config.planned:
            return layout
        # A matrix that became trainable later has rank 1 until the next plan.
        return layout.with_ranks(lambda segment: self.ranks.get(segment.name, int(self.compresses)))

    @property
    def mean_rank(self) -> float:
        """Mean rank of an element of the compressed matrices."""
        numels = {name: math.prod(self.tensors[name]) for name in self.ranks}
        return sum(rank * numels[name] for name, rank in self.ranks.items()) / max(1, sum(numels.values()))

    def end_step(self, iteration: int, buckets: Sequence[Bucket], communicator: Communicator) -> None:
        """Adopt a plan from the measurement of the last step, or measure this step if it is time. Collective.

        The host does not wait for the step that has just ended.
        """
        if self._replan():
            # The factors in the buckets still have the ranks of the previous plan.
            return
        steps, every = iteration - self.config.start_iter, self.config.replan_every
        buckets = [bucket for bucket in buckets if bucket.average and bucket.layout.compressed]
        if self.config.planned and steps > 0 and every > 0 and steps % every == 0 and buckets:
            self.pending = Measurement(buckets, communicator)

    def _replan(self) -> bool:
        """Make and adopt a plan from the pending measurement. Return whether there was one."""
        spectra, self.pending = self._measured(), None
        found = {name: spectrum.demand for name, spectrum in spectra.items() if math.isfinite(spectrum.demand)}
        total = sum(found.values())
        if not (math.isfinite(total) and total > 0):
            return False
        for name, demand in found.items():
            # Averaged, since energies vary from step to step. Shares, since gradients and loss scales change in size.
            self.demands[name] = (self.demands.get(name, demand / total) + demand / total) / 2
        ranks = allot(self.tensors, self.ranks, self.demands, self.config, self._workers, self.buckets)
        changed = sum(rank != self.ranks.get(name) for name, rank in ranks.items())
        logger.info("PowerSGD ranks: %s of %s matrices have a new rank", changed, len(ranks))
        self.spectra |= {name: spectra[name] for name in found}
        self._adopt(ranks)
        return True

    def _measured(self) -> dict[str, Spectrum]:
        return self.pending.spectra() if isinstance(self.pending, Measurement) else self.pending or {}

    def kept_columns(self, name: str, before: int, after: int) -> list[int]:
        """Return the columns that a matrix keeps when its rank falls: those with the highest energy, in order."""
        columns = self.spectra[name].columns if name in self.spectra else ()
        if len(columns) != before:
            return list(range(after))
        return sorted(sorted(range(before), key=lambda k: -columns[k])[:after])

    @property
    def planned_from(self) -> dict[str, Any]:
        """What the next ranks depend on, as far as the host knows it."""
        known = {"demands": self.demands, "workers": self._workers, "settled": self.settled}
        return {**known, "something was measured": self.pending is not None}

    def _adopt(self, ranks: dict[str, int]) -> None:
        # Buckets are laid out anew for a new dictionary.
        if ranks != self.ranks:
            self.ranks = ranks

    def state_dict(self) -> dict[str, Any]:
        """Return the ranks, and what they and the next ranks are planned from, as plain numbers."""
        saved: dict[str, Any] = {} if self.settled is None else {"settled": dict(self.settled)}
        saved |= {"ranks": dict(self.ranks), "demands": dict(self.demands)}
        for key, spectra in (("spectra", self.spectra), ("pending", self._measured())):
            # No plan is made from a measurement of a step that was not finite.
            finite = {name: s for name, s in spectra.items() if math.isfinite(s.total + sum(s.columns))}
            saved[key] = {name: [s.total, *s.columns] for name, s in finite.items()}
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of ``state_dict``.

        Matrices that it lacks start with the rank of the first plan, and all do if the saved ranks exceed the budget.
        """
        if not self.config.planned:
            return
        self.config, self.settled = self.given, None
        self.begin(self.tensors)
        settled = saved.get("settled") or {}
        # What another configuration has settled does not count.
        if settled and self.given.measures and ("compression" in settled) == (not self.compresses):
            try:
                self.settle(settled)
                logger.info("PowerSGD goes on with what was chosen from measured times: %s", settled)
            except ValueError as error:
                logger.info("PowerSGD measures again: %s", error)
        self.demands, self.spectra, self.pending = {}, {}, None
        largest = largest_ranks(self.tensors, self.config)
        ranks = {name: min(rank, largest[name]) for name, rank in saved.get("ranks", {}).items() if name in self.ranks}
        if ranks and self._fits(self.ranks | ranks):
            self._adopt(self.ranks | ranks)
            self.demands = dict(saved["demands"])
            self.spectra, self.pending = (
                {name: Spectrum(tuple(columns), total) for name, (total, *columns) in saved[key].items()}
                for key in ("spectra", "pending")
            )
