"""Loss against bytes: a gradient each step, local steps, and other papers' methods, on one model with the same data.

python benchmarks/versus.py run [--arms local:ternary+every5 diloco:fp4+every10 … --seeds 0 1 2 --workers 4 --steps 600]
python benchmarks/versus.py report [--write]

``run`` trains what is missing, the trainings of versus_plan.py unless the command line names others, and adds it to
benchmarks/results/versus.json. It can be interrupted. Trainings of these arms in loss-per-byte.json are not repeated.
``report`` prints tables, or replaces those of docs/versus.md, and draws the losses against the bytes.
"""

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import loss_per_byte, trainings
from benchmarks.arms import INNER, MESSAGES, Arm, inner, of_demo
from benchmarks.markdown import markdown_table
from benchmarks.trainings import RESULTS, Point
from benchmarks.versus_plan import PLAN, Trainings

FILE, PICTURE = RESULTS / "versus.json", RESULTS / "versus.png"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "versus.md"
BEGIN, END = "<!-- versus: begin -->\n", "<!-- versus: end -->"
BUDGETS = (20, 50, 100, 200, 400)
SLACK = 0.9
"""An arm may send this much less than its budget says: a number of local steps or of entries is a whole number."""
SHOWN_EXCESS = 25.0
"""Percent above all-reduce up to which the picture shows losses."""


def everything() -> list[trainings.Record]:
    """All trainings so far, those of other programs included."""
    return [*trainings.read(FILE), *trainings.read(loss_per_byte.FILE)]


def run(wanted: Sequence[Trainings]) -> None:
    """Train what is missing."""
    others = trainings.read(loss_per_byte.FILE)
    for one in wanted:
        train = loss_per_byte.MODELS[one.model].train
        trainings.run(FILE, one.model, train, one.arms, one.seeds, one.steps, one.workers, others)


NAMES = {
    "allreduce": "all-reduce",
    "torch": "torch's hook",
    "ours": "PowerSGD, each step",
    "local exact": "local steps, exact",
    "local low rank": "local steps, low rank",
    "local codes": "local steps, codes",
    "diloco": "DiLoCo",
    "sparseloco": "SparseLoCo",
    "demo": "DeMo",
    "alone": "nothing sent",
}
OWN = dict.fromkeys(("ours", "local exact", "local low rank", "local codes"), " (this package)")
COLOURS = {
    "allreduce": "black",
    "torch": "tab:gray",
    "ours": "tab:blue",
    "local exact": "tab:cyan",
    "local low rank": "tab:green",
    "local codes": "tab:red",
    "diloco": "tab:orange",
    "sparseloco": "tab:purple",
    "demo": "tab:brown",
}


def family(arm: str) -> str:
    """Return an arm's method, a key of ``NAMES``."""
    gradients = of_demo(arm)
    if gradients is not None:
        return gradients.method
    one = Arm.parse(arm)
    if one.method != "local":
        return one.method
    low_rank = re.fullmatch(r"[\d.]+x?", one.message)
    return f"local {'low rank' if low_rank else 'exact' if one.message == 'exact' else 'codes'}"


def label(arm: str) -> str:
    """Return an arm's message and round, as short as it can be."""
    rate = f" rate × {inner(arm):g}" if inner(arm) != 1 else ""
    if of_demo(arm) is not None:
        return f"{loss_per_byte.label(INNER.sub('', arm))}{rate}".strip()
    one = Arm.parse(arm)
    rounds = f", H = {one.options['every']:g}" if "every" in one.options else ""
    delay = f" late by {one.options['delay']:g}" if one.options.get("delay") else ""
    grows = " growing" if one.options.get("grow") else ""
    keep = f" keep {one.options['keep']:g}" if one.options.get("keep") else ""
    senders = " senders" if one.options.get("senders") else ""
    return f"{one.message}{rounds}{grows}{delay}{keep}{senders}{rate}"


def tuned(point: Point) -> float:
    """Return the loss at seed 0, by which arms are chosen, as rates are tuned there."""
    return point.losses.get(0, math.inf)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All arms of one model, number of workers and number of steps.

    Attributes:
        points: Those that send most first.
        whole: All-reduce in fp32.
    """

    points: Sequence[Point]
    whole: Point

    @classmethod
    def of(cls, model: str, workers: int, steps: int) -> "Comparison | None":
        """Return what is recorded, or None without an all-reduce."""
        recorded = trainings.read(FILE)
        same = {"model": model, "workers": workers, "steps": steps}
        compared = {record["arm"] for record in recorded if same.items() <= record.items()}
        kind = model, workers, steps
        compared |= {arm for one in PLAN if (one.model, one.workers, one.steps) == kind for arm in one.arms}
        found = [point for point in trainings.points(everything(), model, steps, workers) if point.arm in compared]
        whole = next((point for point in found if point.arm == "allreduce"), None)
        return None if whole is None else cls(found, whole)

    def ratio(self, point: Point) -> float:
        """Return how many times fewer bytes than all-reduce's it sends and receives."""
        return self.whole.bytes_per_step / point.bytes_per_step if point.bytes_per_step else math.inf

    def excess(self, point: Point) -> float:
        """Return the percentage by which its loss is above all-reduce's, mean over seeds of both."""
        excess = point.excess(self.whole)
        return sum(excess) / len(excess) if excess else math.inf

    def best(self, method: str, budget: float) -> Point | None:
        """Return a method's best arm with so many times fewer bytes."""
        those = [point for point in self.of_method(method) if self.ratio(point) >= SLACK * budget]
        return min(those, key=tuned, default=None)

    def of_method(self, method: str) -> list[Point]:
        """Return a method's arms that can be compared with others."""
        return [point for point in self.points if family(point.arm) == method and math.isfinite(tuned(point))]

    def budgets(self) -> str:
        """Markdown: each method's best arm with so many times fewer bytes."""
        lines = [["method", *(f"{budget}×" for budget in BUDGETS)], ["---"] * (len(BUDGETS) + 1)]
        for method, name in NAMES.items():
            best = [self.best(method, budget) for budget in BUDGETS]
            if method in ("allreduce", "alone") or not any(best):
                continue
            lines.append([name, *(self._cell(point, budget) for point, budget in zip(best, BUDGETS, strict=True))])
        return markdown_table(lines)

    def _cell(self, point: Point | None, budget: float) -> str:
        if point is None:
            return "–"
        rivals = [self.best(method, budget) for method in NAMES if method != "alone"]
        first = min((one for one in rivals if one is not None), key=self.excess)
        shown = point.above(self.whole)
        return f"{f'**{shown}**' if first is point else shown} ({self.ratio(point):.0f}×, {label(point.arm)})"


