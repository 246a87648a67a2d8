"""The predicted times of steps with different compressions, and the choice among them.

The model is that of Agarwal et al. 2022, "On the Utility of Gradient Compression in Distributed Training Systems"
(section 4), with nodes and with the exchanges of this package. docs/planning.md describes it.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from powersgd_triton.comm.exchange import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, exchange_of, waits
from powersgd_triton.config import PowerSGDConfig, quantized
from powersgd_triton.layout.layout import Layout, RowPartition
from powersgd_triton.layout.matrices import Tensors, factors_sent
from powersgd_triton.layout.wire_format import QUANTIZED
from powersgd_triton.ranks.planner import Planner, mean_rank, sent_bytes

BACKWARD = 2 / 3
"""Share of the backward pass in the compute of a step."""
RANKS = (4, 16, 64)
"""Ranks at which the compute of compression is timed."""
COMPRESSIONS = (10, 20, 40, 80, 160, 320, 640, 1280)
WIDTHS = ("int4", "float32")
FORMATS = ("bf16", "int8", "int4")
"""Formats of quantized gradients, from the least loss on."""
GPUS = {"h100": (166e-6, 188e-6, 711e-6), "a100": (209e-6, 238e-6, 970e-6), "rtx4090": (335e-6, 407e-6, 1490e-6)}
"""Seconds of a bucket of ``GPU_NUMEL`` elements at ``RANKS``. The H100's are measured (``benchmarks/results/h100.md``).
The others are what ``benchmarks/kernel_report.py --bucket`` predicts, times the ratio of both on an H100."""
QUANTIZING = {"h100": 60e-6, "a100": 85e-6, "rtx4090": 142e-6}
"""The same for int8, of one of two workers: the share of a step of GPT-2 in one bucket."""
GPU_NUMEL = 7_077_888
TOLERANCE = 0.02
"""Share of a step's time that a choice may give away for more bytes, which mean less loss."""


@dataclasses.dataclass(frozen=True)
class Network:
    """Nodes of several workers each. A node has one network card, through which all of its workers send and receive.

    ``card`` and ``inside`` are bytes a second and direction, of a node's card and of a worker inside its node.
    Latencies are the seconds of a message without bytes.
    """

    nodes: int
    node_size: int = 1
    card: float = 1.25e9
    inside: float = 200e9
    latency: float = 10e-6
    inside_latency: float = 5e-6

    @property
    def workers(self) -> int:
        return self.nodes * self.node_size

    @property
    def node(self) -> "Network":
        return dataclasses.replace(self, nodes=1)

    @property
    def across(self) -> "Network":
        """One worker of each node, while those of the other groups use the cards too."""
        return dataclasses.replace(self, node_size=1, card=self.card / self.node_size)

    def collective(self, kind: str, sent: float) -> float:
        """Return the seconds of a collective of all workers, in which each of them sends so many bytes.

        An all-reduce of k workers takes 2 (k − 1) messages in a row, the others k − 1. An all-reduce and an all-gather
        run on a ring that enters and leaves each node once. In an all-to-all, workers send their parts directly.
        """
        others = self.workers - 1
        if others == 0:
            return 0.0
        between, local = (sent if self.nodes > 1 else 0.0), sent
        if kind == ALL_TO_ALL:
            local = sent * (self.node_size - 1) / others
            between = self.node_size * (sent - local)
        latency = self.latency if self.nodes > 1 else self.inside_latency
        passing = max(between / self.card, local / self.inside if self.node_size > 1 else 0.0)
        return (2 if kind == ALL_REDUCE else 1) * others * latency + passing

    def sum(self, kind: str, size: float) -> float:
        """Return the seconds in which all workers sum a message of ``size`` bytes; see ``exchange.exchange_of``."""
        ring = size * (self.workers - 1) / self.workers
        if kind == ALL_REDUCE:
            return self.collective(kind, 2 * ring)
        if kind == ALL_GATHER:
            return self.collective(kind, size * (self.workers - 1))
        return self.collective(ALL_TO_ALL, ring) + self.collective(ALL_GATHER, ring)


@dataclasses.dataclass(frozen=True)
class ComputeTime:
    """Seconds that compression computes in a step with a common rank, as measured at ``RANKS``."""

    seconds: tuple[float, ...]

    def __call__(self, rank: float) -> float:
        """Return the seconds at a rank: a line between two that were measured, which beyond them goes on."""
        # A measurement that is disturbed must not make a higher rank cheaper.
        rising = list(itertools.accumulate(self.seconds, max))
        low = 0 if rank <= RANKS[1] else 1
        slope = (rising[low + 1] - rising[low]) / (RANKS[low + 1] - RANKS[low])
        return max(0.0, rising[low] + slope * (rank - RANKS[low]))


