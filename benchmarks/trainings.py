"""Recorded trainings of several programs: one record for each arm and seed, in a file of JSON."""

import dataclasses
import functools
import json
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks import arms as ways
from benchmarks import digits
from benchmarks.markdown import markdown_table
from powersgd_triton.demo.model import WIDTH
from powersgd_triton.demo.train import BATCH_PER_WORKER, Prepared, Settings, train

RESULTS = Path(__file__).parent / "results"
CURVE_STEPS = 10
"""Steps of which a point of a training curve is the mean."""
Record = dict[str, Any]
Figures = Mapping[str, Any]
Train = Callable[[Sequence[str], int, int, int], Iterable[Figures]]
"""(arms, seed, steps, workers) → figures of each arm."""


def train_text(
    arms: Sequence[str],
    seed: int,
    steps: int,
    workers: int,
    width: int = WIDTH,
    batch: int = BATCH_PER_WORKER,
    prepare: Callable[..., Prepared] = ways.prepare,
) -> Iterator[Figures]:
    """Validation loss, in nats per character, bytes and training losses (means of ten steps) of each arm."""
    settings = Settings(steps, workers, "cpu", seed, width=width, batch=batch)
    for arm in arms:
        result = train(settings, arm, functools.partial(prepare, arm=arm))
        curve = [round(statistics.fmean(result.losses[i : i + CURVE_STEPS]), 4) for i in range(0, steps, CURVE_STEPS)]
        yield {
            "loss": result.validation_loss,
            "bytes_per_step": result.bytes_per_step,
            "sent": result.sent,
            "received": result.received,
            "curve": curve,
        }


def train_digits(
    arms: Sequence[str], seed: int, steps: int, workers: int, network: digits.Network = digits.PERCEPTRON
) -> Iterator[Figures]:
    """Validation loss, in nats per image, accuracy in percent, and bytes of each arm."""
    yield from map(dataclasses.asdict, digits.train_arms(arms, seed, steps, workers, network))


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

    def excess(self, other: "Point") -> list[float]:
        """By how many percent its loss is above another one's, for each seed of both."""
        shared = self.losses.keys() & other.losses.keys()
        return [100 * (self.losses[seed] / other.losses[seed] - 1) for seed in shared]

    def above(self, other: "Point") -> str:
        """The mean of ``excess``, with its standard error."""
        excess = self.excess(other)
        if self is other or not excess:
            return ""
        error = f" ± {statistics.stdev(excess) / len(excess) ** 0.5:.1f}" if len(excess) > 1 else ""
        return f"{statistics.fmean(excess):+.1f}{error}%"


def run(
    file: Path,
    name: str,
    train: Train,
    arms: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    workers: int,
    others: Sequence[Record] = (),
) -> None:
    """Train what neither a file nor the ``others`` have yet of a model, and record it in the file."""
    for arm in arms:
        ways.check(arm)
    for seed in seeds:
        common = {"model": name, "seed": seed, "steps": steps, "workers": workers}
        done = {record["arm"] for record in [*read(file), *others] if common.items() <= record.items()}
        missing = [arm for arm in dict.fromkeys(arms) if arm not in done]
        if not missing:
            continue
        for arm, figures in zip(missing, train(missing, seed, steps, workers), strict=True):
            versions = {"torch": torch.__version__, "machine": platform.machine()}
            record = {"model": name, "arm": arm, **common, **figures, **versions}
            file.write_text(json.dumps([*read(file), record], indent=1) + "\n")
            shown = ", ".join(f"{k} {v:,.5g}" for k, v in figures.items() if isinstance(v, (int, float)))
            print(f"{name}, seed {seed}, {arm}: {shown}", flush=True)


def read(file: Path) -> list[Record]:
    """All trainings that a file has so far."""
    records: list[Record] = json.loads(file.read_text()) if file.exists() else []
    return records


def points(records: Iterable[Record], name: str, steps: int, workers: int) -> list[Point]:
    """All arms of a model, those that send most first."""
    common = {"model": name, "steps": steps, "workers": workers}
    runs: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: int(record["seed"])):
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


def front(found: Sequence[Point], loss: Callable[[Point], float] = attrgetter("loss")) -> list[Point]:
    """Those that no other one beats in both bytes and loss. ``loss`` returns the loss that is compared."""
    return [
        point
        for point in found
        if not any(loss(other) < loss(point) and other.bytes_per_step <= point.bytes_per_step for other in found)
    ]


def table(found: Sequence[Point], decimals: int, best: Sequence[Point] | None = None) -> str:
    """Markdown; the losses of the best ones in bold, by default of the front."""
    whole = next((point for point in found if point.arm == "allreduce"), None)
    accurate = any(point.accuracies for point in found)
    header = ["arm", "bytes a step and worker", "", "validation loss", "above all-reduce", "seeds"]
    lines = [header[:5] + ["accuracy"] * accurate + header[5:]]
    lines.append(["---"] * len(lines[0]))
    bold = {point.arm for point in (front(found) if best is None else best)}
    for point in found:
        ratio = (
            "" if whole is None or not point.bytes_per_step else f"{whole.bytes_per_step / point.bytes_per_step:.1f}×"
        )
        above = "" if whole is None else point.above(whole)
        loss = f"**{point.loss:.{decimals}f}**" if point.arm in bold else f"{point.loss:.{decimals}f}"
        if len(point.losses) > 1:
            loss += f" ± {statistics.stdev(point.losses.values()):.{decimals}f}"
        accuracy = [f"{statistics.fmean(point.accuracies):.2f}%" if point.accuracies else ""] * accurate
        lines.append([point.arm, f"{point.bytes_per_step:,.0f}", ratio, loss, above, *accuracy, str(len(point.losses))])
    return markdown_table(lines)
