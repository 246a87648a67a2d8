"""Inject faults and print the table: ``python -m tests.faults [--times N] [--write]``."""

import argparse
import itertools
import os
import sys


def main() -> int:
    """Returns: 0 if nothing was lost, hung or poisoned."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--times", type=int, default=50, help="injections of each fault (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/faults.md")
    arguments = parser.parse_args()
    if arguments.times < 1:
        parser.error(f"--times must be positive; got {arguments.times}")
    # Before torch is imported, here and in the workers; DDP has much to say about parameters that are used.
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    from tests.support.faults import table

    found = table.inject(
        arguments.times, rarely=max(2, arguments.times // 10), timeout=1500 + 12 * len(table.FAULTS) * arguments.times
    )
    text = table.markdown(found, f"python -m tests.faults --times {arguments.times}")
    print(text)
    for title, injections in found.items():
        for said in itertools.chain.from_iterable(injections):
            print(f"{title}: {said}", file=sys.stderr)
    if arguments.write:
        table.PAGE.write_text(table.replaced(table.PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    return int(any(map(any, found.values())))


if __name__ == "__main__":
    sys.exit(main())