def draw(found: Comparison) -> None:
    """Draw losses above all-reduce's against bytes: a line through each method's best arms, the others faint."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    labelled: list[tuple[float, float]] = []
    for method, colour in COLOURS.items():
        those = found.of_method(method)
        if not those:
            continue
        marks: dict[str, Any] = {"color": colour, "markersize": 5, "marker": "o", "linestyle": ""}
        axes.plot(*_places(found, those), **{**marks, "alpha": 0.3})
        curve = trainings.front(those, tuned)
        axes.plot(
            *_places(found, curve),
            **{**marks, "linestyle": "-", "linewidth": 2, "label": NAMES[method] + OWN.get(method, "")},
        )
        for point in curve:
            place = found.ratio(point), found.excess(point)
            # Of points that lie close together, the first has a label.
            near = any(abs(math.log(place[0] / x)) < 0.2 and abs(place[1] - y) < 1 for x, y in labelled)
            if 0 <= place[1] < SHOWN_EXCESS and not near:
                labelled.append(place)
                text: dict[str, Any] = {"xytext": (5, -12), "textcoords": "offset points", "fontsize": 9}
                axes.annotate(label(point.arm).split(", ")[-1], place, **text, color=colour)
    for point in found.points:
        if not point.bytes_per_step and math.isfinite(found.excess(point)):
            axes.axhline(found.excess(point), color="black", linestyle=":", linewidth=1, label=NAMES["alone"])
    axes.set(xscale="log", ylim=(-1, SHOWN_EXCESS))
    ticks = [1, 2, 5, 10, 20, 50, 100, 200, 400, 1000]
    axes.set_xticks(ticks, [f"{tick}×" for tick in ticks])
    axes.tick_params(labelsize=11)
    axes.set_xlabel("times fewer bytes than all-reduce in fp32, sent and received", fontsize=12)
    axes.set_ylabel("validation loss above all-reduce's, %", fontsize=12)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=11, loc="upper left", title="H: local steps between two exchanges", alignment="left")
    figure.savefig(PICTURE, dpi=120)
    plt.close(figure)


def _places(found: Comparison, those: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [found.ratio(point) for point in those], [found.excess(point) for point in those]


def report() -> str:
    """Return the tables of all trainings, and draw those of the text model with two workers."""
    kinds = {(record["model"], record["workers"], record["steps"]) for record in trainings.read(FILE)}
    parts = []
    # The text model first, few workers first.
    for model, workers, steps in sorted(kinds, key=lambda kind: (kind[0] != "text", *kind)):
        found = Comparison.of(model, workers, steps)
        if found is None:
            continue
        if (model, workers, steps) == ("text", 2, 600):
            draw(found)
        title = f"### {model.capitalize()}, {workers} workers, {steps:,} steps"
        best = trainings.front([point for point in found.points if math.isfinite(tuned(point))], tuned)
        table = trainings.table(found.points, loss_per_byte.MODELS[model].decimals, best)
        parts += [title, found.budgets(), "All arms:", table]
    return "\n\n".join(parts) + "\n"


def replaced(page: str, tables: str) -> str:
    """Return a page with other tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"expected {BEGIN.strip()} and then {END} in the page; they are missing")
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--model", choices=list(loss_per_byte.MODELS), default="text")
    parser.add_argument("--arms", nargs="+", help=f"as of the demo, or {', '.join(MESSAGES)} (default: PLAN)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="with --arms (default: 0)")
    parser.add_argument("--steps", type=int, default=600, help="with --arms (default: 600)")
    parser.add_argument("--workers", type=int, default=2, help="with --arms (default: 2)")
    parser.add_argument("--write", action="store_true", help="with report, replace the tables in docs/versus.md")
    given = parser.parse_args()
    if given.command == "report":
        tables = report()
        print(tables)
        if given.write:
            PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    elif given.arms:
        run([Trainings(given.model, given.workers, given.steps, given.seeds, given.arms)])
    else:
        run(PLAN)


if __name__ == "__main__":
    main()
