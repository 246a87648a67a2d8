"""DeepSpeed: run an unchanged training program with ``deepspeed.initialize`` replaced.

deepspeed --num_gpus 2 --module powersgd_triton.integrations.deepspeed train.py --deepspeed_config ds_config.json
torchrun --nproc_per_node 2 -m powersgd_triton.integrations.deepspeed train.py --deepspeed_config ds_config.json
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import deepspeed

from powersgd_triton.integrations.deepspeed import initialize

USAGE = (
    "usage: deepspeed [options] --module powersgd_triton.integrations.deepspeed PROGRAM [its arguments]\n"
    "       torchrun [options] -m powersgd_triton.integrations.deepspeed PROGRAM [its arguments]\n"
    "PROGRAM is a Python file, or -m and a module's name."
)


def main(arguments: Sequence[str]) -> None:
    """Run the program that the arguments name, as ``python`` would.

    Raises:
        SystemExit: There is no program.
    """
    rest = list(arguments)
    # The deepspeed launcher inserts --local_rank before the program. Pass it on to the program.
    launcher = []
    while rest and rest[0].startswith("--local_rank"):
        launcher.append(rest.pop(0))
    as_module = bool(rest) and rest[0] == "-m"
    if as_module:
        rest.pop(0)
    if not rest or (not as_module and not os.path.isfile(rest[0])):
        missing = f"there is no file {rest[0]!r}\n" if rest else ""
        sys.exit(f"{missing}{USAGE}")
    program = rest.pop(0)
    sys.argv = [program, *launcher, *rest]
    deepspeed.initialize = initialize
    if as_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")
