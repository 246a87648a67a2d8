"""The collectives of one step on a cluster of N nodes of L workers: their bytes, and the time that a model gives them.

The time is that of the collectives one after the other, each by ``powersgd_triton.planning.cost``. Nothing overlaps
with the backward pass, and computing takes no time.
"""

import dataclasses
from collections.abc import Iterator

from powersgd_triton.comm.exchange import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from powersgd_triton.demo.measure import Call
from powersgd_triton.planning.cost import Network

KINDS = {"all_reduce": ALL_REDUCE, "all_to_all_single": ALL_TO_ALL}
"""{function of ``torch.distributed``: kind of a collective}. The others are all-gathers."""


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
        """Return the time of all collectives, one after the other, on a network of these nodes."""
        total = 0.0
        for inside, calls in self._together():
            workers = network.node if inside else network if calls[0].workers == network.workers else network.across
            most = max(max(call.sent, call.received) for call in calls)
            total += workers.collective(KINDS.get(calls[0].name, ALL_GATHER), most)
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
        if KINDS.get(first.name) != ALL_TO_ALL:
            return first.sent
        others = first.workers - self.node_size
        return self.node_size * first.sent * others / (first.workers - 1)


def _steps(call: Call) -> int:
    return (2 if KINDS.get(call.name) == ALL_REDUCE else 1) * (call.workers - 1)
