"""The times that steps would take with different compressions, and the choice among them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from powersgd_triton.comm.exchange import ALL_REDUCE
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.facts import Tensors
from powersgd_triton.layout.layout import Layout
from powersgd_triton.planning.cost import Network, factor_seconds, step_seconds
from powersgd_triton.planning.trial import ComputeTime
from powersgd_triton.ranks.planner import sent_bytes, starting_ranks

COMPRESSIONS = (10, 20, 40, 80, 160, 320, 640, 1280)
WIDTHS = ("int4", "float32")
TOLERANCE = 0.02
"""Share of a step's time that a choice may give away for more bytes, which mean less loss."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is known of a training job before anything is compressed.

    Attributes:
        buckets: {name: shape} of each bucket's gradients, in the order in which the backward pass fills them.
        itemsize: Bytes of an element of a gradient.
        compute: Seconds of a step without communication.
        network: The network between the workers.
        two_levels: Whether gradients are summed inside a node first.
        joined: Whether small buckets are joined.
        late: Whether the second message of the bucket before the last one is late, as on the CPU.
    """

    buckets: Sequence[Tensors]
    itemsize: int
    compute: float
    network: Network
    two_levels: bool = False
    joined: bool = True
    late: bool = True

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All gradients, {name: shape}."""
        return {name: tuple(shape) for bucket in self.buckets for name, shape in bucket.items()}

    def exact_messages(self, itemsize: int | None = None) -> list[float]:
        """Return the seconds of an all-reduce of each bucket."""
        size, numels = itemsize or self.itemsize, [sum(map(math.prod, bucket.values())) for bucket in self.buckets]
        return [self.network.sum(ALL_REDUCE, numel * size) for numel in numels]

    def exact(self, itemsize: int | None = None) -> Prediction:
        """Predict a step that averages by all-reduces, of elements of ``itemsize`` bytes (default: the gradients')."""
        size = (itemsize or self.itemsize) * sum(map(math.prod, self.tensors.values()))
        return Prediction(None, {}, float(size), step_seconds(self.compute, 0.0, self.exact_messages(itemsize)))

    def layouts(self, config: PowerSGDConfig) -> list[Layout]:
        """Return the buckets' layouts with the ranks of a configuration. Raises the errors of ``compressed``."""
        layouts = [Layout.build(bucket, config) for bucket in self.buckets]
        if not config.planned:
            return layouts
        buckets = None if self.joined else len(self.buckets)
        planned = starting_ranks(self.tensors, config, self.network.workers, buckets)
        return [layout.with_ranks(lambda segment: planned.get(segment.name, 0)) for layout in layouts]

    def messages(self, layouts: Sequence[Layout], config: PowerSGDConfig) -> list[float]:
        """Return the seconds in which the factors of each bucket travel; see ``factor_seconds``."""
        return factor_seconds(
            layouts, config, self.network, two_levels=self.two_levels, joined=self.joined, late=self.late
        )

    def compressed(self, config: PowerSGDConfig, time: ComputeTime) -> Prediction:
        """Predict a step with a configuration, given the time that it computes. ValueError: its budget is too small."""
        layouts = self.layouts(config)
        ranks = {segment.name: segment.rank for layout in layouts for segment in layout.compressed}
        numel = sum(segment.numel for layout in layouts for segment in layout.compressed)
        columns = sum(s.rank * s.numel for layout in layouts for s in layout.compressed) / max(1, numel)
        own = time(columns) if ranks else 0.0
        seconds = step_seconds(self.compute, own, self.messages(layouts, config))
        return Prediction(config, ranks, sent_bytes(self.tensors, ranks, config), seconds, own / seconds)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step's predicted time.

    Attributes:
        config: Configuration of the compression. None for an all-reduce.
        ranks: {name: rank} of the compressed matrices.
        bytes_per_step: Bytes of a step, counted so that an all-reduce of B bytes counts B.
        seconds: Time of the step.
        overhead: Share of it that compression computes.
    """

    config: PowerSGDConfig | None
    ranks: Mapping[str, int]
    bytes_per_step: float
    seconds: float
    overhead: float = 0.0


def budgets(job: Job, config: PowerSGDConfig, times: Mapping[str, ComputeTime]) -> list[Prediction]:
    """Predict steps with several budgets, for each width in ``times``, {width: time that compression computes}.

    They replace the budget and ``wire_dtype`` of ``config``, and keep to its ``max_overhead``.
    """
    found = list[Prediction]()
    for width, time in times.items():
        of_width: list[Prediction] = []
        for compression in COMPRESSIONS:
            chosen = dataclasses.replace(config, compression=compression, bytes_per_step=None, wire_dtype=width)
            try:
                predicted = job.compressed(chosen, time)
            except ValueError:
                # The budget does not suffice for what is averaged exactly.
                break
            if of_width and of_width[-1].ranks == predicted.ranks:
                # Both are limited by ``max_rank``. The higher compression is nearer to what is sent.
                of_width.pop()
            of_width.append(predicted)
        found += of_width
    return [prediction for prediction in found if prediction.overhead <= (config.max_overhead or 1.0)]


def choose(exact: Prediction, compressed: Iterable[Prediction]) -> Prediction:
    """Return the step with the highest quality among those that take about as long as the fastest.

    An all-reduce has the highest, then the highest sum of ranks: all widths end at about the loss of their rank.
    """
    found = [exact, *compressed]
    fastest = min(prediction.seconds for prediction in found)
    good = [prediction for prediction in found if prediction.seconds <= (1 + TOLERANCE) * fastest]
    return max(good, key=lambda p: (p.config is None, sum(p.ranks.values()), -p.seconds))
