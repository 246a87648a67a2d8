"""Loss against bytes: two models with factors of every width and rank, beside all-reduce and torch's hook.

python benchmarks/loss_per_byte.py run --model text|digits|both [--seeds 0 1 2] [--arms ours:4 ours:32+int4 ours:20x …]
python benchmarks/loss_per_byte.py report

``run`` adds what is missing to benchmarks/results/loss-per-byte.json and can be interrupted: the demo's text model is
recorded after each training, digits after all those of a seed. ``report`` prints a table for each model, and draws the
losses against the bytes with the Pareto fronts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks import digits
from benchmarks.markdown import markdown_table
from powersgd_triton.config import PLANNED_WIRE_DTYPE
from powersgd_triton.demo.model import WIDTH
from powersgd_triton.demo.run import train_arm
from powersgd_triton.demo.train import BATCH_PER_WORKER, MODES, Arm, Settings, budget_text

RESULTS = Path(__file__).parent / "results"
FILE, PICTURE = RESULTS / "loss-per-byte.json", RESULTS / "loss-per-byte.png"
DEFAULT_RANK = 16
CURVE_STEPS = 10
"""Steps of which a point of a training curve is the mean."""
Record = dict[str, Any]
Figures = Mapping[str, Any]
Train = Callable[[Sequence[Arm], int, int, int], Iterable[Figures]]
"""(arms, seed, steps, workers) → figures of each arm."""


def train_text(
    arms: Sequence[Arm],
    seed: int,
    steps: int,
    workers: int,
    width: int = WIDTH,
    batch: int = BATCH_PER_WORKER,
) -> Iterator[Figures]:
    """Validation loss, in nats per character, bytes and training losses (means of ten steps) of each arm."""
    for arm in arms:
        result = train_arm(Settings(steps, workers, "cpu", seed, width=width, batch=batch), arm)
        curve = [round(statistics.fmean(result.losses[i : i + CURVE_STEPS]), 4) for i in range(0, steps, CURVE_STEPS)]
        yield {"loss": result.validation_loss, "bytes_per_step": result.bytes_per_step, "curve": curve}


def train_digits(arms: Sequence[Arm], seed: int, steps: int, workers: int) -> Iterator[Figures]:
    """Validation loss, in nats per image, accuracy in percent, and bytes of each arm."""
    yield from map(dataclasses.asdict, digits.train_arms(arms, seed, steps, workers))


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        train: Trains it.
        unit: of its loss.
        decimals: of its loss that say something.
        arms, seeds, steps: where the command line names none.
    """

    train: Train
    unit: str
    decimals: int
    arms: Sequence[str]
    seeds: Sequence[int]
    steps: int


MODELS = {
    "text": Model(
        train=train_text,
        unit="nats per character",
        decimals=3,
        arms=[
            "allreduce",
            "torch:4",
            *(f"ours:{rank}" for rank in (1, 2, 4, 16, 64)),
            *(f"ours:{rank}+bf16" for rank in (4, 8, 16, 32)),
            *(f"ours:{rank}+int8" for rank in (4, 8, 16, 32, 64)),
            *(f"ours:{rank}+int4" for rank in (4, 8, 16, 32, 64)),
            # As many bytes as ranks 2 and 4 in fp32, 8 and 32 in int4.
            *("ours:33.77x+fp32", "ours:19.63x+fp32", "ours:51.6x", "ours:19x"),
        ],
        seeds=(0, 1, 2),
        steps=600,
    ),
    "digits": Model(
        train=train_digits,
        unit="nats per image",
        decimals=4,
        arms=[
            "allreduce",
            *(f"torch:{rank}" for rank in (1, 4, 16)),
            *(f"ours:{rank}" for rank in (1, 2, 4, 8, 16, 32)),
            *(f"ours:{rank}+bf16" for rank in (4, 8, 16)),
            *(f"ours:{rank}+int8" for rank in (2, 4, 8, 16, 32)),
            *(f"ours:{rank}+int4" for rank in (4, 8, 16, 32, 64)),
            # As many bytes as ranks 2 and 4 in fp32, 16, 8 and 4 in int4.
            *("ours:41.03x+fp32", "ours:22.74x+fp32", "ours:40x", "ours:66x", "ours:100x"),
        ],
        seeds=range(5),
        steps=300,
    ),
}

