"""Loss against bytes: the demo's text model with factors of every width and rank, beside all-reduce and torch's hook.

python benchmarks/loss_per_byte.py run --seeds 0 1 2 [--arms ours:4 ours:32+int4 …] [--steps 600]
python benchmarks/loss_per_byte.py report

``run`` adds what is missing to benchmarks/results/loss-per-byte.json, one training after the other, and can be
interrupted. ``report`` prints the table, and draws the losses against the bytes with the Pareto front.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from powersgd_triton.demo.run import train_arm
from powersgd_triton.demo.train import MODES, Arm, Settings

RESULTS = Path(__file__).parent / "results"
FILE, PICTURE = RESULTS / "loss-per-byte.json", RESULTS / "loss-per-byte.png"
ARMS = [
    "allreduce",
    *(f"torch:{rank}" for rank in (1, 4, 16)),
    *(f"ours:{rank}" for rank in (1, 4, 16)),
    *(f"ours:{rank}+bf16" for rank in (8,)),
    *(f"ours:{rank}+int8" for rank in (4, 8, 16)),
    *(f"ours:{rank}+int4" for rank in (8, 16, 32, 64)),
    "ours:64+int4+alternating",
]
DEFAULT_RANK = 16


@dataclasses.dataclass(frozen=True)
class Point:
    """One arm's mean over seeds.

    Attributes:
        arm: as on the command line.
        losses: validation loss of each seed, in nats per token.
        bytes_per_step: a step and worker, on a scale on which an all-reduce of B bytes counts B.
    """

    arm: str
    losses: tuple[float, ...]
    bytes_per_step: float

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def width(self) -> str:
        """What the factors travel in; the method's name where they are not ours."""
        method, *modes = self.arm.replace(":", "+").split("+")
        return (
            next((mode for mode in modes if "wire_dtype" in MODES.get(mode, {})), "fp32")
            if method == "ours"
            else method
        )


def run(arms: Sequence[str], seeds: Sequence[int], steps: int, workers: int) -> None:
    """Train what the file does not have yet."""
    for seed in seeds:
        for text in arms:
            records = read()
            key = {"arm": text, "seed": seed, "steps": steps, "workers": workers}
            if any(key.items() <= record.items() for record in records):
                continue
            result = train_arm(Settings(steps, workers, "cpu", seed), Arm.parse(text, DEFAULT_RANK))
            figures = {"loss": result.validation_loss, "bytes_per_step": result.bytes_per_step}
            versions = {"torch": torch.__version__, "machine": platform.machine()}
            FILE.write_text(json.dumps([*records, {**key, **figures, **versions}], indent=1) + "\n")
            print(
                f"{text}, seed {seed}: {result.validation_loss:.4f} with {result.bytes_per_step:,.0f} bytes", flush=True
            )


def read() -> list[dict[str, Any]]:
    """All trainings so far."""
    records: list[dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else []
    return records


def points(steps: int, workers: int) -> list[Point]:
    """Means over seeds, by bytes."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for record in read():
        if (record["steps"], record["workers"]) == (steps, workers):
            runs.setdefault(record["arm"], []).append(record)
    found = [
        Point(arm, tuple(one["loss"] for one in sorted(those, key=lambda one: one["seed"])), those[0]["bytes_per_step"])
        for arm, those in runs.items()
    ]
    return sorted(found, key=lambda point: -point.bytes_per_step)


def front(found: Sequence[Point]) -> list[Point]:
    """Those that no other one beats in both bytes and loss."""
    return [
        point
        for point in found
        if not any(other.loss < point.loss and other.bytes_per_step <= point.bytes_per_step for other in found)
    ]


def table(found: Sequence[Point]) -> str:
    """Markdown."""
    whole = next((point for point in found if point.arm == "allreduce"), None)
    lines = [
        "| arm | bytes a step and worker | | validation loss | above all-reduce | seeds |",
        "|---|---|---|---|---|---|",
    ]
    best = {point.arm for point in front(found)}
    for point in found:
        ratio = "" if whole is None else f"{whole.bytes_per_step / point.bytes_per_step:.1f}×"
        above = "" if whole is None else f"{100 * (point.loss / whole.loss - 1):+.1f}%"
        spread = f" ± {statistics.stdev(point.losses):.3f}" if len(point.losses) > 1 else ""
        loss = f"**{point.loss:.3f}**" if point.arm in best else f"{point.loss:.3f}"
        lines.append(
            f"| {point.arm} | {point.bytes_per_step:,.0f} | {ratio} | {loss}{spread} | {above} | {len(point.losses)} |"
        )
    return "\n".join(lines)


def draw(found: Sequence[Point]) -> None:
    """Losses against bytes, one colour a width, and the front."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for width in dict.fromkeys(point.width for point in found):
        those = [point for point in found if point.width == width]
        axes.plot([p.bytes_per_step for p in those], [p.loss for p in those], "o-", label=width)
        for point in those:
            axes.annotate(point.arm.split("+")[0].replace("ours:", "r"), (point.bytes_per_step, point.loss), fontsize=7)
    best = front(found)
    axes.plot([p.bytes_per_step for p in best], [p.loss for p in best], "k:", label="Pareto front")
    axes.set(xscale="log", xlabel="bytes a step and worker", ylabel="validation loss (nats per character)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--arms", nargs="+", default=ARMS, help="as for the demo")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.arms, arguments.seeds, arguments.steps, arguments.workers)
    else:
        found = points(arguments.steps, arguments.workers)
        print(table(found))
        draw(found)


if __name__ == "__main__":
    main()
