"""Lets a section "powersgd" of ds_config.json work in an unchanged program: wraps ``deepspeed.initialize``.

``import torch`` calls ``start``, an entry point of the group ``torch.backends``. ``POWERSGD_TRITON_AUTOLOAD=0`` in the
environment switches it off. Nothing else of this package is imported before DeepSpeed has read such a section.
"""

import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

VARIABLE, SECTION, DEEPSPEED = "POWERSGD_TRITON_AUTOLOAD", "powersgd", "deepspeed"


def start() -> None:
    """Wrap ``deepspeed.initialize`` when DeepSpeed is imported. Raise nothing, since ``import torch`` would fail."""
    try:
        if os.environ.get(VARIABLE, "1") == "0":
            return
        if DEEPSPEED in sys.modules:
            # It imports torch before it defines ``initialize``.
            sys.modules[DEEPSPEED].__class__ = _DeepSpeed
        else:
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        print(f"powersgd: a section {SECTION!r} of ds_config.json has no effect: {error}", file=sys.stderr)


def is_active() -> bool:
    """Return whether ``start`` has found or awaits DeepSpeed."""
    if DEEPSPEED in sys.modules:
        return isinstance(sys.modules[DEEPSPEED], _DeepSpeed)
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def is_section(key: object) -> bool:
    """Return whether a key of ds_config.json stands for the section, however it is spelled."""
    return isinstance(key, str) and "".join(filter(str.isalpha, key.lower())) in (SECTION, "powersgdtriton")


class _DeepSpeed(types.ModuleType):
    """DeepSpeed, whose ``initialize`` compresses what it returns if the configuration has a section."""

    @property
    def initialize(self) -> Callable[..., Any]:
        if "initialize" not in vars(self):
            raise AttributeError(f"module {DEEPSPEED!r} has no attribute 'initialize' yet")
        found = vars(self)["initialize"]
        # What a program puts in its place calls the original, or means not to.
        return _compressing(found) if found.__module__ == DEEPSPEED else found

    @initialize.setter
    def initialize(self, function: Callable[..., Any]) -> None:
        vars(self)["initialize"] = function


class _Finder:
    """Finds DeepSpeed as the other finders do, as often as somebody asks whether it is installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != DEEPSPEED:
            return None
        # Python passes over finders without the method, too.
        others = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (find_spec(name, path, target) for find_spec in others if find_spec)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: types.ModuleType) -> None:
                module.__class__ = _DeepSpeed
                execute(module)

            spec.loader.exec_module = executed
        return spec


@functools.cache
def _compressing(initialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialize)
    def run(*args: Any, **kwargs: Any) -> Any:
        returned = initialize(*args, **kwargs)
        engine = returned[0]
        section = getattr(getattr(engine, "_config", None), "_param_dict", None)
        if isinstance(section, Mapping) and any(map(is_section, section)):
            importlib.import_module("powersgd_triton.integrations.deepspeed").enable_from_section(engine)
        return returned

    return run
