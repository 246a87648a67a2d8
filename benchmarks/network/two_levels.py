"""Bytes and times of DDP's steps on two nodes of two workers: exact averaging, flat factors, factors in two levels.

python benchmarks/network/two_levels.py [--steps 24]

The nodes are network namespaces, whose links have 100 Mbit/s and then 1 Gbit/s. Bytes are those of the nodes'
interfaces. Needs root and iproute2. Prints Markdown tables and writes benchmarks/results/two-levels.json.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.markdown import markdown_table
from benchmarks.network import programs, turns
from benchmarks.network.turns import Row
from powersgd_triton.demo import model as text_model
from powersgd_triton.demo.arms import Arm, communication
from powersgd_triton.demo.model import read_corpus, sample_batch
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook

NODES, WORKERS_PER_NODE = 2, 2
RATES = (100.0, 1000.0)
MODELS = {"demo, 0.8 M": text_model.WIDTH, "wider, 9.8 M": 448}
"""{name: width}. All have the demo's depth."""
STEPS = 24
# The bytes of a step do not depend on the batch.
BATCH = 2
RANK = 4


EXACT = {"exact, fp32": "allreduce", "exact, bf16": "allreduce+bf16"}
"""{arm: arm of the demo}."""
FLAT, FLAT_INT4, TWO_LEVELS, TWO_LEVELS_INT4 = "flat, fp32", "flat, int4", "two levels, fp32", "two levels, int4"
FACTORS: dict[str, dict[str, Any]] = {
    FLAT: {},
    FLAT_INT4: {"wire_dtype": "int4"},
    TWO_LEVELS: {"node_group": "auto"},
    TWO_LEVELS_INT4: {"node_group": "auto", "wire_dtype": "int4"},
}
"""{arm: options of ``PowerSGDState``}."""
ARMS = (*EXACT, *FACTORS)


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
        steps: Number of steps to count, which is rounded up to whole turns.
        timeout: Seconds for one rate.

    Raises:
        RuntimeError: No network can be made here, or a worker failed.
        TimeoutError: The workers were not done in time.
    """
    task = {"arms": list(arms), "models": list(models), "turns": -(-steps // turns.TURN)}
    return [row for rate in rates for row in turns.measure(__file__, NODES, WORKERS_PER_NODE, rate, task, timeout)]


def work(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train all arms as one worker. Return bytes of its node and times of its steps. Runs inside a node."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training, _ = read_corpus()
    figures: list[dict[str, Any]] = []
    for name in task["models"]:
        arms = {arm: _training(arm, MODELS[name], training) for arm in task["arms"]}
        figures += turns.take_turns(name, arms, task["turns"])
    dist.destroy_process_group()
    return figures


def _training(arm: str, width: int, tokens: torch.Tensor) -> Callable[[], None]:
    """Return a function that trains one step. All arms begin with the same model and see the same data."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(text_model.GPT(width))
    if arm in FACTORS:
        state = PowerSGDState(None, RANK, start_powerSGD_iter=0, module=ddp.module, **FACTORS[arm])
        ddp.register_comm_hook(state, powerSGD_hook)
    else:
        ddp.register_comm_hook(*communication(Arm.parse(EXACT[arm], RANK), ddp.module))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def step() -> None:
        inputs, targets = sample_batch(tokens, BATCH, text_model.CONTEXT, generator)
        optimizer.zero_grad()
        text_model.next_token_loss(ddp, inputs, targets).backward()
        optimizer.step()

    return step


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
    return markdown_table(lines)


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
