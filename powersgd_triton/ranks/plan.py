"""The ranks in force under a byte budget, and their saved form."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import AUTO, PowerSGDConfig, logger, quantized
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.step import HostCopy
from powersgd_triton.ranks.planner import Planner, Spectrum, budget, sent_bytes

Plan = dict[str, dict[str, Any]]
"""{"ranks": {name: rank}, "demands": {name: number}, "spectra", "pending": {name: [energy, energy of each column]}}."""
Spectra = dict[str, Spectrum]
CHOICES = ({"max_rank"}, {"compression"}, {"compression", "wire_dtype"}, {"quantize"}, {"quantize", "error_feedback"})
"""The fields that are settled together."""


def measured(buckets: Iterable[Bucket], communicator: Communicator) -> Callable[[], Spectra]:
    """Measure the energies of the buckets' matrices after a step. Collective; the host does not wait for the device.

    The function that is returned waits, and returns {name: spectrum}.
    """
    ranks, totals, columns = list[tuple[str, int]](), list[Tensor](), list[Tensor]()
    for bucket in buckets:
        for group, (left, right) in zip(bucket.layout.groups, bucket.joined(bucket.average), strict=True):
            # ‖l_k‖² ‖r_k‖² of the average's columns [B, r], since one factor is orthonormal. With several repetitions
            # of a step, they are one after the other.
            energies = left.double().square().sum(dim=1) * right.double().square().sum(dim=1)
            energies = energies.unflatten(1, (-1, group.rank)).sum(dim=1)
            # All matrices of a tensor have one rank.
            columns += [part.sum(dim=0) for part in energies.split(group.counts)]
            for segment in group.segments:
                ranks.append((segment.name, group.rank))
                # Of a matrix that the workers of a node share, each measures its own rows of the node's sum.
                own = bucket.buffers.get(segment.name, energies.new_empty(0))
                squares = torch.linalg.vector_norm(own, dtype=torch.float64).square()
                totals.append(squares / bucket.partition.workers)
    # All workers have the columns of the average. Of ‖M_w‖², each has its own.
    copy = HostCopy(torch.cat([communicator.mean(torch.stack(totals)), *columns]))

    def spectra() -> Spectra:
        numbers = iter(copy.numbers())
        found = [(*each, next(numbers)) for each in ranks]
        return {name: Spectrum(tuple(itertools.islice(numbers, rank)), total) for name, rank, total in found}

    return spectra


class RankPlan:
    """The rank of each matrix of a model, if the configuration has a budget. Without a budget it changes nothing.

    A step is measured, the host plans, and the plan is used a step later.

    Attributes:
        given, config: The configuration as it was given, and that in force. They differ once ``settle`` was called.
        buckets: Number of buckets of a step, if they are not joined.
        tensors: All tensors that are known, {name: shape}.
        copies: See ``Communicator``. If there are any, "auto" does not choose to quantize gradients.
        settled: What ``settle`` got. None before.
        spectra: Those of the last measurement.
        demands: {name: share of the sum of all ``Spectrum.demand``, averaged over plans}. Ranks are planned from it.
        pending: What returns the spectra for the next plan.
    """

    def __init__(self, config: PowerSGDConfig) -> None:
        self.config, self.given, self._workers = config, config, 1
        self.buckets: int | None = None
        self.copies = frozenset[str]()
        self.settled: dict[str, Any] | None = None
        self.tensors: dict[str, tuple[int, ...]] = {}
        self.ranks: dict[str, int] = {}
        self.spectra: Spectra = {}
        self.demands: dict[str, float] = {}
        self.pending: Callable[[], Spectra] | None = None

    @property
    def compresses(self) -> bool:
        """Whether steps are compressed. Not before ``compression="auto"`` is settled, nor if it chose an all-reduce."""
        return self.config.compression != AUTO

    def begin(self, tensors: Mapping[str, Sequence[int]]) -> None:
        """Make the first plan for a model's tensors, {name: shape}. ValueError: the budget is too small for them."""
        if self.config.planned:
            ranks = self._planner(tensors).starting_ranks() if self.compresses else {}
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

        Ranks above a new limit fall to it. ValueError: the budget is too small, and nothing was changed.
        """
        if fields.get("compression", 1) is not None:
            changed = quantized if "quantize" in fields else dataclasses.replace
            config = changed(self.config, **fields, max_overhead=None)
            planner = dataclasses.replace(self._planner(self.tensors), config=config)
            limited = {name: min(rank, planner.largest[name]) for name, rank in self.ranks.items()}
            self._adopt(planner.starting_ranks() if "compression" in fields else limited)
            self.config = config
        self.settled = dict(fields)

    def connect(self, workers: int, buckets: int | None = None) -> None:
        """Plan for a number of workers, and of buckets if given. The ranks stay if they were measured and fit."""
        self.buckets = self.buckets if buckets is None else buckets
        if workers == self._workers:
            return
        self._workers = workers
        if self.config.planned and self.tensors and not (self.demands and self._planner(self.tensors).fits(self.ranks)):
            self.begin(self.tensors)

    def _planner(self, tensors: Mapping[str, Sequence[int]]) -> Planner:
        return Planner(tensors, self.config, self._workers, self.buckets)

    def layout(self, layout: Layout) -> Layout:
        """Return a bucket's layout with the ranks in force, and plan for its tensors from now on."""
        if self.config.planned:
            self.tensors |= {s.name: s.shape for s in layout.segments if s.name not in self.tensors}
        return self.ranked(layout)

    def ranked(self, layout: Layout) -> Layout:
        """Return any layout with the ranks in force."""
        if not self.config.planned:
            return layout
        # A matrix that became trainable later has rank 1 until the next plan.
        return layout.with_ranks(lambda segment: self.ranks.get(segment.name, int(self.compresses)))

    def end_step(self, iteration: int, buckets: Sequence[Bucket], communicator: Communicator) -> None:
        """Adopt a plan from the measurement of an earlier step, or measure this step if it is time. Collective."""
        if self._replan():
            # The factors in the buckets still have the ranks of the previous plan.
            return
        steps, every = iteration - self.config.start_iter, self.config.replan_every
        buckets = [bucket for bucket in buckets if bucket.average and bucket.layout.compressed]
        if steps > 0 and every > 0 and steps % every == 0 and buckets:
            self.pending = measured(buckets, communicator)

    def _replan(self) -> bool:
        """Make and adopt a plan from the pending measurement. Return whether there was one."""
        spectra, self.pending = self.pending() if self.pending else {}, None
        # Workers that have a copy plan by the demands of other matrices: copies keep their ranks.
        spectra = {name: spectrum for name, spectrum in spectra.items() if name not in self.copies}
        found = {name: spectrum.demand for name, spectrum in spectra.items() if math.isfinite(spectrum.demand)}
        total = sum(found.values())
        if not (math.isfinite(total) and total > 0):
            return False
        for name, demand in found.items():
            # Averaged, since energies vary from step to step. Shares, since gradients and loss scales change in size.
            self.demands[name] = (self.demands.get(name, demand / total) + demand / total) / 2
        ranks = self._planner(self.tensors).allot(self.ranks, self.demands)
        changed = sum(rank != self.ranks.get(name) for name, rank in ranks.items())
        logger.info("PowerSGD ranks: %s of %s matrices have a new rank", changed, len(ranks))
        self.spectra |= {name: spectra[name] for name in found}
        self._adopt(ranks)
        return True

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
        """Return the ranks, and what they and the next ranks are planned from, as plain numbers. Empty if none are."""
        if not self.given.planned:
            return {}
        saved: dict[str, Any] = {} if self.settled is None else {"settled": dict(self.settled)}
        saved |= {"ranks": dict(self.ranks), "demands": dict(self.demands)}
        for key, spectra in (("spectra", self.spectra), ("pending", self.pending() if self.pending else {})):
            # No plan is made from a measurement of a step that was not finite.
            finite = {name: s for name, s in spectra.items() if math.isfinite(s.total + sum(s.columns))}
            saved[key] = {name: [s.total, *s.columns] for name, s in finite.items()}
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of ``state_dict``. What it lacks, or all if it exceeds the budget, starts anew."""
        if not self.given.planned:
            return
        self.config, self.settled = self.given, None
        self.begin(self.tensors)
        settled = saved.get("settled") or {}
        # What another configuration has settled does not count.
        fits = ("max_rank" in settled) == self.compresses and not (self.copies and "quantize" in settled)
        if settled and self.given.measures and fits:
            try:
                self.settle(settled)
                logger.info("PowerSGD goes on with what was chosen from measured times: %s", settled)
            except ValueError as error:
                logger.info("PowerSGD measures again: %s", error)
        self.demands, self.spectra, self.pending = {}, {}, None
        planner, given = self._planner(self.tensors), saved.get("ranks", {})
        ranks = {name: min(rank, planner.largest[name]) for name, rank in given.items() if name in self.ranks}
        if ranks and planner.fits(self.ranks | ranks):
            self._adopt(self.ranks | ranks)
            self.demands = dict(saved["demands"])
            self.spectra, pending = (
                {name: Spectrum(tuple(columns), total) for name, (total, *columns) in saved[key].items()}
                for key in ("spectra", "pending")
            )
            self.pending = lambda: pending


def is_count(value: Any, least: int = 0) -> bool:
    """Return whether this is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def checked_plan(plan: Any) -> Plan:
    """Check a saved plan of ranks and copy it. A value that is not a plan raises ValueError."""
    parts: dict[str, Callable[[Any], bool]] = {"ranks": functools.partial(is_count, least=1), "demands": _is_demand}
    parts |= {"spectra": _is_spectrum, "pending": _is_spectrum}
    fits = isinstance(plan, Mapping) and all(isinstance(part, Mapping) for part in plan.values())
    if fits and plan:
        settled = plan.get("settled")
        fits = (not settled or _is_choice(settled)) and plan.keys() - {"settled"} == parts.keys()
        fits = fits and all(isinstance(n, str) and fit(v) for key, fit in parts.items() for n, v in plan[key].items())
    if not fits:
        raise ValueError(f"expected a plan of ranks with {', '.join(parts)}; got {str(plan)[:80]}")
    return {key: dict(part) for key, part in plan.items()}


def _is_choice(settled: Mapping[str, Any]) -> bool:
    """Return whether these are fields that a configuration with a budget can have."""
    if settled.keys() not in CHOICES or None in settled.values():
        return settled == {"compression": None}
    try:
        return PowerSGDConfig(**{"compression": None if "quantize" in settled else 1, **settled}).compression != AUTO
    except (TypeError, ValueError):
        return False


def _is_demand(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


def _is_spectrum(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 1 and all(map(_is_demand, value))
