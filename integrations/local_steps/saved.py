"""Saved states of local steps: what they add to a saved state of the engine, and its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.checkpoint import load
from powersgd_triton.comm.agreement import fingerprint
from powersgd_triton.core.saved_state import listing

KEY = "local_steps"
OUTER = "outer_"
"""Begins the names of the outer optimizer's tensors."""

OWN = ("own", "own_error")
"""Parts that belong to one worker: its parameters, unless they are θ, and its error."""

COMMON = ("shared", "changes")
"""Parts that are equal on all workers: θ, and the mean pseudo-gradient, if a round was begun."""

Matrices = dict[str, dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class SavedRound:
    """What a saved state of ``worker`` (index, number) says of the engine, and of the round under way.

    ``parts`` are {name: {"shared": θ, "changes": mean pseudo-gradient, "own", "own_error"}}. ``outer`` is the state of
    the outer optimizer, with tensors and in the order of the parameters.
    """

    engine: dict[str, Any]
    steps: int
    since: int
    worker: tuple[int, int]
    parts: Matrices
    outer: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return tensors by name, and plain values, which ``parse`` reads."""
        matrices: Matrices = {name: dict(parts) for name, parts in self.engine["matrices"].items()}
        numbers: dict[str, dict[str, Any]] = {}
        for index, (name, parts) in enumerate(self.parts.items()):
            matrices[name] = {**matrices.get(name, {}), **parts}
            for key, value in self.outer["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    matrices[name][OUTER + key] = value.detach().clone()
                else:
                    numbers.setdefault(name, {})[key] = value
        # Tells this state from others. Equal on all workers.
        mark = sum(int(fingerprint(parts[key])) for parts in self.parts.values() for key in COMMON if key in parts)
        outer = {"state": numbers, "param_groups": self.outer["param_groups"]}
        rest = {"steps": self.steps, "since": self.since, "worker": list(self.worker), "mark": mark, "outer": outer}
        return {**self.engine, "matrices": matrices, KEY: rest}

    @classmethod
    def parse(cls, state: Any, theta: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> SavedRound:
        """Read a saved state. ValueError unless it fits the shared parameters {name: θ} and their optimizer."""
        if not isinstance(state, Mapping) or KEY not in state or not isinstance(state.get("matrices"), Mapping):
            raise ValueError(
                "expected a saved state of LocalSteps; got something else, such as the state of an adapter"
            )
        rest, matrices = state[KEY], state["matrices"]
        if set(matrices) != set(theta):
            raise ValueError(
                "the saved state belongs to another model; parameters missing from it: "
                f"{listing(theta.keys() - matrices)}; only in it: {listing(matrices.keys() - theta.keys())}"
            )
        engine: Matrices = {}
        parts: Matrices = {}
        outer: dict[int, dict[str, Any]] = {}
        for index, (name, shared) in enumerate(theta.items()):
            saved = dict(matrices[name])
            values = dict(rest["outer"]["state"].get(name, {}))
            parts[name] = {key: saved.pop(key) for key in (*COMMON, *OWN) if key in saved}
            values |= {key.removeprefix(OUTER): saved.pop(key) for key in [*saved] if key.startswith(OUTER)}
            for key in ("shared", "changes", "own"):
                part = parts[name].get(key)
                if part is None and key != "shared":
                    continue
                if not isinstance(part, Tensor) or part.shape != shared.shape or not bool(part.isfinite().all()):
                    got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                    shape = tuple(shared.shape)
                    raise ValueError(f"{key!r} of {name!r} must be a finite tensor of shape {shape}; got {got}")
            if values:
                outer[index] = values
            if saved:
                engine[name] = saved
        groups, own = rest["outer"]["param_groups"], optimizer.state_dict()["param_groups"]
        found, expected = ([(len(group["params"]), sorted(group)) for group in each] for each in (groups, own))
        if found != expected:
            raise ValueError(
                "the saved state belongs to another outer optimizer: its groups have (parameters, settings) "
                f"{found}, and those of this one {expected}"
            )
        worker = (int(rest["worker"][0]), int(rest["worker"][1]))
        of_engine = {**{key: value for key, value in state.items() if key != KEY}, "matrices": engine}
        return cls(of_engine, rest["steps"], rest["since"], worker, parts, {"state": outer, "param_groups": groups})

    def with_own_errors(self) -> dict[str, Any]:
        """Return the engine's saved state with this worker's own errors in place of the mean."""
        matrices = {name: dict(parts) for name, parts in self.engine["matrices"].items()}
        for name, parts in self.parts.items():
            if "own_error" in parts:
                matrices.setdefault(name, {})["error"] = parts["own_error"]
        return {**self.engine, "matrices": matrices}


def without(state: Mapping[str, Any], dropped: Iterable[str]) -> dict[str, Any]:
    """Return a saved state without some parts of its tensors."""
    matrices = {name: {k: parts[k] for k in parts.keys() - {*dropped}} for name, parts in state["matrices"].items()}
    return {**state, "matrices": matrices}


def joined(common: Path, own: Path) -> dict[str, Any]:
    """Read a saved state from its files. ``own`` may be missing, if it was saved by another number of workers."""
    state = load(common)
    if not own.exists():
        return state
    mine = load(own)
    ours, theirs = (found.get(KEY, {}) for found in (mine, state))
    if ours.get("worker", [])[1:] != theirs.get("worker", [])[1:]:
        # An earlier checkpoint in this folder was saved by as many workers as there are now, and the last one was not.
        return state
    if ours.get("mark") != theirs.get("mark"):
        raise ValueError(
            f"{own.name} and {common.name} in {common.parent} were not saved together, for example because saving was "
            "interrupted: load an older checkpoint, or remove the files of single workers, so that all start from the "
            "mean of what they had"
        )
    matrices = {name: {**parts, **mine["matrices"].get(name, {})} for name, parts in state["matrices"].items()}
    return {**state, "matrices": matrices, KEY: ours}
