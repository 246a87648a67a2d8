"""Saving an engine's state, and loading one that all workers have checked."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from powersgd_triton.comm.agreement import Facts, together
from powersgd_triton.config import logger
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.facts import saved_facts
from powersgd_triton.core.saved_state import LoadReport, Parts, SavedState
from powersgd_triton.layout.matrices import Size

Read = Callable[[], tuple[Any, Mapping[str, Size] | None]]
"""Returns a saved state, and the size of every tensor. None stands for the tensors seen so far."""
Loaded = tuple[SavedState, LoadReport]
"""What ``adopt`` takes."""


def save(engine: Engine, mean: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
    """Return mean error, bases, step and plan. Collective. ``mean`` averages a tensor. Default: an all-reduce."""
    residuals = engine.residuals
    # A worker that had no memory for a new bucket does not have its matrices, whose errors the others would average.
    held = {f"{name!r} was compressed": True for name in residuals.matrices.keys() | residuals.loaded.matrices.keys()}
    together("state_dict", lambda: (None, {}, held), engine.communicator, engine.buckets.device)
    engine.finish()
    residuals.agree()
    return residuals.save(engine.step, mean or engine.communicator.mean).to_dict(engine.config)


def on_streams(engine: Engine) -> AbstractContextManager[object]:
    """Return a context whose work is done on the streams on which the engine computes."""
    return engine.residuals.streams.everywhere()


def errors(engine: Engine, *, copy: bool = True) -> Parts:
    """Return {name: E [n, m]} of this worker's errors; see ``Residuals.error``."""
    engine.finish()
    return engine.residuals.error(engine.step, copy=copy)


def settle(engine: Engine) -> None:
    """Turn error buffers into E, so that a run that loads E goes on with the same bits."""
    for bucket in engine.residuals.buckets():
        bucket.materialize(engine.step)


def load(engine: Engine, read: Read, **options: Any) -> LoadReport:
    """Continue from a saved state, whose rank may differ. Collective. Unless all workers load the same, none does.

    Options, result and errors are those of ``Compressor.load_state_dict``. What ``read`` raises on one worker is an
    error on all.
    """
    return adopt(engine, *compared(engine, read, **options))


def adopt(engine: Engine, saved: SavedState, report: LoadReport) -> LoadReport:
    """Continue from a state that was checked. An open step is dropped, since the state replaces everything."""
    engine.void()
    engine.plan.load_state_dict(saved.plan)
    engine.step.iteration = saved.iteration
    engine.residuals.load(saved)
    engine.buckets.invalidate()
    logger.info("Loaded PowerSGD state of step %s: %s", saved.iteration, report)
    return report


def forget(engine: Engine) -> None:
    """Set all errors to zero, and drop a step that is open."""
    if engine.step.keys:
        engine.void()
    engine.residuals.forget_errors()


def compared(engine: Engine, read: Read, *, strict: bool = True, **options: Any) -> Loaded:
    """Check a saved state, and compare what the workers are about to load. Collective. See ``load``."""

    def check() -> tuple[Loaded, Facts, Facts]:
        found = checked(engine, *read(), strict=strict, **options)
        with on_streams(engine):
            return found, {}, {**saved_facts(found[0]), "strict": strict}

    return together("load_state_dict", check, engine.communicator, engine.buckets.device)


def checked(
    engine: Engine,
    state_dict: Any,
    tensors: Mapping[str, Size] | None,
    *,
    strict: bool,
    rename: Mapping[str, str] | None = None,
    owner: tuple[int, int] | None = None,
) -> Loaded:
    """Check this worker's saved state. Return copies of the parts that fit."""
    residuals, feedback = engine.residuals, bool(engine.given.error_feedback)
    saved = SavedState.parse(state_dict, needs_errors=feedback, rename=rename)
    known = residuals.sizes if tensors is None else tensors
    report = saved.compare(known, complete=tensors is not None, strict=strict, feedback=feedback)
    with residuals.streams.on(*{part.device for parts in saved.matrices.values() for part in parts.values()}):
        # If all tensors are known, those that come later were frozen, and start without an error.
        return saved.used(report, strict=strict and tensors is None, owner=owner), report


# Of one worker, as in a pickle ----------------------------------------------------------------------------------------


def own_state(engine: Engine) -> dict[str, Any]:
    """Return everything with this worker's own error. Not collective, since a worker may pickle alone."""
    state = engine.residuals.save(engine.step, lambda error: error)
    before, after = engine.numel
    return {
        "config": engine.given,
        "core": state.to_dict(engine.config),
        "worker": state.owner or engine.communicator.place,
        "total_numel_before_compression": before,
        "total_numel_after_compression": after,
    }


def restore(engine: Engine, saved: Mapping[str, Any], *, strict: bool) -> None:
    """Load the result of ``own_state`` into an engine with its configuration. The next step compares the workers.

    ``strict`` refuses matrices that come later and are not in it.
    """
    engine.plan.begin(engine.tensors())
    adopt(engine, *checked(engine, saved["core"], None, strict=strict, owner=saved["worker"]))
    engine.numel[:] = saved["total_numel_before_compression"], saved["total_numel_after_compression"]
