"""Loss against bytes for models of several widths: how far wider models can be compressed.

python benchmarks/loss_against_size.py run [--widths 64 128 …] [--seeds 0 1 2] [--arms ours:20x …]
python benchmarks/loss_against_size.py report

``run`` trains the demo's text model at several widths, and adds what is missing to
benchmarks/results/loss-per-byte.json. It can be interrupted. ``report`` prints a table, the compression at which the
loss is 1%, 2% and 5% above that of an all-reduce, and draws both.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import loss_per_byte, trainings
from benchmarks.markdown import markdown_table

STEPS, WORKERS = 300, 2
WIDTHS: dict[int, Sequence[str]] = {
    64: ("allreduce", *(f"ours:{compression}x" for compression in (10, 20, 40))),
    128: ("allreduce", *(f"ours:{compression}x" for compression in (10, 20, 40, 80))),
    256: ("allreduce", *(f"ours:{compression}x" for compression in (10, 20, 40, 80, 160))),
    448: ("allreduce", "ours:4", *(f"ours:{compression}x" for compression in (40, 80, 160, 320))),
}
"""{width: arms}. Tensors that are averaged exactly limit the compression."""
SEEDS = {64: (0, 1, 2), 128: (0, 1, 2)}
LEVELS = (1.0, 2.0, 5.0)
"""Percent above all-reduce's loss."""
EXTRAPOLATED = (768, 2048, 4096)
"""Widths of GPT-2, and of models of about 1 B and 7 B parameters."""
PICTURE = trainings.RESULTS / "loss-against-size.png"


def name(width: int) -> str:
    """Return the model's name in the records."""
    return f"text, width {width}"


@dataclasses.dataclass(frozen=True)
class Size:
    """What is known of one width.

    Attributes:
        width, parameters: Of the model.
        excess: {compression, as measured: loss above all-reduce's in percent, mean over seeds}, by rising compression.
        errors: {compression: standard error of that mean}. Empty for one seed.
        seeds: Number of seeds.
    """

    width: int
    parameters: int
    excess: Mapping[float, float]
    errors: Mapping[float, float]
    seeds: int

    @classmethod
    def of(cls, width: int) -> "Size | None":
        """Return it for a width, or None if nothing is recorded that can be compared."""
        points = {
            point.arm: point
            for point in trainings.points(trainings.read(loss_per_byte.FILE), name(width), STEPS, WORKERS)
        }
        whole = points.get("allreduce")
        if whole is None:
            return None
        excess, errors, seeds = {}, {}, 0
        for point in points.values():
            above = point.excess(whole)
            if point is whole or loss_per_byte.kind(point.arm) != "budget" or not above:
                continue
            compression, seeds = whole.bytes_per_step / point.bytes_per_step, max(seeds, len(above))
            excess[compression] = statistics.fmean(above)
            if len(above) > 1:
                errors[compression] = statistics.stdev(above) / len(above) ** 0.5
        return cls(width, round(whole.bytes_per_step / 4), dict(sorted(excess.items())), errors, seeds)

    def compression_at(self, percent: float) -> float | None:
        """Return the compression at which the loss is that much above, or None if it is not between two that ran.

        Between two, the excess is linear in the logarithm of the compression.
        """
        for (low, before), (high, after) in itertools.pairwise(self.excess.items()):
            if before <= percent <= after:
                share = (percent - before) / (after - before) if after > before else 0.0
                return float(low * (high / low) ** share)
        return None


def growth(sizes: Sequence[Size], percent: float) -> tuple[float, float] | None:
    """Return (c, p) of compression = c · width^p, by least squares of logarithms. None with fewer than two sizes."""
    found = [(size.width, at) for size in sizes if (at := size.compression_at(percent)) is not None]
    if len(found) < 2:
        return None
    power, constant = statistics.linear_regression(
        *([math.log(value) for value in row] for row in zip(*found, strict=True))
    )
    return math.exp(constant), power


def table(sizes: Sequence[Size]) -> str:
    """Markdown: losses above all-reduce's, and the compressions at ``LEVELS``."""
    lines = [
        ["width", "parameters", "loss above all-reduce at a compression", *(f"{level:g}%" for level in LEVELS), "seeds"]
    ]
    lines.append(["--:", "--:", "---", *["--:"] * (len(LEVELS) + 1)])
    for size in sizes:
        cells = [
            f"{compression:.0f}×: {above:+.1f}"
            + (f" ± {size.errors[compression]:.1f}%" if compression in size.errors else "%")
            for compression, above in size.excess.items()
        ]
        found = [size.compression_at(level) for level in LEVELS]
        levels = ["" if at is None else f"{at:.0f}×" for at in found]
        lines.append([str(size.width), f"{size.parameters:,}", ", ".join(cells), *levels, str(size.seeds)])
    for width in EXTRAPOLATED:
        fits = [growth(sizes, level) for level in LEVELS]
        levels = ["" if fit is None else f"({fit[0] * width ** fit[1]:.0f}×)" for fit in fits]
        lines.append([str(width), "", "extrapolated", *levels, ""])
    return markdown_table(lines)


def draw(sizes: Sequence[Size]) -> None:
    """Plot the excess against the compression for each width, and the compressions at ``LEVELS`` against the width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for size in sizes:
        errors = [size.errors.get(compression, 0.0) for compression in size.excess]
        left.errorbar(*zip(*size.excess.items(), strict=True), yerr=errors, marker="o", label=f"width {size.width}")
    left.set(xscale="log", xlabel="compression", ylabel="validation loss above all-reduce, %")
    left.legend()
    for level, colour in zip(LEVELS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        found = [(size.width, at) for size in sizes if (at := size.compression_at(level)) is not None]
        right.plot(*zip(*found, strict=True), "o-", color=colour, label=f"{level:g}% above")
        fit = growth(sizes, level)
        if fit is not None:
            widths = [found[-1][0], max(EXTRAPOLATED)]
            right.plot(widths, [fit[0] * width ** fit[1] for width in widths], ":", color=colour)
    right.set(xscale="log", yscale="log", xlabel="width (dotted: extrapolated)", ylabel="compression")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--arms", nargs="+", help="as for the demo (default: a list for each width)")
    parser.add_argument("--seeds", nargs="+", type=int, help="(default: 0 to 2 for widths 64 and 128, else 0)")
    arguments = parser.parse_args()
    if arguments.command == "run":
        for width in arguments.widths:
            train = functools.partial(trainings.train_text, width=width)
            arms, seeds = arguments.arms or WIDTHS[width], arguments.seeds or SEEDS.get(width, (0,))
            trainings.run(loss_per_byte.FILE, name(width), train, arms, seeds, STEPS, WORKERS)
        return
    sizes = [size for width in arguments.widths if (size := Size.of(width)) is not None and size.excess]
    print(table(sizes))
    for level in LEVELS:
        if fit := growth(sizes, level):
            print(f"\n{level:g}% above all-reduce: compression = {fit[0]:.3g} · width^{fit[1]:.2f}")
    draw(sizes)


if __name__ == "__main__":
    main()
