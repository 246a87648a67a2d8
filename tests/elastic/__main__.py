"""Kill workers under torchft's Manager, and print the table: ``python -m tests.elastic [--only WORDS] [--write]``."""

import argparse
import os
import sys


def main() -> int:
    """Returns: 0 if nothing was lost or hung, and all workers had equal bits."""
    parser = argparse.ArgumentParser(prog="python -m tests.elastic", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose title has these words")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/guides/torchft.md")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
    from tests.support.elastic import table
    from tests.support.faults.table import replaced

    lines, wrong = [table.HEAD], 0
    print(table.HEAD)
    for title, found in table.results(arguments.only):
        lines.append(table.row(title, found))
        print(lines[-1], flush=True)
        for outcome in found:
            if said := outcome.wrong(table.LOST):
                wrong += 1
                print(outcome, said, sep="\n", file=sys.stderr, flush=True)
    if arguments.write:
        table.PAGE.write_text(replaced(table.PAGE.read_text(encoding="utf-8"), "\n".join(lines)), encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