def predicted_compute(gpu: str, tensors: Tensors, config: PowerSGDConfig) -> ComputeTime:
    """Return the compute that is expected of a GPU, one of ``GPUS``."""
    numel = sum(math.prod(shape) for shape in tensors.values() if len(shape) > 1)
    bucket = GPUS[gpu] if config.quantize is None else (QUANTIZING[gpu],) * len(RANKS)
    return ComputeTime(tuple(seconds * numel / GPU_NUMEL for seconds in bucket))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step's predicted time, of which compression computes the share ``overhead``.

    ``config`` is None for an all-reduce. Bytes are counted so that an all-reduce of B bytes counts B.
    """

    config: PowerSGDConfig | None
    ranks: Mapping[str, int]
    bytes_per_step: float
    seconds: float
    overhead: float = 0.0


@dataclasses.dataclass(frozen=True)
class Job:
    """What is known of a training job before anything is compressed.

    Attributes:
        buckets: {name: shape} of each bucket's gradients, in the order in which the backward pass fills them.
        compute: Seconds of a step without communication.
        two_levels: Whether gradients are summed inside a node first.
        joined: Whether small buckets are joined, as the engine joins those of DDP.
        late: Whether the second message of the bucket before the last one is computed when the last one comes, too late
            to travel during the backward pass, as on the CPU.
    """

    buckets: Sequence[Tensors]
    compute: float
    network: Network
    two_levels: bool = False
    joined: bool = True
    late: bool = True

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All gradients, {name: shape}."""
        return {name: tuple(shape) for bucket in self.buckets for name, shape in bucket.items()}

    def exact_messages(self, itemsize: int) -> list[float]:
        """Return the seconds of an all-reduce of each bucket, of elements of ``itemsize`` bytes."""
        numels = [sum(map(math.prod, bucket.values())) for bucket in self.buckets]
        return [self.network.sum(ALL_REDUCE, itemsize * numel) for numel in numels]

    def exact(self, itemsize: int = 4) -> Prediction:
        """Predict a step that averages by all-reduces, of elements of ``itemsize`` bytes."""
        size = itemsize * sum(map(math.prod, self.tensors.values()))
        return Prediction(None, {}, float(size), step_seconds(self.compute, 0.0, self.exact_messages(itemsize)))

    def layouts(self, config: PowerSGDConfig) -> list[Layout]:
        """Return the buckets' layouts with the ranks of a configuration. ValueError: its budget is too small."""
        layouts = [Layout.build(bucket, config) for bucket in self.buckets]
        if not config.planned:
            return layouts
        buckets = None if self.joined else len(self.buckets)
        planned = Planner(self.tensors, config, self.network.workers, buckets).starting_ranks()
        return [layout.with_ranks(lambda segment: planned.get(segment.name, 0)) for layout in layouts]

    def joined_buckets(self, layouts: Sequence[Layout], config: PowerSGDConfig) -> list[Layout]:
        """Join small buckets with the next ones, as the engine does."""
        found, waiting = list[Layout](), list[Layout]()
        for layout in layouts:
            waiting.append(layout)
            whole = Layout.joined(waiting)
            if layout is layouts[-1] or not waits(whole, config, self.network.workers):
                found.append(whole)
                waiting = []
        return found

    def messages(self, layouts: Sequence[Layout], config: PowerSGDConfig) -> list[float]:
        """Return the seconds in which the messages of each bucket travel. Those that are ``late`` count at the end."""
        together = self.joined_buckets(layouts, config) if self.joined else layouts
        seconds = [self._bucket_messages(layout, config) for layout in together]
        alone = config.algorithm == "alternating" and config.bypass is None
        single = self.network.workers == 2 if config.quantize else alone
        if self.late and len(seconds) > 1 and not single:
            seconds[-2:] = [seconds[-2] / 2, seconds[-1] + seconds[-2] / 2]
        return seconds

    def _bucket_messages(self, layout: Layout, config: PowerSGDConfig) -> float:
        if config.quantize is not None:
            return self._whole_tensors(layout, config.quantize)
        (across, node), times = self._levels, factors_sent(config)
        # What lies between matrices travels with them, so that the workers of a node have unequal parts.
        parts = [end - start for start, end in itertools.pairwise(RowPartition.build(layout, node.workers).cuts)]
        total = node.collective(ALL_TO_ALL, 4 * max(sum(parts) - min(parts), max(parts) * (node.workers - 1)))
        total += self._whole_tensors(layout.rounded, config.bypass) if config.bypass and layout.rounded.numel else 0.0
        for left, numel in ((True, layout.p_numel), (False, layout.q_numel)):
            # A step's first message has the bypass tensors too.
            first = 0.5 if config.algorithm == "alternating" else float(left)
            for bypass, count in ((layout.bypass_numel, first), (0, times - first)):
                size = 4.0 * (numel + bypass)
                kind = exchange_of(size, config, across.workers)
                sent = size if kind == ALL_REDUCE else 4 * bypass + layout.factor_bytes(config, left=left)
                # Summed inside the node before, and put together after.
                seconds = 2 * node.sum(ALL_REDUCE, size) + across.sum(kind, sent / node.workers)
                total += count * seconds if size else 0.0
        return total

    def _whole_tensors(self, layout: Layout, name: str) -> float:
        """Return the seconds in which all tensors of a layout travel in a format."""
        across, node = self._levels
        size, ring = QUANTIZED[name].difference_bytes(layout.numel)[1], 4 * layout.numel * (1 - 1 / node.workers)
        # Inside the node, gradients and averages travel in fp32.
        inside = node.collective(ALL_TO_ALL, ring) + node.collective(ALL_GATHER, ring)
        return inside + across.sum(ALL_GATHER if across.workers == 2 else ALL_TO_ALL, size / node.workers)

    @property
    def _levels(self) -> tuple[Network, Network]:
        """The networks over the nodes and inside one. On one level, that of all workers, and one worker."""
        return (self.network.across, self.network.node) if self.two_levels else (self.network, Network(1))

    def compressed(self, config: PowerSGDConfig, time: ComputeTime) -> Prediction:
        """Predict a step with a configuration and the time that it computes. ValueError: its budget is too small."""
        layouts = self.layouts(config)
        ranks = {segment.name: segment.rank for layout in layouts for segment in layout.compressed}
        own = time(mean_rank(self.tensors, ranks)) if ranks or config.quantize else 0.0
        seconds = step_seconds(self.compute, own, self.messages(layouts, config))
        return Prediction(config, ranks, sent_bytes(self.tensors, ranks, config), seconds, own / seconds)


