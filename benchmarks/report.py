"""Tables and a plot from the GPU benchmarks' results.

python3 benchmarks/report.py NAME     makes benchmarks/results/NAME.md and NAME.png anew from NAME.json
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.results_file import RESULTS, Results, Row
from benchmarks.shapes import ONE_BUCKET
from benchmarks.targets import find, milliseconds, ratio, targets, torch_milliseconds

ORTHOGONALIZATION = "orthogonalization"
PARTS = ("compensate_project", "pack", ORTHOGONALIZATION, "backproject", "explore", "commit", "reconstruct")
"""Parts of a bucket's step. What is no other part's kernel belongs to the orthogonalization."""

PREDICTIONS = Path(__file__).resolve().parent / "results" / "kernel-counts.json"
PROVIDERS = ("ours", "reference", "torch", "torch batched", "copy")


def tables(machine: Row, rows: Sequence[Row]) -> str:
    """All tables, in Markdown."""
    parts = [_machine(machine), "## Targets", _targets(rows)]
    for title, text, table in (
        ("Hook step", STEP_NOTE, _steps(rows)),
        ("Launches of one hook step", LAUNCHES_NOTE, _launches(rows)),
        ("Options", OPTIONS_NOTE, _options(rows)),
        ("Messages and kernels", OVERLAP_NOTE, _overlaps(rows)),
        ("One bucket", BUCKET_NOTE, _bucket(rows)),
        ("Kernels", KERNEL_NOTE, _kernels(rows)),
        ("Orthogonalization", ORTHOGONALIZE_NOTE, _orthogonalizations(rows)),
    ):
        if table:
            parts += [f"## {title}", text, table]
    return "\n\n".join(parts)


STEP_NOTE = """All gradients in one bucket, one worker, so nothing is sent: torch's hook still calls its collectives.
Milliseconds of device events around the call (median and interquartile range), of a CUDA graph's replay where it can be
captured, and of the host's clock from an idle device to an idle device. GB/s count the fewest bytes a step must move
(five passes over the gradients' elements: G, E twice, E written, Ĝ), whoever takes it, and are held against the copy
bandwidth. Memory is what the provider keeps, and its peak, in gradients' bytes. Distance is that to the reference after
one step."""

LAUNCHES_NOTE = """Kernels, copies and fills on the device by the profiler, and how often the host waited for it.
Busy is the share of the time from the first to the last in which something ran."""

OPTIONS_NOTE = """Hook steps as above, all gradients in one bucket. Copies: times the milliseconds of a plain copy."""

OVERLAP_NOTE = """A step of all of DDP's buckets. Each bucket's backward pass and each message are kernels that only
wait, for the given milliseconds. At least: the time of the backward pass and the last bucket's messages, or of all
messages."""

BUCKET_NOTE = """One of DDP's buckets, kernel by kernel: microseconds as measured, and as predicted from compiled code
before any measurement, for two versions of the kernels (`benchmarks/kernel_report.py --bucket`). Predictions are for an
H100, with the tiles of that time."""

KERNEL_NOTE = """Milliseconds of the kernel's launches replayed as a CUDA graph (of device events where there is none),
L2 overwritten before. GB/s count each input read once and each output written once. Beside kernels of differences
stands a plain copy of as many bytes."""

ORTHOGONALIZE_NOTE = "Random factors. Skew is max |P̂ᵀP̂ − I|."


def write_report(results: Results) -> list[Path]:
    """Write JSON, tables and plot beside each other; gives the files."""
    results.write()
    written: list[Path] = []
    for stem in results.stems:
        written.append(stem.with_name(f"{stem.name}.json"))
        written.append(stem.with_name(f"{stem.name}.md"))
        written[-1].write_text(f"# {stem.name}\n\n{tables(results.machine, results.rows)}\n")
        picture = stem.with_name(f"{stem.name}.png")
        if _plot(results.rows, picture):
            written.append(picture)
    return written


def _machine(machine: Row) -> str:
    def value(key: str) -> Any:
        return machine.get(key, "unknown")

    lines = [
        f"{value('gpu')}, driver {value('driver')}, CUDA {value('cuda')}, torch {value('torch')}, triton "
        f"{value('triton')}, Python {value('python')}, {value('cpu')}; commit {value('commit')}.",
        f"Copy bandwidth {machine.get('copy_gbps', 0):.0f} GB/s. Process group: {value('group')}. Correctness tests on "
        f"this device: {value('tests')}.",
    ]
    if machine.get("dry"):
        lines.append("**A dry run: these times mean nothing.**")
    if machine.get("group") == "gloo" and machine.get("gpu") != "none":
        lines.append("**torch's hook sends its factors through the host here (gloo).**")
    return "\n".join(lines)


def _targets(rows: Sequence[Row]) -> str:
    return _markdown(
        ["target", "on", "measured", "verdict"],
        [[target.goal, target.what, target.shown, target.verdict] for target in targets(rows)],
    )


def _steps(rows: Sequence[Row]) -> str:
    lines = []
    for row in sorted(find(rows, "step"), key=_order):
        labels = {key: row[key] for key in ("gradients", "rank", "dtype")}
        replayed = find(rows, "replay", provider=row["provider"], **labels)
        copied = milliseconds(rows, "step", gradients=row["gradients"], dtype=row["dtype"], provider="copy")
        fastest = torch_milliseconds(rows, **labels)
        lines.append(
            [
                row["gradients"],
                row["rank"] or "",
                row["dtype"],
                row["provider"],
                _number(row["device_ms"]),
                _number(row["device_iqr_ms"]),
                _number(replayed[0]["replay_ms"] if replayed else None),
                _number(row["host_ms"]),
                _number(ratio(fastest, row["device_ms"]), "×"),
                _number(ratio(row["device_ms"], copied)),
                _number(row["gbps"]),
                f"{row['share_of_copy']:.0%}",
                _number(row.get("persistent")),
                _number(row.get("peak")),
                f"{row['difference']:.1e}" if "difference" in row else "",
            ]
        )
    header = ["gradients", "rank", "dtype", "provider", "ms", "IQR", "replay ms", "host ms", "vs torch", "copies"]
    return _markdown([*header, "GB/s", "of copy", "kept", "peak", "distance"], lines)


def _launches(rows: Sequence[Row]) -> str:
    lines = [
        [
            *(row["gradients"], row["rank"], row["provider"], row["launches"] or "not seen", row["waits"]),
            row["synchronizes"] or "no",
            _number(ratio(row["busy_us"], row["span_us"] or None)),
            _number(row["span_us"] / 1e3),
        ]
        for row in sorted(find(rows, "launches"), key=_order)
    ]
    header = ["gradients", "rank", "provider", "launches", "waits of the host", "torch's sync check raises"]
    return _markdown([*header, "busy", "ms"], lines)


def _options(rows: Sequence[Row]) -> str:
    lines = [
        [
            *(row["gradients"], row["dtype"], row["provider"], row["synchronizes"] or "no"),
            *(_number(row[key]) for key in ("device_ms", "device_iqr_ms", "host_ms")),
            _number(ratio(1.0, row["share_of_copy"])),
        ]
        for row in find(rows, "option")
    ]
    header = ["gradients", "dtype", "option", "torch's sync check raises", "ms", "IQR", "host ms", "copies"]
    return _markdown(header, lines)


def _overlaps(rows: Sequence[Row]) -> str:
    keys = ("gradients", "buckets", "rank", "backward_ms", "message_ms", "provider")
    lines = [
        [*(row[key] for key in keys), *(_number(row[key]) for key in ("device_ms", "device_iqr_ms", "least_ms"))]
        for row in find(rows, "overlap")
    ]
    header = ["gradients", "buckets", "rank", "backward", "message", "buckets are", "device ms", "IQR", "at least"]
    return _markdown(header, lines)


def _kernels(rows: Sequence[Row]) -> str:
    lines = []
    for row in sorted(find(rows, "kernel", provider="triton"), key=_order):
        labels = {key: row[key] for key in ("gradients", "rank", "dtype", "phase")}
        best = _best(row)
        others = [
            milliseconds(rows, "kernel", provider=provider, **labels) for provider in ("reference", "compiled", "copy")
        ]
        lines.append(
            [
                *(row["gradients"], row["rank"], row["dtype"], row["phase"], row["launches"]),
                *(_number(best), _number(row["device_ms"]), _number(row["gbps"]), f"{row['share_of_copy']:.0%}"),
                *(_number(other) for other in others),
                _number(ratio(others[0], best), "×"),
            ]
        )
    header = ["gradients", "rank", "dtype", "kernel", "launches", "ms", "eager ms", "GB/s", "of copy", "reference ms"]
    return _markdown([*header, "compiled ms", "copy ms", "vs reference"], lines)


def _bucket(rows: Sequence[Row]) -> str:
    found = [row for row in find(rows, "kernel", provider="triton") if row["gradients"] in ONE_BUCKET]
    if not found:
        return ""
    predicted, lines = json.loads(PREDICTIONS.read_text()), []
    for rank in sorted({row["rank"] for row in found}):
        before, after = (dict.fromkeys(PARTS, 0.0) for _ in range(2))
        for version, microseconds in (("before", before), ("after", after)):
            for row in predicted[version]:
                if (row["architecture"], row["rank"]) == ("sm_90", rank):
                    microseconds[_part(row["kernel"])] += row["us"]
        measured = dict.fromkeys(PARTS, 0.0)
        for row in found:
            if row["rank"] == rank:
                measured[_part(row["phase"].split()[0])] += 1e3 * _best(row)
        for part in (*PARTS, "step"):
            values = [sum(x.values()) if part == "step" else x[part] for x in (before, after, measured)]
            lines.append([rank, part, *map(_number, values), _number(ratio(values[2], values[1] or None), "×")])
    return _markdown(["rank", "kernel", "predicted before", "predicted", "measured", "of predicted"], lines)


def _part(kernel: str) -> str:
    """The part of a step to which a kernel, or a phase, belongs."""
    name = kernel.split(",")[0]
    return name if name in PARTS else ORTHOGONALIZATION


def _orthogonalizations(rows: Sequence[Row]) -> str:
    lines = []
    for row in sorted(find(rows, "orthogonalize"), key=_order):
        labels = {key: row[key] for key in ("gradients", "rank", "dtype")}
        qr = milliseconds(rows, "orthogonalize", provider="torch.linalg.qr", **labels)
        lines.append(
            [
                *(row["gradients"], row["rank"], row["provider"], _number(row["device_ms"])),
                *(_number(row.get("replay_ms")), _number(row["host_ms"]), _number(ratio(qr, row["device_ms"]), "×")),
                f"{row['skew']:.1e}",
            ]
        )
    return _markdown(["factors", "rank", "provider", "ms", "replay ms", "host ms", "vs qr", "skew"], lines)


def _best(row: Row) -> float:
    """Device time without the host's share, where a graph told it."""
    replayed = row.get("replay_ms")
    return float(row["device_ms"] if replayed is None else replayed)


def _order(row: Row) -> tuple[Any, ...]:
    provider = PROVIDERS.index(row["provider"]) if row["provider"] in PROVIDERS else len(PROVIDERS)
    return row["gradients"], row["dtype"] != "fp32", row["rank"], provider


def _number(value: float | None, unit: str = "") -> str:
    """Three significant digits."""
    if value is None:
        return "–"
    if value == 0:
        return f"0{unit}"
    return f"{value:.0f}{unit}" if abs(value) >= 100 else f"{value:.3g}{unit}"


def _markdown(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A table; empty without lines."""
    cells = [[str(cell) for cell in line] for line in lines]
    if not cells:
        return ""
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    rows = [list(header), ["-" * width for width in widths], *cells]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows
    )


def _plot(rows: Sequence[Row], path: Path) -> bool:
    """Step time over rank for each gradient set, in fp32. False without matplotlib or anything to show."""
    steps = find(rows, "step", dtype="fp32")
    sets = list(dict.fromkeys(row["gradients"] for row in steps))
    if not sets:
        return False
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(sets), figsize=(4 * len(sets), 3.6), squeeze=False)
    for axis, gradients in zip(axes[0], sets, strict=True):
        for provider in PROVIDERS:
            points = sorted((row["rank"], row["device_ms"]) for row in find(steps, "step", gradients=gradients,
                                                                         provider=provider))  # fmt: skip
            if points and provider == "copy":
                axis.axhline(points[0][1], color="grey", linestyle=":", label="copy of the gradients")
            elif points:
                axis.plot(*zip(*points, strict=True), marker="o", label=provider)
        axis.set(title=gradients, xlabel="rank", xscale="log", yscale="log")
        ranks = sorted({row["rank"] for row in find(steps, "step", gradients=gradients) if row["rank"]})
        axis.set_xticks(ranks, [str(rank) for rank in ranks])
        axis.minorticks_off()
    axes[0][0].set_ylabel("ms a hook step")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    results = Results(sys.argv[1], dry=False)
    saved = json.loads((RESULTS / f"{sys.argv[1]}.json").read_text())
    results.machine, results.rows = saved["machine"], saved["rows"]
    for path in write_report(results):
        print(path)


if __name__ == "__main__":
    main()
