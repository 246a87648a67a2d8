"""Loss against bytes for models of several widths: how far wider models can be compressed.

python benchmarks/loss_against_size.py run [--widths 64 128 …] [--seeds 0 1 2] [--arms ours:20x …]
python benchmarks/loss_against_size.py report

``run`` trains the demo's text model at several widths, and adds what is missing to
benchmarks/results/loss-per-byte.json. It can be interrupted. ``report`` prints a table, the compression at which the
loss is 1%, 2% and 5% above that of an all-reduce, and draws both.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import loss_per_byte

STEPS, WORKERS = 300, 2
WIDTHS: dict[int, Sequence[str]] = {
    64: ("allreduce", *(f"ours:{compression}x" for compression in (10, 20, 40))),
    128: ("allreduce", *(f"ours:{compression}x" for compression in (10, 20, 40, 80))),
    256: ("allreduce", *(f"ours:{compression}x" for compression in (10, 20, 40, 80, 160))),
    448: ("allreduce", "ours:4", *(f"ours:{compression}x" for compression in (40, 80, 160, 320))),
}
"""{width: arms}. Tensors that are averaged exactly limit the compression."""
SEEDS = {64: (0, 1, 2), 128: (0, 1, 2)}


def name(width: int) -> str:
    """Return the model's name in the records."""
    return f"text, width {width}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--arms", nargs="+", help="as for the demo (default: a list for each width)")
    parser.add_argument("--seeds", nargs="+", type=int, help="(default: 0 to 2 for widths 64 and 128, else 0)")
    arguments = parser.parse_args()
    if arguments.command == "run":
        for width in arguments.widths:
            train = functools.partial(loss_per_byte.train_text, width=width)
            arms, seeds = arguments.arms or WIDTHS[width], arguments.seeds or SEEDS.get(width, (0,))
            loss_per_byte.run(name(width), train, arms, seeds, STEPS, WORKERS)


if __name__ == "__main__":
    main()
