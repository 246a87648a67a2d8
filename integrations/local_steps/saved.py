"""Saved states of local steps: what they add to a saved state of the engine, and its files."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.checkpoint import load, save
from powersgd_triton.comm.agreement import fingerprint
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core.saved_state import is_finite, is_whole, listing
from powersgd_triton.integrations.local_steps.outer_state import OuterState
from powersgd_triton.ranks.plan import is_count

KEY = "local_steps"
OUTER = "outer_"
"""Begins the names of the outer optimizer's tensors."""

NUMBERS = ("step", "eta", "mu", "mu_product")
"""Tensors of torch's optimizers that have one element."""

OWN = ("own", "own_start", "own_error")
"""Parts of one worker: its parameters unless they are θ, what they were before its changes, and its error."""

COMMON = ("shared", "changes")
"""Parts that are equal on all workers: θ, and the mean pseudo-gradient, if a round was begun."""

Matrices = dict[str, dict[str, Tensor]]


def pack(engine: Mapping[str, Any], parts: Matrices, outer: OuterState, **rest: Any) -> dict[str, Any]:
    """Return a saved state from that of the engine, and the outer optimizer's.

    ``parts`` are {name: {one of ``OWN`` and ``COMMON``: tensor}}, ``rest`` the fields of ``SavedRound`` that are plain.
    """
    saved = outer.optimizer.state_dict()
    matrices: Matrices = {name: {**engine["matrices"].get(name, {}), **own} for name, own in parts.items()}
    numbers: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(outer.names()):
        for key, value in saved["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                matrices[name][OUTER + key] = value.detach().clone()
            else:
                numbers.setdefault(name, {})[key] = value
    # Tells this state from others. Equal on all workers.
    mark = sum(int(fingerprint(own[key])) for own in parts.values() for key in COMMON if key in own)
    # A learning rate, for example, may be a tensor.
    groups = [{k: v.item() if isinstance(v, Tensor) else v for k, v in each.items()} for each in saved["param_groups"]]
    optimizer = {"state": numbers, "param_groups": groups}
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
    def parse(cls, state: Any, outer: OuterState) -> "SavedRound":
        """Check what ``pack`` has added to the engine's state. ValueError unless it fits θ and the outer optimizer."""
        theta, optimizer = outer.theta(), outer.optimizer
        if not isinstance(state, Mapping) or KEY not in state or not isinstance(state.get("matrices"), Mapping):
            raise ValueError("expected a saved state of LocalSteps; got something else, such as an adapter's state")
        rest, matrices = state[KEY], state["matrices"]
        if set(matrices) != set(theta):
            raise ValueError(
                "the saved state belongs to another model; parameters missing from it: "
                f"{listing(theta.keys() - matrices)}; only in it: {listing(matrices.keys() - theta.keys())}"
            )
        own = optimizer.state_dict()["param_groups"]
        form = {"steps": 0, "since": 0, "worker": (0, 0), "outer": {"state": {}, "param_groups": own}}
        _check_form(KEY, rest, form)
        _check_form("matrices", matrices, {name: {} for name in theta})
        numbers, steps, since, worker = rest["outer"]["state"], rest["steps"], rest["since"], tuple(rest["worker"])
        _check_form(f"{KEY}.outer.state", numbers, {name: {} for name in numbers})
        if not all(map(is_count, (steps, since, *worker))) or since > steps:
            raise ValueError(f"{KEY!r} must have numbers of steps since ≤ steps, and a worker; got {rest!r}")
        begun = {key for key in ("changes", "own") if any(key in parts for parts in matrices.values())}
        for name, shared in theta.items():
            for key in ("shared", *begun, *(["changes"] if since else []), *(matrices[name].keys() & {"own_start"})):
                _check_part(f"{key!r} of {name!r}", matrices[name].get(key), tuple(shared.shape))
        # In torch's own, all parameters have the same values: single numbers, and tensors of their shape.
        strict = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ != "Adafactor"
        states: dict[int, dict[str, Any]] = {}
        for index, name in enumerate(outer.names()):
            _check_form(f"{KEY}.outer.state.{name}", values := dict(numbers.get(name, {})), values)
            for part in (key.removeprefix(OUTER) for key in matrices[name] if key.startswith(OUTER)):
                saved, shapes = matrices[name][OUTER + part], [() if part in NUMBERS else tuple(theta[name].shape)]
                _check_part(f"{OUTER + part!r} of {name!r}", saved, *(shapes if strict else ()))
                # A copy, since optimizers change the tensors that they have loaded.
                values[part] = saved.detach().clone()
            if strict and values and values.keys() != next(iter(states.values()), values).keys():
                raise ValueError(f"the outer optimizer's saved state of {name!r} has other parts than that of others")
            states |= {index: values} if values else {}
        pairs = zip(rest["outer"]["param_groups"], own, strict=True)
        groups = [{key: _in_form(group[key], mine.get(key)) for key in group} for group, mine in pairs]
        return cls(state, matrices, steps, since, worker, {"state": states, "param_groups": groups})

    def facts(self) -> dict[str, Any]:
        """Return what must be equal on all workers that load their parts of it."""
        common = {
            f"saved {name!r}": [int(fingerprint(parts[k])) for k in sorted(parts) if k in COMMON or k.startswith(OUTER)]
            for name, parts in self.parts.items()
        }
        return {**common, "saved outer optimizer": repr(self.state[KEY]["outer"])}

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


def _check_form(what: str, found: Any, own: Any) -> None:
    """Raise ValueError unless a saved value has the form of ``own``: its fields, finite numbers, equal flags."""
    fields: Iterable[Any] = ()
    if isinstance(own, Mapping):
        right, fields = isinstance(found, Mapping) and own.keys() <= found.keys(), own
    elif isinstance(own, (list, tuple)):
        right, fields = isinstance(found, (list, tuple)) and len(found) == len(own), range(len(own))
    elif own is None or isinstance(own, bool):
        right = found is None or found is own or (own is None and isinstance(found, bool))
    elif isinstance(own, (int, float, Tensor)):
        number = found.item() if is_whole(found) and found.numel() == 1 else found
        right = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
    else:
        right = isinstance(found, type(own))
    if not right:
        raise ValueError(
            f"the saved state is damaged or of another outer optimizer: {what} is {found!r}, not in the form of {own!r}"
        )
    for field in fields:
        _check_form(f"{what}.{field}", found[field], own[field])


def _in_form(saved: Any, own: Any) -> Any:
    """Return a saved value as an optimizer has it: a number as a tensor, for example, or its own list of parameters."""
    if isinstance(own, list):
        return own
    return torch.as_tensor(saved, dtype=own.dtype, device=own.device) if isinstance(own, Tensor) else saved


def _check_part(what: str, part: Any, *shapes: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor is real, finite and in memory, and of the shape if one is given."""
    right = is_whole(part) and not part.is_complex() and (not shapes or tuple(part.shape) in shapes)
    if not right or not is_finite(part):
        got = f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else repr(part)
        of = f" of shape {shapes[0]}" if shapes else ""
        raise ValueError(f"{what} in the saved state must be a finite tensor{of}; got {got}")


def write(state: Mapping[str, Any], folder: Path, communicator: Communicator) -> None:
    """Write what ``joined`` reads, in files that end in .new."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, dropped in _files(folder, communicator):
        new = path.with_suffix(".new")
        # What an interrupted call has left takes room.
        new.unlink(missing_ok=True)
        matrices = {name: {k: parts[k] for k in parts.keys() - {*dropped}} for name, parts in state["matrices"].items()}
        save({**state, "matrices": matrices}, new)


def replace(folder: Path, communicator: Communicator) -> None:
    """Replace earlier files by those that all workers have written, so that they fit together if one cannot write."""
    for path, _ in _files(folder, communicator):
        path.with_suffix(".new").replace(path)


def _files(folder: Path, communicator: Communicator) -> list[tuple[Path, Sequence[str]]]:
    """Return the files of this worker, and which parts they do not have."""
    own, common = (folder / file_name(communicator, own=True), COMMON), (folder / file_name(communicator), OWN)
    return [own, common] if communicator.index == 0 else [own]


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
            "interrupted: load an older checkpoint, or remove the files of single workers to start from their mean"
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