def step_seconds(
    compute: float, compression: float, messages: Sequence[float], filled: Sequence[float] | None = None
) -> float:
    """Return the seconds of a step. All messages but the last ones travel during the backward pass.

    ``compute`` is the time of forward pass, backward pass and optimizer. ``filled`` are the shares of the backward pass
    after which buckets are full (default: 0, and 1 for the last bucket).
    """
    backward, end = BACKWARD * compute, 0.0
    for share, seconds in zip(filled or [*[0.0] * (len(messages) - 1), 1.0], messages, strict=False):
        end = max(end, share * backward) + seconds
    return compute + compression + max(0.0, end - backward)


def compute_of(seconds: float, messages: Sequence[float]) -> float:
    """Return the compute of an exact step that took ``seconds`` with these messages; inverts ``step_seconds``."""
    *early, last = messages or [0.0]
    rest = seconds - last
    return max(0.0, min(rest, (rest - sum(early)) / (1 - BACKWARD)))


def kinds(config: PowerSGDConfig, formats: Sequence[str] = FORMATS) -> list[PowerSGDConfig]:
    """Return a configuration for each of these formats, and for each width of factors: each has its own compute."""
    widths = WIDTHS if config.wire_dtype is None else (config.wire_dtype,)
    factors = [dataclasses.replace(config, wire_dtype=width) for width in widths]
    return [*(quantized(config, quantize=name) for name in formats), *factors]


def variants(kind: PowerSGDConfig) -> list[PowerSGDConfig]:
    """Return the configurations of a kind: with other budgets, or if gradients are quantized, itself."""
    if kind.quantize is not None:
        return [kind]
    return [dataclasses.replace(kind, compression=each, bytes_per_step=None) for each in COMPRESSIONS]


def options(job: Job, times: Mapping[PowerSGDConfig, ComputeTime], max_overhead: float | None) -> list[Prediction]:
    """Predict steps with all variants of these kinds. ``max_overhead`` is the largest share that they may compute."""
    found: dict[tuple[PowerSGDConfig, frozenset[tuple[str, int]]], Prediction] = {}
    for kind, time in times.items():
        for config in variants(kind):
            try:
                predicted = job.compressed(config, time)
            except ValueError:
                # The budget does not suffice for what is averaged exactly.
                continue
            # Where ``max_rank`` limits several budgets, the highest compression is nearest to what is sent.
            found[kind, frozenset(predicted.ranks.items())] = predicted
    return [prediction for prediction in found.values() if prediction.overhead <= (max_overhead or 1.0)]


def choose(exact: Prediction, compressed: Iterable[Prediction]) -> Prediction:
    """Return the step with the highest quality among those that take about as long as the fastest.

    An all-reduce has the highest, then ``FORMATS`` in their order, then the highest sum of ranks: all widths end at
    about the loss of their rank.
    """
    found = [exact, *compressed]
    fastest = min(prediction.seconds for prediction in found)
    good = [prediction for prediction in found if prediction.seconds <= (1 + TOLERANCE) * fastest]
    return max(good, key=_quality)


def _quality(prediction: Prediction) -> tuple[float, ...]:
    config = prediction.config
    exactness = math.inf if config is None else -FORMATS.index(config.quantize) if config.quantize else -math.inf
    return exactness, sum(prediction.ranks.values()), -prediction.seconds
