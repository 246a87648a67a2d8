"""The ranks in force under a byte budget: measured in one step, planned on the host, and used a step later."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ranks.planner import Spectrum, allot, budget, largest_ranks, sent_bytes, starting_ranks

logger = logging.getLogger("powersgd_triton")


class Measurement:
    """Energies of some buckets' matrices on their way to the host.

    Args:
        buckets: that have been in a step, of one device.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._ranks: list[tuple[str, int]] = []
        totals: list[Tensor] = []
        columns: list[Tensor] = []
        for bucket in buckets:
            for group, M in zip(bucket.layout.groups, bucket.M or [], strict=True):
                self._ranks += [(segment.name, group.rank) for segment in group.segments]
                totals += [torch.linalg.vector_norm(error, dtype=torch.float64).square() for error in M]
            columns += [energy.flatten() for energy in _column_energies(bucket)]
        self.totals = torch.stack(totals)
        """‖M_w‖² of each matrix, this worker's; to be averaged over workers before ``send``."""
        self._columns = torch.cat(columns)
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def send(self) -> None:
        """Start copying to the host. Nothing waits."""
        found = torch.cat([self.totals, self._columns])
        if not found.is_cuda:
            self._host = found
            return
        self._host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        self._host.copy_(found, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def spectra(self) -> dict[str, Spectrum]:
        """What was measured. Waits until the copy is done."""
        assert self._host is not None
        if self._event is not None:
            self._event.synchronize()
        numbers = self._host.tolist()
        totals, columns = numbers[: len(self._ranks)], iter(numbers[len(self._ranks) :])
        return {
            name: Spectrum(tuple(next(columns) for _ in range(rank)), total)
            for (name, rank), total in zip(self._ranks, totals, strict=True)
        }


def _column_energies(bucket: Bucket) -> list[Tensor]:
    """fp64 [B, r] for each group: ‖l_k‖² ‖r_k‖² of the average's columns. One of each pair is orthonormal."""
    found = [
        torch.zeros(len(g.segments), g.rank, device=bucket.P_hat.device, dtype=torch.float64)
        for g in bucket.layout.groups
    ]
    for P, Q in bucket.average:
        for energy, left, right in zip(found, bucket.left(P), bucket.right(Q), strict=True):
            energy += left.double().square().sum(dim=1) * right.double().square().sum(dim=1)
    return found


class RankPlan:
    """Which rank each matrix of a model has where the configuration gives a budget; else it changes nothing.

    Attributes:
        ranks: {name: rank}.
        spectra: what was measured last, {name: Spectrum}; empty before.
        demands: what they were planned from, {name: its share in all ``Spectrum.demand``, averaged over plans}.
        pending: what the next plan is to be made from.
    """

    def __init__(self, config: PowerSGDConfig) -> None:
        self._config = config
        self._tensors: dict[str, tuple[int, ...]] = {}
        self.ranks: dict[str, int] = {}
        self.spectra: dict[str, Spectrum] = {}
        self.demands: dict[str, float] = {}
        self.pending: Measurement | dict[str, Spectrum] | None = None
        # Layouts as adapters know them, with those of the plan in force.
        self._layouts: dict[Layout, Layout] = {}

    def begin(self, tensors: Mapping[str, Sequence[int]]) -> None:
        """Plan for a model's tensors, {name: shape}, of which nothing is known yet.

        Raises:
            ValueError: the budget is too small for them.
        """
        if self._config.planned:
            ranks = starting_ranks(tensors, self._config)
            self._tensors = {name: tuple(shape) for name, shape in tensors.items()}
            self._adopt(ranks)

    def layout(self, layout: Layout) -> Layout:
        """A layout with the ranks in force; the same object as long as they are."""
        if not self._config.planned:
            return layout
        if layout not in self._layouts:
            self._tensors |= {s.name: s.shape for s in layout.segments if s.name not in self._tensors}
            self._layouts[layout] = self.ranked(layout)
        return self._layouts[layout]

    def ranked(self, layout: Layout) -> Layout:
        """The same, of a layout that is not a bucket's."""
        if not self._config.planned:
            return layout
        # What became trainable later has one column until there is a new plan.
        return layout.with_ranks(lambda segment: self.ranks.get(segment.name, 1))

    def end_step(self, iteration: int, buckets: Sequence[Bucket], communicator: Communicator) -> None:
        """After a step: use what was measured a step ago, or measure where it is time to. Collective.

        One number a matrix is averaged over the workers. Nothing waits for the step that has just ended.
        """
        if self._replan():
            # The factors in the buckets still have the ranks of the plan before.
            return
        steps, every = iteration - self._config.start_iter, self._config.replan_every
        buckets = [bucket for bucket in buckets if bucket.average and bucket.layout.compressed]
        if self._config.planned and steps > 0 and every > 0 and steps % every == 0 and buckets:
            measurement = Measurement(buckets)
            communicator.mean(measurement.totals)
            measurement.send()
            self.pending = measurement

    def _replan(self) -> bool:
        """Put the plan in force for which something was measured; whether there was one."""
        spectra = self._measured()
        self.pending = None
        found = {name: spectrum.demand for name, spectrum in spectra.items() if math.isfinite(spectrum.demand)}
        total = sum(found.values())
        if not (math.isfinite(total) and total > 0):
            return False
        for name, demand in found.items():
            # One step's energies scatter. Shares, since gradients and loss scales become smaller and larger.
            self.demands[name] = (self.demands.get(name, demand / total) + demand / total) / 2
        ranks = allot(self._tensors, self.ranks, self.demands, self._config)
        changed = sum(rank != self.ranks.get(name) for name, rank in ranks.items())
        logger.info("PowerSGD ranks: %s of %s matrices have new ones", changed, len(ranks))
        self.spectra |= {name: spectra[name] for name in found}
        self._adopt(ranks)
        return True

    def _measured(self) -> dict[str, Spectrum]:
        """What is pending; waits until it is on the host."""
        return self.pending.spectra() if isinstance(self.pending, Measurement) else self.pending or {}

    def kept_columns(self, name: str, before: int, after: int) -> list[int]:
        """Which of a matrix's columns stay when its rank falls: those of the highest energy, in their order."""
        columns = self.spectra[name].columns if name in self.spectra else ()
        if len(columns) != before:
            return list(range(after))
        return sorted(sorted(range(before), key=lambda k: -columns[k])[:after])

    @property
    def planned_from(self) -> dict[str, Any]:
        """What the next ranks depend on, as far as it is on the host."""
        return {"demands": self.demands, "something was measured": self.pending is not None}

    def _adopt(self, ranks: dict[str, int]) -> None:
        if ranks != self.ranks:
            self.ranks, self._layouts = ranks, {}

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Ranks, and what they and the next ones are planned from: plain numbers."""
        return {
            "ranks": dict(self.ranks),
            "demands": dict(self.demands),
            **{
                key: {name: [spectrum.total, *spectrum.columns] for name, spectrum in spectra.items()}
                for key, spectra in (("spectra", self.spectra), ("pending", self._measured()))
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave, or begin anew.

        Matrices that it does not have begin with their first rank, and so do all where the saved ranks do not keep to
        this model's budget.
        """
        if not self._config.planned:
            return
        self.begin(self._tensors)
        self.demands, self.spectra, self.pending = {}, {}, None
        largest = largest_ranks(self._tensors, self._config)
        ranks = {name: min(rank, largest[name]) for name, rank in saved.get("ranks", {}).items() if name in self.ranks}
        if ranks and sent_bytes(self._tensors, self.ranks | ranks, self._config) <= budget(self._tensors, self._config):
            self._adopt(self.ranks | ranks)
            self.demands = dict(saved["demands"])
            self.spectra, self.pending = (
                {name: Spectrum(tuple(columns), total) for name, (total, *columns) in saved[key].items()}
                for key in ("spectra", "pending")
            )
