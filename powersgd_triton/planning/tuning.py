"""Choices that follow from times measured in the first steps: ``compression="auto"`` and ``max_overhead``."""

import dataclasses
import itertools
import statistics
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from powersgd_triton.comm.agreement import together
from powersgd_triton.config import AUTO, PowerSGDConfig, logger
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.scheme import Listener
from powersgd_triton.layout.matrices import Tensors
from powersgd_triton.planning import cost
from powersgd_triton.planning.cost import ComputeTime, Job, Network
from powersgd_triton.planning.trial import measure_network, synchronize, time_compute
from powersgd_triton.ranks.planner import mean_rank

WARM_UP, MEASURED = 3, 10
"""Steps that are not measured, since groups connect and DDP makes its buckets, and steps that are measured then."""


class Tuning(Listener):
    """Measures the first steps, and then settles the plan's configuration. All workers settle the same.

    For ``compression="auto"`` the measured steps are exact. Otherwise they are compressed. Steps are measured again
    when the workers have changed or a state was loaded.
    """

    def __init__(self, engine: Engine) -> None:
        # Not a cycle, so that errors on a device are freed with the engine.
        self._engine: Engine = weakref.proxy(engine)
        self._plan, self._loaded = engine.plan, engine.residuals.loaded
        self._ends: list[float] = []

    def obstacle(self) -> str | None:
        return "the host measures the first steps" if self._plan.measures else None

    def end_step(self) -> None:
        """Note that a step has ended. Settle everything after the last measured one, which is collective."""
        step, plan, config, device = self._engine.step, self._plan, self._plan.config, self._engine.buckets.device
        if step.ended == 1 or self._engine.residuals.loaded is not self._loaded:
            # The workers have changed, or a state was loaded.
            self._ends, self._loaded = [], self._engine.residuals.loaded
        if not plan.measures or device is None or (step.iteration <= config.start_iter and plan.compresses):
            return
        synchronize(device)
        self._ends.append(time.perf_counter())
        if len(self._ends) <= WARM_UP + MEASURED:
            return
        ends, self._ends = self._ends[WARM_UP:], []
        seconds = statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))
        settle = self._compression if config.compression == AUTO else self._max_rank
        plan.settle(settle(seconds, [layout.shapes for layout in self._engine.begun], device))
        # Which matrices are compressed may depend on what was chosen.
        self._engine.buckets.invalidate()

    def _compression(self, step: float, buckets: list[Tensors], device: torch.device) -> dict[str, Any]:
        """Choose a format for gradients, or a budget and a width, or no compression."""
        config, communicator, tensors = self._plan.config, self._engine.communicator, self._plan.tensors
        network = measure_network(communicator, device)
        # Ranks are planned for all tensors, also for those without a gradient.
        unseen = {name: shape for name, shape in tensors.items() if not any(name in bucket for bucket in buckets)}
        buckets = [bucket for bucket in (unseen, *buckets) if bucket]
        joined = not self._plan.buckets
        kinds = cost.kinds(config, () if self._plan.copies else cost.FORMATS)
        own = [self._own(kind, buckets, device).seconds for kind in kinds]
        # The slowest worker and the slowest network count.
        worst: Sequence[float] = (1 / network.card, 1 / network.inside, network.latency, network.inside_latency)
        (step,), worst, *seconds = self._agreed([[step], worst, *own], device)
        network = Network(network.nodes, network.node_size, 1 / worst[0], 1 / worst[1], *worst[2:])
        options = communicator.inside is not None, joined, device.type == "cpu"
        job, itemsize = Job(buckets, step, network, *options), self._engine.itemsize
        job = dataclasses.replace(job, compute=cost.compute_of(step, job.exact_messages(itemsize)))
        exact = dataclasses.replace(job.exact(itemsize), seconds=step)
        found = cost.options(job, dict(zip(kinds, map(ComputeTime, seconds), strict=True)), config.max_overhead)
        best = cost.choose(exact, found)
        # Workers with other shards may have chosen something else. The first of all choices is an all-reduce.
        choices = [None, *itertools.chain.from_iterable(map(cost.variants, kinds))]
        owes = float(self._engine.residuals.has_errors())
        ((agreed, owes),) = self._agreed([[-choices.index(best.config), owes]], device)
        chosen = choices[-round(agreed)]
        logger.info(
            "PowerSGD measured steps of %.4g s, of which %.4g s are compute, on a network of %.4g Gbit/s and %.3g ms",
            *(step, job.compute, network.card * 8e-9, network.latency * 1e3),
        )
        if chosen is None:
            fastest = min((prediction.seconds for prediction in found), default=step)
            logger.info("PowerSGD does not compress: the fastest compression would take %.4g s a step", fastest)
            return {"compression": None}
        names = ("compression", "wire_dtype") if chosen.quantize is None else ("quantize",)
        fields = {name: getattr(chosen, name) for name in names}
        logger.info(
            "PowerSGD compresses with %s: predicted %.4g s a step, %.0f%% of it compute of its own",
            *(", ".join(f"{key}={value}" for key, value in fields.items()), best.seconds, 100 * best.overhead),
        )
        if chosen.quantize and owes:
            # Errors of a loaded state are added to gradients only with error feedback.
            fields["error_feedback"] = True
        return fields

    def _max_rank(self, step: float, buckets: list[Tensors], device: torch.device) -> dict[str, Any]:
        """Choose the largest rank whose compute is at most ``max_overhead`` of a step."""
        config = self._plan.config
        assert config.max_overhead is not None
        assert config.max_rank is not None
        own = self._own(config, buckets, device)
        rest = step - own(mean_rank(self._plan.tensors, self._plan.ranks))
        (rest,), seconds = self._agreed([[rest], own.seconds], device)
        own = ComputeTime(seconds)
        # Compression takes a share x of a step if it takes x / (1 - x) of the rest.
        allowed = max(0.0, rest) * config.max_overhead / (1 - config.max_overhead)
        limit = max((rank for rank in range(2, config.max_rank + 1) if own(rank) <= allowed), default=1)
        logger.info(
            "PowerSGD limits ranks to %s columns: they take %.1f%% of a step, of which %.4g s are not compression",
            *(limit, 100 * own(limit) / (own(limit) + max(rest, 1e-9)), rest),
        )
        return {"max_rank": limit}

    def _own(self, config: PowerSGDConfig, buckets: list[Tensors], device: torch.device) -> ComputeTime:
        """Time what compression computes. Collective, since it may fail on one worker only."""
        call, communicator = "a trial of the compression", self._engine.communicator
        return together(call, lambda: (time_compute(config, buckets, device), {}, {}), communicator, device)

    def _agreed(self, numbers: list[Any], device: torch.device) -> list[tuple[float, ...]]:
        """Return the largest of all workers' numbers, element by element. Collective."""
        communicator = self._engine.communicator
        flat = torch.tensor([*itertools.chain(*numbers)], dtype=torch.float64, device="cpu")
        for group in (communicator, *communicator.others):
            flat = group.gather(flat, device).amax(dim=0)
        return [tuple(row.tolist()) for row in flat.split([len(row) for row in numbers])]


def refuse_auto(config: PowerSGDConfig, where: str) -> None:
    """Refuse ``compression="auto"``, for a wrapper whose exact steps are not all-reduces: ValueError."""
    if config.compression == AUTO:
        raise ValueError(
            f"compression='auto' compares a step with one that all-reduces gradients, and {where} does not: choose a "
            "number, for example with python -m powersgd_triton plan"
        )
