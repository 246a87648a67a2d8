"""A model of the time of a step's communication, and the measurement of a network.

The model is that of Agarwal et al. 2022, "On the Utility of Gradient Compression in Distributed Training Systems"
(section 4), with nodes and with the exchanges of this package. docs/planning.md describes it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch

from powersgd_triton.comm.communicator import Communicator, travel_device, wait
from powersgd_triton.comm.exchange import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, exchange_of, waits
from powersgd_triton.comm.nodes import own_node
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import Layout, factors_sent, wire_format

PROBES, PROBE_ROUNDS = (1 << 12, 1 << 18, 1 << 21), 3
"""Elements of the all-reduces that measure a network, and how often each is measured."""
BACKWARD = 2 / 3
"""Share of the backward pass in the compute of a step."""


@dataclasses.dataclass(frozen=True)
class Network:
    """Nodes of several workers each. A node has one network card, through which all of its workers send and receive.

    Attributes:
        nodes, node_size: Number of nodes, and of workers of each.
        card, inside: Bytes a second and direction of a node's card, and of a worker inside its node.
        latency, inside_latency: Seconds of a message without bytes between nodes, and inside a node.
    """

    nodes: int
    node_size: int = 1
    card: float = 1.25e9
    inside: float = 200e9
    latency: float = 10e-6
    inside_latency: float = 5e-6

    @property
    def workers(self) -> int:
        """Number of all workers."""
        return self.nodes * self.node_size

    @property
    def node(self) -> Network:
        """One node alone."""
        return dataclasses.replace(self, nodes=1)

    @property
    def across(self) -> Network:
        """One worker of each node, while those of the other groups use the cards too."""
        return dataclasses.replace(self, node_size=1, card=self.card / self.node_size)

    def collective(self, kind: str, sent: float) -> float:
        """Return the seconds of a collective of all workers, in which each of them sends so many bytes.

        It takes 2 (k − 1) messages in a row for an all-reduce of k workers, and k − 1 for an all-gather. Both run on a
        ring that enters and leaves each node once. In an all-to-all, which takes k − 1 too, each worker sends a part
        to each other one directly.
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


def factor_seconds(
    buckets: Sequence[Layout],
    config: PowerSGDConfig,
    network: Network,
    *,
    two_levels: bool = False,
    joined: bool = True,
    late: bool = True,
) -> list[float]:
    """Return the seconds in which the factors of each bucket travel.

    Args:
        buckets: Layouts with the ranks in force, in the order in which the backward pass fills them.
        config, network: Configuration of the compression, and where the factors travel.
        two_levels: Whether gradients are summed inside a node first.
        joined: Whether small buckets are joined, as the engine joins those of DDP.
        late: Whether the second message of the bucket before the last one is computed when the last one comes, so that
            it cannot travel during the backward pass. That is so on the CPU. The last element then has its time too.
    """
    together = joined_buckets(buckets, config, network.workers) if joined else buckets
    seconds = [_factor_seconds(layout, config, network, two_levels=two_levels) for layout in together]
    if late and len(seconds) > 1 and config.algorithm == "standard":
        half = seconds[-2] / 2
        seconds[-2:] = [half, seconds[-1] + half]
    return seconds


def joined_buckets(buckets: Sequence[Layout], config: PowerSGDConfig, workers: int) -> list[Layout]:
    """Join small buckets with the next ones, as the engine does."""
    found, waiting = list[Layout](), list[Layout]()
    for number, layout in enumerate(buckets, start=1):
        waiting.append(layout)
        whole = Layout.joined(waiting)
        if number == len(buckets) or not waits(whole, config, workers):
            found.append(whole)
            waiting = []
    return found


def _factor_seconds(layout: Layout, config: PowerSGDConfig, network: Network, *, two_levels: bool) -> float:
    width, across = wire_format(config), network.across if two_levels else network
    node = network.node
    total = node.collective(ALL_TO_ALL, 4 * layout.numel * (1 - 1 / node.workers)) if two_levels else 0.0
    for left, numel in ((True, layout.p_numel), (False, layout.q_numel)):
        bypass = layout.bypass_numel if left or config.algorithm == "alternating" else 0
        kind = exchange_of(numel + bypass, 4, config, across.workers)
        size = 4.0 * (numel + bypass)
        if two_levels:
            # Summed inside the node before, and put together after.
            total += factors_sent(config) * 2 * node.sum(ALL_REDUCE, size)
        if kind != ALL_REDUCE:
            shapes = layout.factor_shapes(left=left)
            size = 4 * bypass + sum(count * width.factor_bytes(rows, rank) for count, rows, rank in shapes)
        total += factors_sent(config) * across.sum(kind, size / (network.node_size if two_levels else 1))
    return total


def step_seconds(
    compute: float, compression: float, messages: Sequence[float], filled: Sequence[float] | None = None
) -> float:
    """Return the seconds of a step. All messages but the last ones travel during the backward pass.

    Args:
        compute: Seconds of the forward and backward pass and the optimizer.
        compression: Seconds that compression computes.
        messages: Seconds of each bucket's messages; see ``factor_seconds``.
        filled: Share of the backward pass after which each bucket is full. Default: 0, and 1 for the last bucket.
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


def measure_network(communicator: Communicator, device: torch.device) -> Network:
    """Measure the network of a group by all-reduces of several sizes. Collective. The host waits for the device.

    All workers return the same: of their times, the longest counts.
    """
    workers = communicator.world_size
    if workers == 1:
        return Network(1)
    if communicator.inside is not None:
        nodes = workers // communicator.inside.world_size
    else:
        # [worker, first worker of its node, workers of the node], with 0 where that is not known.
        places = communicator.gather(own_node(), device)
        nodes = len(places[:, 1].unique()) if bool((places[:, 2] > 0).all()) else workers
        nodes = nodes if workers % nodes == 0 else workers
    travels = travel_device(communicator.group, device)
    seconds = []
    for numel in PROBES:
        probe, rounds = torch.zeros(numel, device=travels), []
        for _ in range(PROBE_ROUNDS):
            communicator.gather(torch.zeros(1), device)
            begin = time.perf_counter()
            wait(communicator.all_reduce(probe))
            if travels.type == "cuda":
                torch.cuda.synchronize(travels)
            rounds.append(time.perf_counter() - begin)
        seconds.append(min(rounds))
    found = communicator.gather(torch.tensor(seconds, dtype=torch.float64), device).amax(dim=0).tolist()
    # Bytes that the ring passes through a card.
    small, middle, large = (2 * 4 * numel * (workers - 1) / workers for numel in PROBES)
    bandwidth = (large - middle) / max(found[2] - found[1], 1e-9)
    latency = max(0.0, found[0] - small / bandwidth) / (2 * (workers - 1))
    if nodes == 1:
        return Network(1, workers, inside=bandwidth, inside_latency=latency)
    return Network(nodes, workers // nodes, card=bandwidth, latency=latency)
