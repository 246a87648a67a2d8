"""Train with every framework and wrapper and write the table in docs/frameworks.md: ``python -m tests.frameworks``."""

from __future__ import annotations

import importlib.metadata
import os

from tests.support.programs import ROOT

PAGE = ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- frameworks: begin -->\n", "<!-- frameworks: end -->"
HEAD = (
    "| framework | wrapper | full rank, difference | loss at rank 4 (without) | resumed, difference |\n"
    "|---|---|---|---|---|"
)


def main() -> None:
    # Before the workers import torch.
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    from tests.support.frameworks.job import CELLS, FRAMEWORKS, measure

    lines = [HEAD]
    for framework, wrapper in CELLS:
        cell = measure(framework, wrapper)
        losses = f"{cell.start:.2f} → {cell.compressed:.2f} ({cell.native:.2f})"
        lines.append(f"| {framework} | {wrapper} | {cell.full_rank:.0e} | {losses} | {cell.resumed:.0e} |")
        print(lines[-1], flush=True)
    names = ["torch", *FRAMEWORKS.values(), "deepspeed"]
    versions = ", ".join(f"{name} {importlib.metadata.version(name).split('+')[0]}" for name in names)
    lines += ["", f"Made by `python -m tests.frameworks` with {versions}; 2 gloo workers, 4 for HSDP.", ""]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