COLOURS = {
    "allreduce": "black",
    "torch": "tab:gray",
    "fp32": "tab:blue",
    "bf16": "tab:green",
    "fp16": "tab:olive",
    "int8": "tab:orange",
    "int4": "tab:red",
}
STYLES: dict[str, dict[str, Any]] = {
    "rank": {"marker": "o", "linestyle": "-"},
    "budget": {"marker": "*", "linestyle": "--", "markersize": 10},
    "alternating": {"marker": "^", "linestyle": ":"},
}
LABELS = {"rank": (3, 4), "budget": (4, -11), "alternating": (-12, 4)}
"""Where a label is, in points from its point."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One arm, over all seeds.

    Attributes:
        arm: as on the command line.
        losses: {seed: validation loss}, in the model's unit.
        accuracies: in percent, of each seed; empty for a model without.
        bytes_per_step: a step and worker, on a scale on which an all-reduce of B bytes counts B; mean over seeds.
    """

    arm: str
    losses: Mapping[int, float]
    accuracies: Sequence[float]
    bytes_per_step: float

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses.values())

    @property
    def width(self) -> str:
        """What the factors travel in; the method's name where they are not ours."""
        arm = Arm.parse(self.arm, DEFAULT_RANK)
        if arm.method != "ours":
            return arm.method
        default = "fp32" if arm.compression is None else PLANNED_WIRE_DTYPE
        return next((mode for mode in arm.modes if "wire_dtype" in MODES[mode]), default)

    @property
    def kind(self) -> str:
        """How ranks or factors come about, a key of ``STYLES``."""
        arm = Arm.parse(self.arm, DEFAULT_RANK)
        return "budget" if arm.compression is not None else "alternating" if "alternating" in arm.modes else "rank"

    @property
    def label(self) -> str:
        """Rank or budget, as short as it can be; empty for all-reduce."""
        arm = Arm.parse(self.arm, DEFAULT_RANK)
        if arm.compression is not None:
            return budget_text(arm.compression, "×")
        return "" if arm.rank is None else str(arm.rank)

    def above(self, other: Point) -> str:
        """By how much its loss is above another one's, seed by seed, with the standard error of the mean."""
        shared = self.losses.keys() & other.losses.keys()
        excess = [100 * (self.losses[seed] / other.losses[seed] - 1) for seed in shared]
        if self is other or not excess:
            return ""
        error = f" ± {statistics.stdev(excess) / len(excess) ** 0.5:.1f}" if len(excess) > 1 else ""
        return f"{statistics.fmean(excess):+.1f}{error}%"


def run(name: str, train: Train, arms: Sequence[str], seeds: Sequence[int], steps: int, workers: int) -> None:
    """Train what the file does not have yet of a model."""
    for seed in seeds:
        common = {"model": name, "seed": seed, "steps": steps, "workers": workers}
        done = {record["arm"] for record in read() if common.items() <= record.items()}
        missing = [text for text in dict.fromkeys(arms) if text not in done]
        if not missing:
            continue
        trained = train([Arm.parse(text, DEFAULT_RANK) for text in missing], seed, steps, workers)
        for text, figures in zip(missing, trained, strict=True):
            versions = {"torch": torch.__version__, "machine": platform.machine()}
            record = {"model": name, "arm": text, **common, **figures, **versions}
            FILE.write_text(json.dumps([*read(), record], indent=1) + "\n")
            shown = ", ".join(f"{k} {v:,.5g}" for k, v in figures.items() if isinstance(v, (int, float)))
            print(f"{name}, seed {seed}, {text}: {shown}", flush=True)


def read() -> list[Record]:
    """All trainings so far."""
    records: list[Record] = json.loads(FILE.read_text()) if FILE.exists() else []
    return records


