"""Bytes, messages and times of a step on clusters that are not here, with up to 1,024 workers.

python benchmarks/network/simulator.py

The package's own engine runs a step of each worker of a node, on tensors without memory, and its collectives are
counted instead of carried out. So every decision is the package's: which buckets are joined, how a message is summed,
and how it is divided. traffic.py describes the model of the time. Prints Markdown tables, and writes
benchmarks/results/cluster.json and benchmarks/results/cluster.png.
"""

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.buckets import ddp_buckets
from benchmarks.environment import commit
from benchmarks.markdown import markdown_table
from benchmarks.network.stand_ins import META, CountedWorker, counted
from benchmarks.network.traffic import Traffic
from powersgd_triton import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.demo.measure import Call
from powersgd_triton.planning.cost import Network
from powersgd_triton.planning.models import MODELS as KNOWN_MODELS
from powersgd_triton.planning.models import Shapes

RESULTS = Path(__file__).parents[1] / "results"

MODELS: dict[str, Shapes] = {"GPT-2, 124 M": KNOWN_MODELS["gpt2"], "Llama, 6.7 B": KNOWN_MODELS["llama-7b"]}
CARDS = {"10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}
"""Bytes a second of a node's card."""
RANKS = (4, 16)
WIDTHS = ("float32", "int8", "int4")
CLUSTERS = ((2, 1), (4, 1), (8, 1), (16, 1), (64, 1), (256, 1), (1024, 1), (2, 2), (2, 8), (8, 8), (32, 8), (128, 8))
"""(nodes, workers of a node)."""
FLAT, TWO_LEVELS = "flat", "two levels"
RING = "ring all-reduce"
EXACT = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def simulate(
    buckets: Sequence[Shapes], config: PowerSGDConfig, nodes: int, node_size: int = 1, *, two_levels: bool = False
) -> Traffic:
    """Return the collectives of a step that averages buckets of fp32 gradients.

    Args:
        buckets: Shapes of each bucket's gradients, in the order of the buckets.
        config: Configuration of the compression.
        nodes, node_size: Number of nodes, and of workers of each.
        two_levels: Whether the workers of a node sum their gradients, as with ``node_group="auto"``.
    """
    # On one level all workers do the same.
    workers = range(node_size if two_levels else 1)
    return Traffic(
        nodes, node_size, tuple(_calls(buckets, config, nodes, node_size, w, two_levels=two_levels) for w in workers)
    )


def exact(buckets: Sequence[Shapes], dtype: torch.dtype, nodes: int, node_size: int = 1) -> Traffic:
    """Return the collectives of a step without compression: an all-reduce of each bucket in a dtype."""
    calls: list[tuple[bool, Call]] = []
    worker = CountedWorker(0, nodes * node_size, calls)
    for shapes in buckets:
        worker.all_reduce(torch.empty(sum(torch.Size(s).numel() for s in shapes), dtype=dtype, device=META))
    return Traffic(nodes, node_size, (tuple(calls),))


def _calls(
    buckets: Sequence[Shapes], config: PowerSGDConfig, nodes: int, node_size: int, index: int, *, two_levels: bool
) -> tuple[tuple[bool, Call], ...]:
    """Return the collectives of a worker of the first node."""
    calls: list[tuple[bool, Call]] = []
    communicator = CountedWorker(index, nodes * node_size, calls)
    if two_levels:
        communicator.inside = CountedWorker(index, node_size, calls, inside=True)
        communicator.across = CountedWorker(0, nodes, calls)
    numbered = [{f"{b}.{i}": shape for i, shape in enumerate(shapes)} for b, shapes in enumerate(buckets)]
    tensors = {name: shape for shapes in numbered for name, shape in shapes.items()}
    engine = Engine(counted(), config, communicator, lambda: tensors)
    # Quantized gradients are encoded, since nothing else knows their codes' sizes.
    device = META if config.quantize is None else torch.device("cpu")
    for shapes in numbered:
        bucket = engine.begin(id(shapes), lambda own=shapes: own, device, last=shapes is numbered[-1])  # type: ignore[misc]
        engine.average(bucket, {n: torch.zeros(s, device=device) for n, s in shapes.items()}, join=True)
    return tuple(calls)


@dataclasses.dataclass(frozen=True)
class Row:
    """One cluster and one way of averaging.

    Attributes:
        model: Key of ``MODELS``.
        rank: Rank of the factors. 0 without compression.
        width: Format of factors, or of gradients without compression.
        layout: ``RING``, ``FLAT`` or ``TWO_LEVELS``.
        nodes, node_size: Number of nodes, and of workers of each.
        most, inside: Largest, over workers, of the bytes sent and received between nodes, and inside them. On one level
            all are between nodes.
        normalized: ``most`` divided by 2 (k − 1) / k, where k workers sum together.
        card: Bytes that a node's card sends and receives.
        collectives: Number of collectives.
        latencies, inside_latencies: Number of messages of a worker that follow one another.
        seconds: {key of ``CARDS``: time of the collectives}.
    """

    model: str
    rank: int
    width: str
    layout: str
    nodes: int
    node_size: int
    most: int
    inside: int
    normalized: float
    card: float
    collectives: int
    latencies: int
    inside_latencies: int
    seconds: dict[str, float]

    @classmethod
    def of(cls, model: str, rank: int, width: str, layout: str, traffic: Traffic) -> "Row":
        return cls(
            *(model, rank, width, layout, traffic.nodes, traffic.node_size),
            *(traffic.most(), traffic.most(inside=True), traffic.normalized, traffic.card, traffic.collectives),
            *(traffic.latencies(), traffic.latencies(inside=True)),
            {name: traffic.seconds(Network(traffic.nodes, traffic.node_size, card)) for name, card in CARDS.items()},
        )

    @property
    def workers(self) -> int:
        """Number of all workers."""
        return self.nodes * self.node_size


def figures() -> list[Row]:
    """Return the rows of all models, clusters, ranks, widths and layouts."""
    rows = []
    for (model, shapes), (nodes, node_size) in itertools.product(MODELS.items(), CLUSTERS):
        buckets = ddp_buckets(shapes)
        for width, dtype in EXACT.items():
            rows.append(Row.of(model, 0, width, RING, exact(buckets, dtype, nodes, node_size)))
        for rank, width, two_levels in itertools.product(RANKS, WIDTHS, (False, True)[: min(node_size, 2)]):
            config = PowerSGDConfig(rank=rank, wire_dtype=width)
            traffic = simulate(buckets, config, nodes, node_size, two_levels=two_levels)
            rows.append(Row.of(model, rank, width, TWO_LEVELS if two_levels else FLAT, traffic))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown: bytes, messages and times of rows."""
    times = [f"ms at {name}" for name in CARDS]
    header = ["workers", "sums", "MB of a worker", "MB through a card", "MB inside a node", "messages in a row", *times]
    lines = [header, ["--:", "---", *["--:"] * (len(header) - 2)]]
    for row in rows:
        sizes = [f"{size / 1e6:,.2f}" if size else "" for size in (row.most, row.card, row.inside)]
        inside = f" + {row.inside_latencies:,}" if row.inside_latencies else ""
        seconds = [f"{1e3 * value:,.1f}" for value in row.seconds.values()]
        cluster = f"{row.nodes:,} × {row.node_size}"
        lines.append([cluster, f"{row.layout}, {row.width}", *sizes, f"{row.latencies:,}{inside}", *seconds])
    return markdown_table(lines)


def draw(rows: Sequence[Row], network: str, path: Path) -> None:
    """Plot bytes through a card, and time, against workers: one colour a width, one line style a layout."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"float32": "tab:blue", "bfloat16": "tab:orange", "int8": "tab:green", "int4": "tab:red"}
    styles = {RING: ":", FLAT: "--", TWO_LEVELS: "-"}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    values: Sequence[Callable[[Row], float]] = (lambda row: row.card / 1e6, lambda row: 1e3 * row.seconds[network])
    for axis, value in zip(axes, values, strict=True):
        for layout, width in dict.fromkeys((row.layout, row.width) for row in rows):
            points = [(row.workers, value(row)) for row in rows if (row.layout, row.width) == (layout, width)]
            label = f"{layout}, {width}"
            axis.plot(*zip(*points, strict=True), styles[layout], color=colours[width], marker=".", label=label)
        axis.set(xlabel="workers", xscale="log", yscale="log")
        workers = sorted({row.workers for row in rows})
        axis.set_xticks(workers, [f"{number:,}" for number in workers])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("MB of a step through a node's card")
    axes[1].set_ylabel(f"ms of collectives at {network}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    largest = list(MODELS)[-1]
    buckets, config = ddp_buckets(MODELS[largest]), PowerSGDConfig(rank=16, wire_dtype="int4")
    # The first time imports modules.
    for _ in range(2):
        begin = time.process_time()
        simulate(buckets, config, 1024)
        plan_seconds = time.process_time() - begin
    print(f"The first step of {largest}, rank 16, int4, of 1,024 workers takes {plan_seconds:.2f} s of a CPU core.\n")
    rows = figures()
    for model, rank in itertools.product(MODELS, RANKS):
        own = [row for row in rows if row.model == model and row.rank in (0, rank)]
        print(f"{model}, rank {rank}:\n\n{table(own)}\n")
    record = {
        "commit": commit(),
        "torch": torch.__version__,
        "plan_seconds": round(plan_seconds, 3),
        "networks": {name: dataclasses.asdict(Network(2, card=card)) for name, card in CARDS.items()},
    }
    # One row a line.
    lines = ",\n  ".join(json.dumps(dataclasses.asdict(row)) for row in rows)
    text = f'{json.dumps(record, indent=1)[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n'
    (RESULTS / "cluster.json").write_text(text)
    first = next(iter(MODELS))
    shown = [row for row in rows if (row.model, row.node_size) == (first, 8) and row.rank in (0, 16)]
    draw([row for row in shown if row.width != "int8"], "10 Gbit/s", RESULTS / "cluster.png")


if __name__ == "__main__":
    main()
