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
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core.saved_state import listing

KEY = "local_steps"
OUTER = "outer_"
"""Begins the names of the outer optimizer's tensors."""

OWN = ("own", "own_start", "own_error")
"""Parts that belong to one worker: its parameters, unless they are θ, what they were before its changes if that is not
the rounded θ, and its error."""

COMMON = ("shared", "changes")
"""Parts that are equal on all workers: θ, and the mean pseudo-gradient, if a round was begun."""

Matrices = dict[str, dict[str, Tensor]]


def pack(engine: Mapping[str, Any], parts: Matrices, outer: Mapping[str, Any], **rest: Any) -> dict[str, Any]:
    """Return a saved state, as tensors by name and plain values, from those of the engine and the outer optimizer.

    ``parts`` are {name: {"shared": θ, "changes": mean pseudo-gradient, "own", "own_error"}}. ``rest`` are the numbers
    of steps, and this worker as [index, number].
    """
    matrices: Matrices = {name: dict(saved) for name, saved in engine["matrices"].items()}
    numbers: dict[str, dict[str, Any]] = {}
    for index, (name, own) in enumerate(parts.items()):
        matrices[name] = {**matrices.get(name, {}), **own}
        for key, value in outer["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                matrices[name][OUTER + key] = value.detach().clone()
            else:
                numbers.setdefault(name, {})[key] = value
    # Tells this state from others. Equal on all workers.
    mark = sum(int(fingerprint(own[key])) for own in parts.values() for key in COMMON if key in own)
    optimizer = {"state": numbers, "param_groups": outer["param_groups"]}
    return {**engine, "matrices": matrices, KEY: {**rest, "mark": mark, "outer": optimizer}}


@dataclasses.dataclass(frozen=True)
class SavedRound:
    """What ``pack`` has returned on ``worker`` (index, number). ``outer`` is what the outer optimizer loads."""

    state: Mapping[str, Any]
    parts: Matrices
    steps: int
    since: int
    worker: tuple[int, int]
    outer: dict[str, Any]

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
        outer: dict[int, dict[str, Any]] = {}
        for index, (name, shared) in enumerate(theta.items()):
            for key in ("shared", "changes", "own"):
                part, shape = matrices[name].get(key), tuple(shared.shape)
                if part is None and key != "shared":
                    continue
                if not isinstance(part, Tensor) or part.shape != shape or not bool(part.isfinite().all()):
                    got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                    raise ValueError(f"{key!r} of {name!r} must be a finite tensor of shape {shape}; got {got}")
            tensors = {k.removeprefix(OUTER): part for k, part in matrices[name].items() if k.startswith(OUTER)}
            if values := {**rest["outer"]["state"].get(name, {}), **tensors}:
                outer[index] = values
        groups, own = rest["outer"]["param_groups"], optimizer.state_dict()["param_groups"]
        found, expected = ([(len(group["params"]), sorted(group)) for group in each] for each in (groups, own))
        if found != expected:
            raise ValueError(
                "the saved state belongs to another outer optimizer: its groups have (parameters, settings) "
                f"{found}, and those of this one {expected}"
            )
        worker = (int(rest["worker"][0]), int(rest["worker"][1]))
        return cls(state, matrices, rest["steps"], rest["since"], worker, {"state": outer, "param_groups": groups})

    def of_engine(self, *, own: bool) -> dict[str, Any]:
        """Return the engine's saved state, with this worker's ``own`` errors or with the mean."""
        matrices: Matrices = {}
        for name, parts in self.parts.items():
            saved = {k: part for k, part in parts.items() if k not in (*COMMON, *OWN) and not k.startswith(OUTER)}
            if own and "own_error" in parts:
                saved["error"] = parts["own_error"]
            if saved:
                matrices[name] = saved
        return {**{key: value for key, value in self.state.items() if key != KEY}, "matrices": matrices}


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


def file_name(communicator: Communicator, *, own: bool = False) -> str:
    """Return the name of the file of this shard, or of this worker's ``own``."""
    shard, shards = 0, 1
    for workers in communicator.others:
        shard, shards = shard * workers.world_size + workers.index, shards * workers.world_size
    worker = f"-worker-{communicator.index}-of-{communicator.world_size}" if own else ""
    return f"powersgd-local-{shard}-of-{shards}{worker}.pt"
