"""DeepSpeed: run an unchanged training program with ``deepspeed.initialize`` replaced. See ``USAGE``."""

import functools
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import deepspeed

from powersgd_triton.integrations import deepspeed as adapter

USAGE = (
    "usage: deepspeed [options] --module powersgd_triton.integrations.deepspeed PROGRAM [its arguments]\n"
    "       torchrun [options] -m powersgd_triton.integrations.deepspeed PROGRAM [its arguments]\n"
    "PROGRAM is a Python file, or -m and a module's name."
)


def main(arguments: Sequence[str]) -> None:
    """Run the program that the arguments name, as ``python`` would. Say so if it never calls ``deepspeed.initialize``.

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
    initialize, called = adapter.initialize, False

    @functools.wraps(initialize)
    def noting(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        called = True
        return initialize(*args, **kwargs)

    # A program may use the adapter by itself.
    deepspeed.initialize = adapter.initialize = noting
    try:
        if as_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(program))
            runpy.run_path(program, run_name="__main__")
    finally:
        # Launchers set RANK. The process group may be gone, or was never made.
        if not called and os.environ.get("RANK", "0") == "0":
            print("powersgd: off, nothing was compressed: the program did not call deepspeed.initialize", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
