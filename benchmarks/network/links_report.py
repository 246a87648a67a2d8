"""Tables and a figure of links.py: steps, the rates above which all-reduce is faster, and losses against seconds."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown_table
from benchmarks.network.turns import Row

TARGET = 1.02
"""Loss to reach, as a multiple of the final one of all-reduce in fp32."""
# An unlimited link is drawn this many times as fast as the fastest limited one.
_UNLIMITED = 10


@dataclasses.dataclass(frozen=True)
class Panel:
    """What is known of one model.

    Attributes:
        rows: Its rows.
        curves: {arm: training losses at equal distances}.
    """

    rows: Sequence[Row]
    curves: Mapping[str, Sequence[float]]

    def medians(self, arm: str) -> dict[float | None, float]:
        """Return {rate: median of a step's seconds} of an arm."""
        return {row.megabits_per_second: row.seconds[1] for row in self.rows if row.arm == arm}


def crossover(ours: Mapping[float | None, float], base: Mapping[float | None, float]) -> float:
    """Return the rate above which the base is as fast as ours, from {rate: seconds} of both.

    Between two rates, the logarithm of the ratio is linear in the logarithm of the rate. The result is 0 if the base is
    as fast at the lowest rate, and infinite if it is not at the highest. An unlimited link has no rate and is left out.

    Raises:
        ValueError: The two have no rate in common.
    """
    rates = sorted(rate for rate in ours.keys() & base.keys() if rate is not None)
    if not rates:
        raise ValueError(f"expected times at the same rates; got rates {[*ours]} and {[*base]}")
    advantages = [math.log(base[rate] / ours[rate]) for rate in rates]
    if advantages[0] <= 0:
        return 0.0
    for (low, before), (high, after) in itertools.pairwise(zip(rates, advantages, strict=True)):
        if after <= 0:
            return low * math.exp(math.log(high / low) * before / (before - after))
    return math.inf


def steps_to(curve: Sequence[float], target: float, interval: int) -> float | None:
    """Return the number of steps until a curve is at or below a loss for the first time. None if it never is.

    Args:
        curve: Means of the losses of ``interval`` steps each. A mean counts at the end of its steps.
        target: Loss to reach.
        interval: Steps between two points, between which the loss is linear.
    """
    for index, loss in enumerate(curve):
        if loss <= target:
            before = curve[index - 1] if index else loss
            part = (before - target) / (before - loss) if before > loss else 1.0
            return interval * (index + part)
    return None


def steps_table(panel: Panel, alone: str, rates: Sequence[float]) -> str:
    """Markdown: for each arm, milliseconds of a step at each rate, those above an arm, and kB in each direction.

    Args:
        panel: One model.
        alone: Arm without communication.
        rates: Rates, Mbit/s. Bytes are those at the first one measured.
    """
    by_rate = {rate: {row.arm: row for row in panel.rows if row.megabits_per_second == rate} for rate in rates}
    by_rate = {rate: rows for rate, rows in by_rate.items() if alone in rows}
    lines = [["arm", *(cell for rate in by_rate for cell in (f"ms at {rate_text(rate)}", "above no communication"))]]
    lines[0] += ["kB sent", "kB received"]
    lines.append(["---", *["--:"] * (len(lines[0]) - 1)])
    for arm, first in next(iter(by_rate.values()), {}).items():
        cells = [arm]
        for rows in by_rate.values():
            if arm not in rows:
                cells += ["", ""]
                continue
            lower, median, upper = (1e3 * value for value in rows[arm].seconds)
            above = median - 1e3 * rows[alone].seconds[1]
            cells += [f"{median:,.0f} ({lower:,.0f}–{upper:,.0f})", "" if arm == alone else f"{above:,.0f}"]
        # Both hosts send and receive nearly the same.
        cells += [f"{sum(sizes) / len(sizes) / 1e3:,.1f}" for sizes in (first.sent, first.received)]
        lines.append(cells)
    return markdown_table(lines)


def losses_table(panel: Panel, base: str, interval: int, rates: Sequence[float]) -> str:
    """Markdown: for each arm, final loss, steps to ``TARGET`` times the base's, and seconds of them at each rate.

    Args:
        panel: One model.
        base: Arm whose final training loss is the measure.
        interval: Steps between two points of a curve.
        rates: Rates, Mbit/s.
    """
    final = panel.curves[base][-1]
    seconds = [f"seconds at {rate_text(rate)}" for rate in rates]
    lines = [["arm", "final loss", f"above {base}", f"steps to {100 * (TARGET - 1):g}% above it", *seconds]]
    lines.append(["---", *["--:"] * (len(lines[0]) - 1)])
    for arm, curve in panel.curves.items():
        steps = steps_to(curve, TARGET * final, interval)
        medians = panel.medians(arm)
        above = "" if arm == base else f"{100 * (curve[-1] / final - 1):+.1f}%"
        times = ["" if steps is None or rate not in medians else f"{steps * medians[rate]:,.1f}" for rate in rates]
        lines.append([arm, f"{curve[-1]:.3f}", above, "never" if steps is None else f"{steps:.0f}", *times])
    return markdown_table(lines)


def crossovers_table(panels: Mapping[str, Panel], ours: str, bases: Sequence[str]) -> str:
    """Markdown: for each model, the rate above which each of some arms is as fast as another one.

    Args:
        panels: {model: what is known of it}.
        ours: Arm that compresses.
        bases: Arms that do not.
    """
    lines = [["parameters", *(f"{base} is as fast as {ours} above" for base in bases)]]
    lines.append(["---", *["--:"] * len(bases)])
    for model, panel in panels.items():
        cells = []
        for base in bases:
            found = _crossover(panel, ours, base)
            rates = [rate for rate in panel.medians(ours) if rate is not None]
            if found is None:
                cells.append("")
            elif found == 0:
                cells.append(f"below {rate_text(min(rates))}")
            else:
                cells.append(f"beyond {rate_text(max(rates))}" if found == math.inf else f"{found:,.0f} Mbit/s")
        lines.append([model, *cells])
    return markdown_table(lines)


def predictions_table(rows: Sequence[Row]) -> str:
    """Markdown: for each model and rate, the errors of the predicted times of a step, in percent of the measured one.

    The last row has the median and the largest over all arms, models and rates.
    """
    lines = [["parameters", "link", "median error", "largest error", "of"], ["---", "---", "--:", "--:", "---"]]
    errors = [
        (100 * abs(row.predicted / row.seconds[1] - 1), row.arm, row) for row in rows if row.predicted is not None
    ]
    for model, rate in dict.fromkeys((row.model, row.megabits_per_second) for _, _, row in errors):
        own = [(e, arm) for e, arm, row in errors if (row.model, row.megabits_per_second) == (model, rate)]
        worst, arm = max(own)
        lines.append([model, rate_text(rate), f"{statistics.median(e for e, _ in own):.0f}%", f"{worst:.0f}%", arm])
    if errors:
        worst, arm, _ = max(errors, key=lambda one: one[0])
        lines.append(["all", "", f"{statistics.median(e for e, _, _ in errors):.0f}%", f"{worst:.0f}%", arm])
    return markdown_table(lines)


def _crossover(panel: Panel, ours: str, base: str) -> float | None:
    times, others = panel.medians(ours), panel.medians(base)
    return crossover(times, others) if times.keys() & others.keys() - {None} else None


def draw(
    panels: Mapping[str, Panel],
    arms: Sequence[str],
    ours: str,
    bases: Sequence[str],
    rates: Sequence[float],
    interval: int,
    picture: Path,
) -> None:
    """Draw, for each model, step times against the rate, and below them training losses against seconds at some rates.

    Args:
        panels: {model: what is known of it}.
        arms: Arms of the step times.
        ours, bases: Arms whose crossovers are dotted lines.
        rates: Rates of the losses, Mbit/s.
        interval: Steps between two points of a curve.
        picture: File to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    height = 1 + len(rates)
    figure, grid = plt.subplots(
        height, len(panels), figsize=(4.5 * len(panels), 3.8 * height), layout="constrained", squeeze=False
    )
    every = dict.fromkeys([*arms, *(arm for panel in panels.values() for arm in panel.curves)])
    colours = {arm: f"C{index}" for index, arm in enumerate(every)}
    handles: dict[str, Any] = {}
    for (model, panel), column in zip(panels.items(), grid.T, strict=True):
        fastest = max((row.megabits_per_second or 0.0 for row in panel.rows), default=0.0) or 1.0
        axes = column[0]
        for arm in arms:
            times = {rate or _UNLIMITED * fastest: seconds for rate, seconds in panel.medians(arm).items()}
            points = sorted(times.items())
            handles[arm] = axes.plot(*zip(*points, strict=True), "o-", color=colours[arm])[0] if points else None
        for base in bases:
            found = _crossover(panel, ours, base)
            if found is not None and 0 < found < math.inf:
                axes.axvline(found, color=colours[base], linestyle=":")
        axes.set(xscale="log", yscale="log", title=f"{model} parameters", ylabel="seconds of a step")
        axes.set(xlabel=f"Mbit/s (last point: no limit, drawn at {_UNLIMITED * fastest:,.0f})")
        axes.grid(alpha=0.3, which="both")
        for rate, axes in zip(rates, column[1:], strict=True):
            for arm, curve in panel.curves.items():
                if (median := panel.medians(arm).get(rate)) is not None:
                    seconds = [interval * median * (index + 1) for index in range(len(curve))]
                    handles[arm] = axes.plot(seconds, curve, color=colours[arm])[0]
            axes.set(xscale="log", title=f"{model}, {rate_text(rate)}", xlabel="seconds", ylabel="training loss")
            axes.grid(alpha=0.3)
    shown = {arm: handles[arm] for arm in every if handles.get(arm) is not None}
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=3)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def rate_text(rate: float | None) -> str:
    """Return a rate in words."""
    if rate is None:
        return "no limit"
    return f"{rate / 1e3:g} Gbit/s" if rate >= 1e3 else f"{rate:g} Mbit/s"
