"""Times and bytes of a step in several arms, which take turns on links of limited rate."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.network import programs
from benchmarks.network.namespaces import Counters, network, own_counters

WARMUP_STEPS = 3
# Arms take turns in this many steps, so that a change of the machine's load meets all of them.
TURN = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """One arm's steps.

    Attributes:
        model: Name of the model.
        megabits_per_second: Rate of a node's link in either direction. None if it has no limit.
        arm: Name of the arm.
        sent, received: Bytes of a step that passed the interface of each node, with all headers; means over steps.
        seconds: Quartiles of a step's time, on the worker that took longest: training as one, none goes on before it.
        predicted: A step's time as ``python -m powersgd_triton plan`` predicts it. None if it does not.
    """

    model: str
    megabits_per_second: float | None
    arm: str
    sent: tuple[float, ...]
    received: tuple[float, ...]
    seconds: tuple[float, float, float]
    predicted: float | None = None

    @property
    def most(self) -> float:
        """Bytes of the node and direction that has most."""
        return max(*self.sent, *self.received)


def measure(
    program: str,
    nodes: int,
    workers_per_node: int,
    megabits_per_second: float | None,
    task: Mapping[str, Any],
    timeout: float,
    environment: Mapping[str, str] | None = None,
    segments: int = 1,
) -> list[Row]:
    """Run a program whose ``work(task)`` returns what ``take_turns`` returns, and return its rows.

    Args:
        program: The program's file.
        nodes: Number of nodes.
        workers_per_node: Workers of each node.
        megabits_per_second: Rate of a node's link in either direction. None sets no limit.
        task: Argument of ``work``.
        timeout: Seconds until all must be done.
        environment: Variables to add to this process's.
        segments: Most segments of a packet; see ``network``.

    Raises:
        RuntimeError: No network can be made here, or a worker failed.
        TimeoutError: The workers were not done in time.
    """
    with network(nodes, megabits_per_second, segments) as hosts:
        found = programs.run_workers(program, hosts, workers_per_node, task, timeout, environment)
    rows = []
    for of_workers in zip(*found, strict=True):
        first = of_workers[0]
        # The workers of a node see the same interface.
        sent, received = (tuple(one[count] for one in of_workers[::workers_per_node]) for count in ("sent", "received"))
        slowest = map(max, *(one["seconds"] for one in of_workers))
        lower, median, upper = statistics.quantiles(slowest, n=4)
        seconds, predicted = (lower, median, upper), first.get("predicted")
        rows.append(Row(first["model"], megabits_per_second, first["arm"], sent, received, seconds, predicted))
    return rows


def take_turns(
    model: str,
    arms: Mapping[str, Callable[[], None]],
    turns: int,
    limit: float = math.inf,
    rounds: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Train as one worker. Return bytes of its node and times of its steps, for each arm. Runs inside a node.

    Args:
        model: Name of the model.
        arms: {arm: function that trains one step}, the same on all workers.
        turns: Most turns of an arm.
        limit: Seconds of steps after which an arm takes no further turn. Each takes one.
        rounds: {arm: number of steps} of arms that do not communicate in every step. Such an arm takes turns of whole
            rounds, and the mean over a round counts as the time of a step.
    """
    rounds = rounds or {}
    for step in arms.values():
        # Groups connect and DDP makes its final buckets.
        for _ in range(WARMUP_STEPS):
            step()
    passed, seconds = dict.fromkeys(arms, Counters(0, 0)), {arm: list[float]() for arm in arms}
    for _ in range(turns):
        for arm, step in arms.items():
            if not _is_spent(seconds[arm], limit):
                passed[arm] += _take_turn(step, seconds[arm], rounds.get(arm, 1))
    return [
        {
            "model": model,
            "arm": arm,
            "sent": passed[arm].sent / (len(seconds[arm]) * rounds.get(arm, 1)),
            "received": passed[arm].received / (len(seconds[arm]) * rounds.get(arm, 1)),
            "seconds": seconds[arm],
        }
        for arm in arms
    ]


def _is_spent(seconds: Sequence[float], limit: float) -> bool:
    """Whether the limit is reached by the first worker's clock, so that all workers agree."""
    spent = torch.tensor(sum(seconds) >= limit, dtype=torch.int32)
    dist.broadcast(spent, 0)
    return bool(spent)


def _take_turn(step: Callable[[], None], seconds: list[float], steps: int) -> Counters:
    """Train some rounds, add the times of their steps to ``seconds``, and return what passed this node's interface."""
    dist.barrier()
    before = own_counters()
    # Nobody sends before all have read.
    dist.barrier()
    for _ in range(-(-TURN // steps)):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        seconds.append((time.perf_counter() - begin) / steps)
    dist.barrier()
    return own_counters() - before
