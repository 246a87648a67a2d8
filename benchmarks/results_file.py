"""The benchmarks' results: rows of plain values, written to JSON; those of a GPU as they come."""

import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]

KIND = ("cpu", "capability", "caches", "threads")
"""What makes two machines the same kind of CPU."""


def record(path: Path, machine: Row, rows: list[Row]) -> Path:
    """Write a run to a file that keeps the last run of each kind of CPU."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    others = [run for run in runs if any(run["machine"].get(key) != machine[key] for key in KIND)]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"runs": [*others, {"machine": machine, "rows": rows}]}, indent=1) + "\n")
    return path


class Results:
    """Rows of one run, and the files they are written to.

    Args:
        name: of the files, without suffix; None to write nothing.
        dry: leave ``benchmarks/results`` alone.
    """

    def __init__(self, name: str | None, dry: bool) -> None:
        self.machine: dict[str, Any] = {}
        self.rows: list[Row] = []
        folders = ([] if dry else [RESULTS]) + ([Path(os.environ["OUT"])] if os.environ.get("OUT") else [])
        self.stems = [folder / name for folder in folders] if name else []

    def add(self, row: Row) -> None:
        """Keep a row, also on disk: a run may be cut off."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        text = json.dumps({"machine": self.machine, "rows": self.rows}, indent=1) + "\n"
        for stem in self.stems:
            stem.parent.mkdir(parents=True, exist_ok=True)
            stem.with_name(f"{stem.name}.json").write_text(text)
