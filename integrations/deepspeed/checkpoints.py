"""DeepSpeed: the compression's state in the engine's checkpoints, and the optimizer's parameters in exports.

What ``engine.save_checkpoint`` writes has the model's parameters v as they are, and the masters w in the optimizer's
files. So training continues with the same bits. Exports have w rounded.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from powersgd_triton.integrations.deepspeed.engines import run_within
from powersgd_triton.integrations.deepspeed.state import DeepSpeedState

logger = logging.getLogger("powersgd_triton")

EXACT = "_powersgd_exact"
"""Marks the function of ``Accelerator`` that is replaced, once for all engines."""


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
        given = inspect.signature(load).bind(load_dir, tag, *args, **kwargs)
        weights_only = given.arguments.get("load_module_only", False)
        # Read and checked on all workers before DeepSpeed changes the model, which is collective.
        go_on = state.read(lambda: None if weights_only else state.tagged(load_dir, tag))
        found = load(load_dir, tag, *args, **kwargs)
        if found[0] is None:
            return found
        if go_on is not None:
            go_on()
        else:
            if not weights_only:
                logger.warning("powersgd: %s has no PowerSGD state; errors start at zero", state.tagged(load_dir, tag))
            state.forget()
        return found

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def attach_exports(engine: Any, state: DeepSpeedState) -> None:
    """Make exports write the optimizer's parameters, rounded."""
    run_within(engine, "save_16bit_model", state.exact_parameters)
    accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if accelerator is None or hasattr(accelerator.get_state_dict, EXACT):
        return
    get = accelerator.get_state_dict

    # Accelerate's and the Trainer's exports. They copy what they take from the model.
    @functools.wraps(get)
    def get_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        compressed = getattr(model, "powersgd", None)
        with compressed.exact_parameters() if isinstance(compressed, DeepSpeedState) else nullcontext():
            return get(self, model, *args, **kwargs)

    setattr(get_state_dict, EXACT, True)
    accelerator.get_state_dict = get_state_dict
