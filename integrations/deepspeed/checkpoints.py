"""DeepSpeed: the compression's state in ``engine.save_checkpoint`` and ``engine.load_checkpoint``."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powersgd_triton.integrations.deepspeed.state import DeepSpeedState

logger = logging.getLogger("powersgd_triton")


def attach_checkpoints(engine: Any, state: DeepSpeedState) -> None:
    """Make the engine save the state before it marks a checkpoint as the latest, and load it after the model."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        tag = f"global_step{engine.global_steps}" if tag is None else tag
        # Written first, since DeepSpeed updates ``latest`` at the end: an interrupted save leaves the old checkpoint.
        state.save(Path(save_dir) / str(tag))
        return save(save_dir, tag, *args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        weights_only = _argument(load, "load_module_only", (load_dir, tag, *args), kwargs)
        # Read and checked on all workers before DeepSpeed changes the model, which is collective.
        read = state.read(lambda: None if weights_only else state.tagged(load_dir, tag))
        found = load(load_dir, tag, *args, **kwargs)
        if found[0] is None:
            return found
        if read is not None:
            state.adopt(*read)
        else:
            if not weights_only:
                logger.warning("powersgd: %s has no PowerSGD state; errors start at zero", state.tagged(load_dir, tag))
            state.forget()
        return found

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _argument(function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the value that a call passes for a parameter, or its default."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments.get(name)
