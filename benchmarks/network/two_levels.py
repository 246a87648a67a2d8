"""Bytes and times of DDP's steps on two nodes of two workers: exact averaging, flat factors, factors in two levels.

python benchmarks/network/two_levels.py [--steps 24]

The nodes are network namespaces, whose links have 100 Mbit/s and then 1 Gbit/s. Bytes are those of the nodes'
interfaces. Needs root and iproute2. Prints Markdown tables and writes benchmarks/results/two-levels.json.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network import programs
from benchmarks.network.namespaces import Counters, network, own_counters
from powersgd_triton.demo import model as text_model
from powersgd_triton.demo.text import Corpus, read_corpus, sample_batch
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook

NODES, WORKERS_PER_NODE = 2, 2
RATES = (100.0, 1000.0)
MODELS = {"demo, 0.8 M": text_model.WIDTH, "wider, 9.8 M": 448}
"""{name: width}. All have the demo's depth."""
STEPS, WARMUP_STEPS = 24, 3
# Arms take turns in this many steps, so that a change of the machine's load meets all of them.
TURN = 4
# The bytes of a step do not depend on the batch.
BATCH = 2
RANK = 4


def _average_in_bf16(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    # DDP refuses the hook itself by its name, unless there is NCCL. Gloo can do what it does.
    return bf16_compress_hook(group, bucket)


EXACT: dict[str, Callable[..., Any] | None] = {"exact, fp32": None, "exact, bf16": _average_in_bf16}
"""{arm: DDP's hook}."""
FLAT, FLAT_INT4, TWO_LEVELS, TWO_LEVELS_INT4 = "flat, fp32", "flat, int4", "two levels, fp32", "two levels, int4"
FACTORS: dict[str, dict[str, Any]] = {
    FLAT: {},
    FLAT_INT4: {"wire_dtype": "int4"},
    TWO_LEVELS: {"node_group": "auto"},
    TWO_LEVELS_INT4: {"node_group": "auto", "wire_dtype": "int4"},
}
"""{arm: options of ``PowerSGDState``}."""
ARMS = (*EXACT, *FACTORS)


@dataclasses.dataclass(frozen=True)
class Row:
    """One arm's steps.

    Attributes:
        model: Key of ``MODELS``.
        megabits_per_second: Rate of a node's link in either direction. None if it has no limit.
        arm: One of ``ARMS``.
        sent, received: Bytes of a step that passed the interface of each node, with all headers; means over steps.
        seconds: Quartiles of a step's time.
    """

    model: str
    megabits_per_second: float | None
    arm: str
    sent: tuple[float, ...]
    received: tuple[float, ...]
    seconds: tuple[float, float, float]

    @property
    def most(self) -> float:
        """Bytes of the node and direction that has most."""
        return max(*self.sent, *self.received)


def measure(
    arms: Sequence[str],
    models: Sequence[str],
    rates: Sequence[float | None],
    steps: int,
    timeout: float = 1800,
) -> list[Row]:
    """Train all arms of all models at each rate.

    Args:
        arms: Some of ``ARMS``.
        models: Keys of ``MODELS``.
        rates: Mbit/s of a node's link in either direction. None sets no limit.
        steps: Number of steps to count, which is rounded up to turns of ``TURN`` steps.
        timeout: Seconds for one rate.

    Raises:
        RuntimeError: No network can be made here, or a worker failed.
        TimeoutError: The workers were not done in time.
    """
    task = {"arms": list(arms), "models": list(models), "turns": -(-steps // TURN)}
    rows = []
    for rate in rates:
        with network(NODES, rate) as nodes:
            found = programs.run_workers(__file__, nodes, WORKERS_PER_NODE, task, timeout)
        # The workers of a node see the same interface.
        for of_nodes in zip(*found[::WORKERS_PER_NODE], strict=True):
            first = of_nodes[0]
            sent, received = (tuple(node[count] for node in of_nodes) for count in ("sent", "received"))
            seconds = tuple(statistics.quantiles(first["seconds"], n=4))
            rows.append(Row(first["model"], rate, first["arm"], sent, received, seconds))
    return rows


def work(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train all arms as one worker. Return bytes of its node and times of its steps. Runs inside a node."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    corpus = read_corpus()
    figures = []
    for name in task["models"]:
        arms = {arm: _training(arm, MODELS[name], corpus) for arm in task["arms"]}
        for step in arms.values():
            # Groups connect and DDP makes its final buckets.
            for _ in range(WARMUP_STEPS):
                step()
        passed, seconds = dict.fromkeys(arms, Counters(0, 0)), {arm: list[float]() for arm in arms}
        for _ in range(task["turns"]):
            for arm, step in arms.items():
                passed[arm] += _take_turn(step, seconds[arm])
        steps = task["turns"] * TURN
        figures += [
            {
                "model": name,
                "arm": arm,
                "sent": passed[arm].sent / steps,
                "received": passed[arm].received / steps,
                "seconds": seconds[arm],
            }
            for arm in arms
        ]
    dist.destroy_process_group()
    return figures


def _training(arm: str, width: int, corpus: Corpus) -> Callable[[], None]:
    """Return a function that trains one step. All arms begin with the same model and see the same data."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(text_model.GPT(width))
    if arm in FACTORS:
        state = PowerSGDState(None, RANK, start_powerSGD_iter=0, module=ddp.module, **FACTORS[arm])
        ddp.register_comm_hook(state, powerSGD_hook)
    elif (hook := EXACT[arm]) is not None:
        ddp.register_comm_hook(dist.group.WORLD, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def step() -> None:
        inputs, targets = sample_batch(corpus.training, BATCH, text_model.CONTEXT, generator)
        optimizer.zero_grad()
        text_model.next_token_loss(ddp, inputs, targets).backward()
        optimizer.step()

    return step


def _take_turn(step: Callable[[], None], seconds: list[float]) -> Counters:
    """Train some steps, add their times to ``seconds``, and return what passed this node's interface."""
    dist.barrier()
    before = own_counters()
    # Nobody sends before all have read.
    dist.barrier()
    for _ in range(TURN):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    dist.barrier()
    return own_counters() - before


def ratio(rows: Sequence[Row], arm: str, base: str) -> float:
    """Return the bytes of an arm divided by those of another, each of the node and direction that has most.

    Args:
        rows: Rows of one model at one rate.
        arm: One of ``ARMS``.
        base: Another one.
    """
    most = {row.arm: row.most for row in rows}
    return most[arm] / most[base]


def table(rows: Sequence[Row]) -> str:
    """Markdown: for each model and arm, kB that a node sends in a step at the first rate, and a step's time at each."""
    rates = list(dict.fromkeys(row.megabits_per_second for row in rows))
    times = [f"ms at {rate:g} Mbit/s" for rate in rates]
    lines = [["model", "arm", "node 0 sends", "node 1 sends", f"of {FLAT}", f"of {FLAT_INT4}", *times]]
    lines.append(["---", "---", *["--:"] * (4 + len(rates))])
    for model in dict.fromkeys(row.model for row in rows):
        of_rates = [[row for row in rows if (row.model, row.megabits_per_second) == (model, rate)] for rate in rates]
        for same_arm in zip(*of_rates, strict=True):
            first = same_arm[0]
            sent = [f"{size / 1e3:,.1f} kB" for size in first.sent]
            shares = [f"{ratio(of_rates[0], first.arm, base):.3f}" for base in (FLAT, FLAT_INT4)]
            quartiles = [[f"{1e3 * value:,.0f}" for value in row.seconds] for row in same_arm]
            times = [f"{median} ({lower}–{upper})" for lower, median, upper in quartiles]
            lines.append([model, first.arm, *sent, *shares, *times])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    programs.main(
        description=__doc__,
        name="two-levels",
        steps=STEPS,
        work=work,
        measure=lambda steps: measure(ARMS, list(MODELS), RATES, steps),
        table=table,
        packages=("torch",),
    )
