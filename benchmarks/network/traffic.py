"""The collectives of one step on a cluster of N nodes of L workers: their bytes, and a model of their time.

The time is that of the collectives one after the other. Nothing overlaps with the backward pass, and computing takes no
time. A collective of k workers takes

    steps · latency + max(bytes through a card / bandwidth of a card, bytes inside a node / bandwidth inside a node)

with 2 (k − 1) steps for an all-reduce and k − 1 for an all-gather, both on a ring that enters and leaves each node
once. An all-to-all has k − 1 steps too: each worker sends each other one its part, directly. A node has one card,
through which all of its workers send and receive. A collective inside a node has the latency and the bandwidth inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.network.collectives import Call

ALL_REDUCE, ALL_TO_ALL = "all_reduce", "all_to_all_single"


@dataclasses.dataclass(frozen=True)
class Network:
    """What a cluster's network does, in seconds and bytes a second and direction.

    Attributes:
        card, inside: Bandwidth of a node's card, and of a worker inside its node.
        latency, inside_latency: Time of a message without bytes between nodes, and inside a node.
    """

    card: float
    inside: float = 200e9
    latency: float = 10e-6
    inside_latency: float = 5e-6


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one step, for each worker of a node. All nodes do the same.

    Attributes:
        nodes, node_size: N and L.
        calls: For each worker of the node, (whether the workers of one node do it, what this worker sends).
    """

    nodes: int
    node_size: int
    calls: tuple[tuple[tuple[bool, Call], ...], ...]

    def most(self, *, inside: bool = False) -> int:
        """Return the largest, over workers, of the bytes sent and of those received, between nodes or inside them.

        On one level, all bytes count as between nodes.
        """
        own = [[call for within, call in calls if within == inside] for calls in self.calls]
        return max(max(sum(call.sent for call in calls), sum(call.received for call in calls)) for calls in own)

    @property
    def normalized(self) -> float:
        """``most`` divided by 2 (k − 1) / k for the k workers of the groups: the bytes of one all-reduce."""
        workers = max((call.workers for within, call in self.calls[0] if not within), default=1)
        return self.most() / (2 * (workers - 1) / workers) if workers > 1 else 0.0

    @property
    def card(self) -> float:
        """Bytes that a node's card sends, which are as many as it receives."""
        return sum(self._card(calls) for calls in self._together())

    @property
    def collectives(self) -> int:
        """Number of collectives, those inside a node included."""
        return len(self.calls[0])

    def latencies(self, *, inside: bool = False) -> int:
        """Return the number of messages of a worker that follow one another."""
        return sum(_steps(call) for within, call in self.calls[0] if within == inside)

    def seconds(self, network: Network) -> float:
        """Return the time of all collectives, one after the other."""
        total = 0.0
        for within, calls in self._together():
            first = calls[0]
            longest = max(max(call.sent, call.received) for call in calls)
            if within:
                total += _steps(first) * network.inside_latency + longest / network.inside
                continue
            # On one level, a worker also sends to those of its node: on a ring the same bytes, otherwise their parts.
            local = longest
            if first.workers == self.nodes:
                local = 0
            elif first.name == ALL_TO_ALL:
                local = longest * (self.node_size - 1) // (first.workers - 1)
            latency = network.latency if self.nodes > 1 else network.inside_latency
            passing = max(self._card((within, calls)) / network.card, local / network.inside)
            total += _steps(first) * latency + passing
        return total

    def _together(self) -> Iterator[tuple[bool, tuple[Call, ...]]]:
        """Yield the collectives in their order, each as (whether inside a node, calls of the node's workers)."""
        for of_workers in zip(*self.calls, strict=True):
            yield of_workers[0][0], tuple(call for _, call in of_workers)

    def _card(self, collective: tuple[bool, tuple[Call, ...]]) -> float:
        inside, calls = collective
        first = calls[0]
        if inside or self.nodes == 1:
            return 0.0
        if first.workers == self.nodes:
            # Groups of one worker of each node.
            return sum(call.sent for call in calls)
        if first.name != ALL_TO_ALL:
            return first.sent
        others = first.workers - self.node_size
        return self.node_size * first.sent * others / (first.workers - 1)


def _steps(call: Call) -> int:
    return (2 if call.name == ALL_REDUCE else 1) * (call.workers - 1)
