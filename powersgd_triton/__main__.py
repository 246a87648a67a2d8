"""Command line: ``python -m powersgd_triton doctor | demo | plan``."""

import argparse
import importlib
import sys
from collections.abc import Sequence

# Command: (its module, what it does). A module has `add_arguments(parser)` and `run(arguments) -> exit status`; it is
# imported only for its own command, so that `doctor` works where another command's requirements are broken.
COMMANDS = {
    "doctor": ("powersgd_triton.doctor", "show versions, devices and the chosen backend, and test a step"),
    "demo": ("powersgd_triton.demo.run", "train a small GPT with all-reduce, torch's PowerSGD hook and ours"),
    "plan": (
        "powersgd_triton.planning.command",
        "predict the time of a step with and without compression, and recommend one",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m powersgd_triton", description="PowerSGD gradient compression.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if argv[:1] == [name]:
            implementation = importlib.import_module(module)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
