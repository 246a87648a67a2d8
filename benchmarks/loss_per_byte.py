"""Loss against bytes: two models with factors of every width and rank, beside all-reduce and torch's hook.

python benchmarks/loss_per_byte.py run --model text|digits|… [--seeds 0 1 2] [--arms ours:4 ours:32+int4 ours:20x …]
python benchmarks/loss_per_byte.py report

``run`` adds what is missing to benchmarks/results/loss-per-byte.json and can be interrupted: the demo's text model is
recorded after each training, digits after all those of a seed. ``report`` prints a table for each model, and draws the
losses of text and digits against the bytes with the Pareto fronts.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import digits, mixture, muon
from benchmarks.trainings import RESULTS, Point, Train, front, points, read, run, table, train_digits, train_text
from powersgd_triton.config import PLANNED_WIRE_DTYPE
from powersgd_triton.demo.arms import MODES, Arm

FILE, PICTURE = RESULTS / "loss-per-byte.json", RESULTS / "loss-per-byte.png"
DEFAULT_RANK = 16


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        train: Trains it.
        unit: of its loss.
        decimals: of its loss that say something.
        arms, seeds, steps, workers: where the command line names none.
    """

    train: Train
    unit: str
    decimals: int
    arms: Sequence[str]
    seeds: Sequence[int]
    steps: int
    workers: int = 2


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
    "mixture": Model(
        train=functools.partial(
            train_text, width=mixture.WIDTH, batch=mixture.BATCH_PER_WORKER, prepare=mixture.prepare
        ),
        unit="nats per character",
        decimals=3,
        # torch's hook can send no fewer bytes than at rank 1.
        arms=["allreduce", "ours:20x", "ours:20x+dim0", "ours:20x+routers", "torch:1"],
        seeds=(0, 1, 2),
        steps=600,
        workers=4,
    ),
    "muon": Model(
        train=functools.partial(train_text, prepare=muon.prepare),
        unit="nats per character",
        decimals=3,
        arms=["allreduce", "ours:19.5x", "torch:4"],
        seeds=(0, 1, 2),
        steps=600,
    ),
    "convolutions": Model(
        train=functools.partial(train_digits, network=digits.CONVOLUTIONS),
        unit="nats per image",
        decimals=4,
        arms=["allreduce", "ours:4", "ours:4+kernels", "ours:20x", "ours:20x+kernels"],
        seeds=(0, 1, 2),
        steps=300,
    ),
}
DRAWN = ["text", "digits"]

COLOURS = {
    "allreduce": "black",
    "torch": "tab:gray",
    "fp32": "tab:blue",
    "bf16": "tab:green",
    "fp16": "tab:olive",
    "int8": "tab:orange",
    "int4": "tab:red",
    "fp8": "tab:purple",
}
STYLES: dict[str, dict[str, Any]] = {
    "rank": {"marker": "o", "linestyle": "-"},
    "budget": {"marker": "*", "linestyle": "--", "markersize": 10},
    "alternating": {"marker": "^", "linestyle": ":"},
    "quantized": {"marker": "s", "linestyle": "none"},
}
LABELS = {"rank": (3, 4), "budget": (4, -11), "alternating": (-12, 4), "quantized": (-6, 8)}
"""Where a label is, in points from its point."""


def width(arm: str) -> str:
    """What an arm's factors or gradients travel in; the method's name where they are not ours."""
    one = Arm.parse(arm, DEFAULT_RANK)
    if one.method != "ours":
        return one.method
    if one.quantize is not None:
        return one.quantize
    default = "fp32" if one.compression is None else PLANNED_WIRE_DTYPE
    return next((mode for mode in one.modes if "wire_dtype" in MODES[mode]), default)


def kind(arm: str) -> str:
    """How an arm's ranks or factors come about, a key of ``STYLES``."""
    one = Arm.parse(arm, DEFAULT_RANK)
    if one.quantize is not None:
        return "quantized"
    return "budget" if one.compression is not None else "alternating" if "alternating" in one.modes else "rank"


def label(arm: str) -> str:
    """Rank, budget or format, as short as it can be; empty for all-reduce."""
    one = Arm.parse(arm, DEFAULT_RANK)
    if one.compression is not None:
        return f"{one.compression:g}×" if isinstance(one.compression, float) else one.compression
    return one.quantize or ("" if one.rank is None else str(one.rank))


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
        for colour, style in itertools.product(COLOURS, STYLES):
            those = [point for point in found if (width(point.arm), kind(point.arm)) == (colour, style)]
            if not those:
                continue
            handles[legend_text(colour, style)] = axes.plot(
                *([getattr(point, field) for point in those] for field in ("bytes_per_step", "loss")),
                **{"color": COLOURS[colour], "markersize": 5, **STYLES[style]},
            )[0]
            for point in those:
                axes.annotate(
                    label(point.arm),
                    (point.bytes_per_step, point.loss),
                    **{"xytext": LABELS[style], "textcoords": "offset points", "fontsize": 8, "color": COLOURS[colour]},
                )
        axes.set(xscale="log", title=name, xlabel="bytes a step and worker")
        axes.set(ylabel=f"validation loss, {MODELS[name].unit}")
        axes.grid(alpha=0.3)
    order = ["Pareto front", *itertools.starmap(legend_text, itertools.product(COLOURS, STYLES))]
    labels = [text for text in order if text in handles]
    figure.legend([handles[text] for text in labels], labels, loc="outside lower center", ncols=6)
    figure.savefig(PICTURE, dpi=120)
    plt.close(figure)


def legend_text(colour: str, style: str) -> str:
    return colour if style == "rank" else f"{colour}, {style}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--model", choices=[*MODELS, "both"], default="both", help="(default: both text and digits)")
    parser.add_argument("--arms", nargs="+", help="as for the demo (default: a list for each model)")
    parser.add_argument("--seeds", nargs="+", type=int, help="(default: 0 to 4 for digits, 0 to 2 for others)")
    parser.add_argument("--steps", type=int, help="(default: 300 for digits, 600 for text)")
    parser.add_argument("--workers", type=int, help="(default: 4 for the mixture, 2 for others)")
    arguments = parser.parse_args()
    names = DRAWN if arguments.model == "both" else [arguments.model]
    steps = {name: arguments.steps or MODELS[name].steps for name in names}
    workers = {name: arguments.workers or MODELS[name].workers for name in names}
    if arguments.command == "run":
        for name in names:
            model = MODELS[name]
            arms, seeds = arguments.arms or model.arms, arguments.seeds or model.seeds
            run(FILE, name, model.train, arms, seeds, steps[name], workers[name])
        return
    panels = {name: found for name in names if (found := points(read(FILE), name, steps[name], workers[name]))}
    for name, found in panels.items():
        print(f"{name}\n\n{table(found, MODELS[name].decimals)}\n")
    print("± after a loss: standard deviation over seeds; after a difference: standard error of its mean over seeds.")
    if arguments.model == "both":
        draw(panels)


if __name__ == "__main__":
    main()
