"""DeepSpeed: the compression's state in ``engine.save_checkpoint`` and ``engine.load_checkpoint``."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from powersgd_triton.checkpoint import load as load_file
from powersgd_triton.checkpoint import save as save_file
from powersgd_triton.comm.agreement import Facts, together
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.integrations.deepspeed.state import DeepSpeedState

logger = logging.getLogger("powersgd_triton")
T = TypeVar("T")

FILE = "powersgd_pp{stage:02d}_tp{slice:02d}_state.pt"
"""One file for each pipeline stage and tensor-parallel slice. The prefix differs from those of DeepSpeed's files."""


def attach_checkpoints(engine: Any, state: DeepSpeedState) -> None:
    """Make the engine save the state before it marks a checkpoint as the latest, and load it after the model."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        tag = f"global_step{engine.global_steps}" if tag is None else tag
        # Written first, since DeepSpeed updates ``latest`` at the end: an interrupted save leaves the old checkpoint.
        _write(engine, state, Path(save_dir) / str(tag))
        return save(save_dir, tag, *args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        weights_only = _argument(load, "load_module_only", (load_dir, tag, *args), kwargs)

        def find() -> tuple[tuple[Path | None, Any], Facts, Facts]:
            folder = None if weights_only else _folder(engine, load_dir, tag)
            saved = None if folder is None else _read(engine, state, folder)
            return (folder, saved), {"has a PowerSGD state": saved is not None}, {}

        # Read and checked on all workers before DeepSpeed changes the model, which is collective.
        folder, saved = _together("load_checkpoint", find, engine)
        loaded = None
        if saved is not None:
            loaded = _together("load_checkpoint", lambda: (state.read(lambda: saved), {}, {}), engine)
        found = load(load_dir, tag, *args, **kwargs)
        if found[0] is None:
            return found
        if loaded is not None:
            state.adopt(*loaded)
        else:
            if not weights_only:
                logger.warning("powersgd: %s has no PowerSGD state; errors start at zero", folder)
            state.forget()
        return found

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _write(engine: Any, state: DeepSpeedState, folder: Path) -> None:
    saved = state.state_dict()

    def write() -> tuple[None, Facts, Facts]:
        if dist.get_rank(state.group) == 0:
            folder.mkdir(parents=True, exist_ok=True)
            stage, part = _place(engine)
            save_file(saved, folder / FILE.format(stage=stage, slice=part))
        return None, {}, {}

    # DeepSpeed's own save is collective.
    _together("save_checkpoint", write, engine)


def _together(call: str, act: Callable[[], tuple[T, Facts, Facts]], engine: Any) -> T:
    """Run ``act`` on the workers of all pipeline stages, see ``agreement.together``."""
    return together(call, act, Communicator(), torch.device(engine.device))


def _read(engine: Any, state: DeepSpeedState, folder: Path) -> dict[str, Any] | None:
    """Return the saved state. None if there is none.

    Raises:
        ValueError: It is a universal checkpoint without the state.
    """
    _, part = _place(engine)
    files = sorted(folder.glob(FILE.format(stage=0, slice=part).replace("pp00", "pp*")))
    if not files and engine.load_universal_checkpoint():
        raise ValueError(
            f"the universal checkpoint {folder} has no PowerSGD state: ds_to_universal leaves it out. Copy it from the "
            f"checkpoint that was converted: cp CHECKPOINT/powersgd_*_state.pt {folder}/. Or load without the section "
            "'powersgd', save, and continue from that checkpoint"
        )
    saved = [load_file(file) for file in files]
    if len(saved) < 2 and not engine.pipeline_parallelism:
        return saved[0] if saved else None
    # Layers may have been on other pipeline stages, so merge the files of all stages.
    merged: dict[str, Any] = {key: value for one in saved for key, value in one.items()}
    for key in ("tensors", "matrices"):
        entries = {name: entry for one in saved for name, entry in one[key].items()}
        merged[key] = {name: entry for name, entry in entries.items() if name in state.shapes}
    merged.pop("fingerprint", None)
    return merged if saved else None


def _folder(engine: Any, load_dir: Any, tag: Any) -> Path | None:
    """Return the folder that DeepSpeed will load. None if it will find nothing."""
    if tag is None:
        latest = Path(load_dir) / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
        if not latest.is_file():
            return None
        tag = latest.read_text().strip()
    folder = Path(load_dir) / str(tag)
    return folder if folder.is_dir() else None


def _place(engine: Any) -> tuple[int, int]:
    """Return (pipeline stage, tensor-parallel slice) of this worker."""
    stage = engine.mpu.get_stage_id() if engine.pipeline_parallelism else 0
    return int(stage), int(engine.checkpoint_mp_rank)


def _argument(function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the value that a call passes for a parameter, or its default."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments.get(name)