def points(name: str, steps: int, workers: int) -> list[Point]:
    """All arms of a model, those that send most first."""
    common = {"model": name, "steps": steps, "workers": workers}
    runs: dict[str, list[Record]] = {}
    for record in sorted(read(), key=lambda record: int(record["seed"])):
        if common.items() <= record.items():
            runs.setdefault(record["arm"], []).append(record)
    found = [
        Point(
            arm,
            {one["seed"]: one["loss"] for one in those},
            [one["accuracy"] for one in those if "accuracy" in one],
            statistics.fmean(one["bytes_per_step"] for one in those),
        )
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


def table(found: Sequence[Point], decimals: int) -> str:
    """Markdown; the front's losses in bold."""
    whole = next((point for point in found if point.arm == "allreduce"), None)
    accurate = any(point.accuracies for point in found)
    header = ["arm", "bytes a step and worker", "", "validation loss", "above all-reduce", "seeds"]
    lines = [header[:5] + ["accuracy"] * accurate + header[5:]]
    lines.append(["---"] * len(lines[0]))
    best = {point.arm for point in front(found)}
    for point in found:
        ratio = "" if whole is None else f"{whole.bytes_per_step / point.bytes_per_step:.1f}×"
        above = "" if whole is None else point.above(whole)
        loss = f"**{point.loss:.{decimals}f}**" if point.arm in best else f"{point.loss:.{decimals}f}"
        if len(point.losses) > 1:
            loss += f" ± {statistics.stdev(point.losses.values()):.{decimals}f}"
        accuracy = [f"{statistics.fmean(point.accuracies):.2f}%" if point.accuracies else ""] * accurate
        lines.append([point.arm, f"{point.bytes_per_step:,.0f}", ratio, loss, above, *accuracy, str(len(point.losses))])
    return markdown_table(lines)


def draw(panels: Mapping[str, Sequence[Point]]) -> None:
    """Losses against bytes, a panel for each model, {name: points}: one colour a width, one line style a kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, row = plt.subplots(1, len(panels), figsize=(11, 6.5), layout="constrained", squeeze=False)
    handles: dict[str, Any] = {}
    for axes, (name, found) in zip(row[0], panels.items(), strict=True):
        best = front(found)
        handles["Pareto front"] = axes.plot(
            *([getattr(point, field) for point in best] for field in ("bytes_per_step", "loss")),
            **{"color": "gold", "linewidth": 7, "alpha": 0.6, "solid_capstyle": "round", "zorder": 0},
        )[0]
        for width, kind in itertools.product(COLOURS, STYLES):
            those = [point for point in found if (point.width, point.kind) == (width, kind)]
            if not those:
                continue
            handles[legend_text(width, kind)] = axes.plot(
                *([getattr(point, field) for point in those] for field in ("bytes_per_step", "loss")),
                **{"color": COLOURS[width], "markersize": 5, **STYLES[kind]},
            )[0]
            for point in those:
                axes.annotate(
                    point.label,
                    (point.bytes_per_step, point.loss),
                    **{"xytext": LABELS[kind], "textcoords": "offset points", "fontsize": 8, "color": COLOURS[width]},
                )
        axes.set(xscale="log", title=name, xlabel="bytes a step and worker")
        axes.set(ylabel=f"validation loss, {MODELS[name].unit}")
        axes.grid(alpha=0.3)
    order = ["Pareto front", *(legend_text(width, kind) for width, kind in itertools.product(COLOURS, STYLES))]
    labels = [label for label in order if label in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=6)
    figure.savefig(PICTURE, dpi=120)
    plt.close(figure)


def legend_text(width: str, kind: str) -> str:
    return width if kind == "rank" else f"{width}, {kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--model", choices=[*MODELS, "both"], default="both")
    parser.add_argument("--arms", nargs="+", help="as for the demo (default: a list for each model)")
    parser.add_argument("--seeds", nargs="+", type=int, help="(default: 0 to 2 for text, 0 to 4 for digits)")
    parser.add_argument("--steps", type=int, help="(default: 600 for text, 300 for digits)")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    names = list(MODELS) if arguments.model == "both" else [arguments.model]
    steps = {name: arguments.steps or MODELS[name].steps for name in names}
    if arguments.command == "run":
        for name in names:
            model = MODELS[name]
            arms, seeds = arguments.arms or model.arms, arguments.seeds or model.seeds
            run(name, model.train, arms, seeds, steps[name], arguments.workers)
        return
    panels = {name: found for name in names if (found := points(name, steps[name], arguments.workers))}
    for name, found in panels.items():
        print(f"{name}\n\n{table(found, MODELS[name].decimals)}\n")
    print("± after a loss: standard deviation over seeds; after a difference: standard error of its mean over seeds.")
    draw(panels)


if __name__ == "__main__":
    main()
