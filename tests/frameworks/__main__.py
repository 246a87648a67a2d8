"""Train with every framework and wrapper and print the table: ``python -m tests.frameworks [--write]``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())


def main() -> int:
    """Returns: 0 if every cell is as it has to be."""
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks", description=__doc__)
    parser.add_argument("--framework", help="only the frameworks whose name contains this")
    parser.add_argument("--wrapper", help="only the wrappers whose name contains this")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/frameworks.md")
    arguments = parser.parse_args()
    if arguments.write and (arguments.framework or arguments.wrapper):
        parser.error("--write needs all frameworks and wrappers")
    # Before torch is imported, here and in the workers.
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    from tests.support.frameworks import job, table

    cells: dict[tuple[str, str], table.Cell] = {}
    failed = False
    for framework in table.FRAMEWORKS:
        for wrapper in job.WRAPPERS:
            wanted = ((arguments.framework, framework), (arguments.wrapper, wrapper))
            if any(part is not None and part.lower() not in name.lower() for part, name in wanted):
                continue
            try:
                cell = table.measure(framework, wrapper)
            except (RuntimeError, TimeoutError) as error:
                print(f"{framework}, {wrapper}: {error}", file=sys.stderr)
                failed = True
                continue
            cells[framework, wrapper] = cell
            print(f"{framework}, {wrapper}: {cell.text()}", file=sys.stderr, flush=True)
            for problem in cell.problems():
                print(f"{framework}, {wrapper}: {problem}", file=sys.stderr)
                failed = True
    text = table.markdown(cells, "python -m tests.frameworks")
    print(text)
    if arguments.write and not failed:
        page = ROOT / table.PAGE
        page.write_text(table.replaced(page.read_text(encoding="utf-8"), text), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
