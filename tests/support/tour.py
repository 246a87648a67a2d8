"""Count what a reader meets on the way of one gradient: frames and classes of a DDP step, and sizes of the source.

    PYTHONPATH=COMMIT python tests/support/tour.py [--json]

It uses the public interface alone, so that the same file runs with any commit on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import powersgd_triton
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook

PACKAGE = Path(powersgd_triton.__file__).resolve().parent
ROOT = PACKAGE.parent
SOURCES = (PACKAGE, ROOT / "integrations")
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Frames of their own in Python 3.11 and none in 3.12, so never counted."""

Stack = tuple[str, ...]


class Tour:
    """What a profiled program runs of the package.

    Attributes:
        objects: instances of the package's classes whose methods ran, by id.
        classes: the classes whose class methods ran.
        named: classes that the text of the functions that ran names, types of arguments included.
        stacks: from ``powerSGD_hook`` to each function of ``ops/reference.py`` that was called, both included; of the
            last ``follow``.
    """

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.classes: set[type] = set()
        self.named: set[type] = set()
        self.stacks: set[Stack] = set()

    def follow(self, function: Callable[[], Any]) -> Any:
        """Call a function, profiled."""
        self.stacks = set()
        sys.setprofile(self._profile)
        try:
            return function()
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        path = source(code)
        if path is not None:
            self.named |= classes_named(code, frame.f_globals["__name__"])
        # A dataclass's __init__ is in no file.
        if path is not None or code.co_name in ("__init__", "__new__"):
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(first, type):
                if code.co_varnames[0] in ("cls", "_cls") and of_package(first):
                    self.classes.add(first)
            elif of_package(type(first)):
                self.objects[id(first)] = first
        if path == "powersgd_triton/ops/reference.py" and code.co_name.endswith("_reference"):
            stack = stack_of(frame)
            if stack:
                self.stacks.add(stack)

    def deepest(self) -> list[str]:
        """The longest stack."""
        _, stack = max((len(stack), stack) for stack in self.stacks)
        return list(stack)

    def met(self) -> set[type]:
        """All classes, with those of objects held by the ones whose methods ran, and their bases in the package."""
        found, left = set(self.classes), list(self.objects.values())
        seen: set[int] = set()
        while left:
            thing = left.pop()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if of_package(type(thing)):
                found.add(type(thing))
                left += attributes(thing)
            elif isinstance(thing, dict):
                left += [*thing.keys(), *thing.values()]
            elif isinstance(thing, (list, tuple, set, frozenset)):
                left += thing
        return {base for kind in found for base in kind.__mro__ if of_package(base)}


def titles(kinds: set[type]) -> list[str]:
    """Classes with their modules."""
    return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


@functools.cache
def functions(path: str) -> dict[int, set[str]]:
    """{line of a function's ``def`` or first decorator: names in its text} of a file."""
    found: dict[int, set[str]] = {}
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[first] = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found


@functools.cache
def classes_named(code: CodeType, module: str) -> frozenset[type]:
    """Classes of the package that a function's text names."""
    names = functions(source(code) or "").get(code.co_firstlineno, set())
    things = (getattr(sys.modules[module], name, None) for name in names)
    return frozenset(thing for thing in things if isinstance(thing, type) and of_package(thing))


def attributes(thing: Any) -> list[Any]:
    """Values of an object's attributes, and its items if it is a container."""
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    held = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]
    return held + (list(thing) if isinstance(thing, tuple) else [])


def of_package(kind: type) -> bool:
    """Whether a class is the package's."""
    return kind.__module__.split(".")[0] == PACKAGE.name


@functools.cache
def source(code: CodeType) -> str | None:
    """The file of a function of the package, from the root on; None for all others."""
    path = Path(code.co_filename).resolve()
    return path.relative_to(ROOT).as_posix() if any(path.is_relative_to(folder) for folder in SOURCES) else None


def stack_of(frame: FrameType | None) -> Stack:
    """The package's functions and generators from ``powerSGD_hook`` to a frame; empty if that is not below it."""
    lines: list[str] = []
    while frame is not None:
        code = frame.f_code
        path = source(code)
        if path is not None and code.co_name not in COMPREHENSIONS:
            lines.append(f"{path}: {getattr(code, 'co_qualname', code.co_name)}")
            if code.co_name == powerSGD_hook.__name__:
                return tuple(reversed(lines))
        frame = frame.f_back
    return ()


def ddp_step() -> dict[str, list[str]]:
    """Three steps of a small model with the default configuration. Before the second one DDP makes its buckets anew."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tour = Tour()
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 32))

    def step() -> None:
        replica(torch.randn(4, 64)).square().sum().backward()

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        state = tour.follow(lambda: PowerSGDState(None, 4, start_powerSGD_iter=0, module=model))
        replica = DistributedDataParallel(model)
        replica.register_comm_hook(state, powerSGD_hook)
        tour.follow(step)
        tour.follow(step)
        first = tour.deepest()
        tour.follow(step)
        dist.destroy_process_group()
    met = tour.met()
    return {
        "frames of a step with new buckets": first,
        "frames of a step": tour.deepest(),
        "classes": titles(met),
        "further classes that the functions name": titles(tour.named - met),
    }


# The source -----------------------------------------------------------------------------------------------------------


def modules(*folders: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """(path from the root on, text, syntax tree) of Python files; links are not followed."""
    for folder in folders:
        for parent, below, names in os.walk(folder):
            below[:] = [name for name in below if not name.startswith((".", "__pycache__"))]
            for name in sorted(names):
                if name.endswith(".py"):
                    text = Path(parent, name).read_text()
                    yield Path(parent, name).relative_to(ROOT).as_posix(), text, ast.parse(text)


def size(kind: ast.ClassDef) -> tuple[int, int]:
    """(methods, attributes assigned on self) of a class."""
    methods = [node for node in kind.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assigned = {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return len(methods), len(assigned)


def counts() -> dict[str, Any]:
    """What can be counted without running anything."""
    found = list(modules(*SOURCES))
    kinds = {
        f"{path}: {node.name}": node
        for path, _, tree in found
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    largest = max(kinds, key=lambda name: size(kinds[name]))
    lines = {path: text.count("\n") for path, text, _ in found}
    longest = max(lines, key=lambda path: lines[path])
    tests = {
        f"{path}:{node.lineno}"
        for path, _, tree in modules(ROOT / "tests", ROOT / "benchmarks")
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and any(map(is_test, imported(node)))
    }
    return {
        "classes named ...State": sorted(name for name, kind in kinds.items() if kind.name.endswith("State")),
        "largest class": [largest, *size(kinds[largest])],
        "modules at the top": sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")),
        "longest file": [longest, lines[longest]],
        "README bytes": (ROOT / "README.md").stat().st_size,
        "imports of tests": sorted(tests),
    }


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Full names of what a statement imports."""
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [prefix + alias.name for alias in node.names]


def is_test(name: str) -> bool:
    """Whether a module is a test, or something in one is meant."""
    parts = name.split(".")
    return parts[0] == "tests" and any(part.startswith("test_") for part in parts[1:3])


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    as_json = parser.parse_args().json
    found = {**ddp_step(), **counts()}
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for what, value in found.items():
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            print(f"{what}: {len(value)}", *value, sep="\n    ")
        else:
            print(f"{what}: {', '.join(map(str, value)) if isinstance(value, list) else value}")


if __name__ == "__main__":
    main()
