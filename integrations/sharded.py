"""Shared by the adapters for sharded parameters: checkpoints with torch.distributed.checkpoint (DCP)."""

import copy
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from powersgd_triton.checkpoint import StateDict, pickled
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import NodeGroup, new_group
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.loading import adopt, compared, save
from powersgd_triton.core.saved_state import FORMAT_VERSION, LoadReport, listing, plain, renamed
from powersgd_triton.handle import Folder, Handle
from powersgd_triton.integrations.saved_shards import (
    FOREIGN,
    Part,
    fitting,
    no_error,
    own_part,
    read_factors,
    remove,
    weighted_squares,
)
from powersgd_triton.layout.matrices import Size, sizes
from powersgd_triton.ranks.report import RankReport

FOLDER = "powersgd"
"""The folder that ``save`` makes in a checkpoint's folder."""


class ShardedHandle(Handle):
    """The compression of a model with sharded parameters. It is a ``Stateful`` of torch.distributed.checkpoint.

    ``save`` and ``load`` write and read with torch.distributed.checkpoint. With replicas, all processes must call them.
    The communicator's ``others`` hold other shards: those of FSDP, then of tensor parallelism, which splits first.
    ``part_of`` maps a parameter's name to the part of its error that belongs to this worker.
    """

    # {saved name: name here}, in what ``renamed`` returns.
    _names: Mapping[str, str] = {}
    # {name: FSDP2's object} of matrices that it averages itself, and that may be compressed on another mesh.
    _left: Mapping[str, Any] = {}

    def __init__(self, engine: Engine, part_of: Callable[[str], Part]) -> None:
        super().__init__(engine)
        self._part_of = part_of

    def report(self) -> RankReport:
        found = super().report()
        # What a step has left of whole tensors waits for the step's end, which comes when the next one begins.
        return found if self.config.quantize is None else dataclasses.replace(found, error_bytes=2 * found.error_bytes)

    def _place(self, name: str, error: Tensor | None = None) -> DTensor:
        """Return a mean error, or zeros, as a DTensor with the parameter's shape and sharding."""
        shape = tuple(self._engine.tensors()[name])
        if error is None:
            error = torch.zeros(shape, dtype=torch.float32, device="cpu")
        return self._part_of(name).of(error.view(shape))

    def _shard(self, name: str | None = None) -> tuple[int, int]:
        """Return (index of this worker's shard, number of shards) in the order of ``_gather`` and of the rows.

        With the name of a tensor, workers that have the same part of it have one index: that of the first of them.
        """
        index, number = 0, 1
        for workers in reversed(self._communicator.others):
            own = workers.index if name is None or self._divides(workers, name) else 0
            index, number = index * workers.world_size + own, number * workers.world_size
        return index, number

    def _divides(self, workers: Communicator, name: str) -> bool:
        """Return whether the workers have different parts of a tensor."""
        part, ranks = self._part_of(name), dist.get_process_group_ranks(workers.group)
        groups = (part.mesh.get_group(dim) for dim, each in enumerate(part.placements) if not each.is_replicate())
        return any(dist.get_process_group_ranks(group) == ranks for group in groups)

    def _gather(self, factors: Any) -> list[Any]:
        """Return the factors of all shards. Collective."""
        gathered = [factors]
        for workers in self._communicator.others:
            parts: list[Any] = [None] * workers.world_size
            dist.all_gather_object(parts, gathered, group=workers.group)
            gathered = [factors for part in parts for factors in part]
        return gathered

    def state_dict(self) -> dict[str, Any]:
        """Return the mean error as DTensors placed like the parameters, the factors and the step. Collective.

        The result fits other meshes, numbers of workers and ranks, since it has an error for every parameter of two or
        more dimensions, and for all parameters if they are quantized. On another mesh, a matrix starts from another
        shard's basis, or from a random one if none fits.
        """
        saved, shapes = save(self._engine), self._matrices()
        chosen = self.config.quantize and self.config.error_feedback and self._engine.tensors()
        errors: dict[str, DTensor] = {}
        if self._engine.given.error_feedback:
            for name in chosen or shapes:
                errors[name] = self._place(name, saved["matrices"].get(name, {}).pop("error", None))
        parts = {name: {key: p.cpu() for key, p in parts.items()} for name, parts in sorted(saved["matrices"].items())}
        shards, squares = self._gather(parts), weighted_squares(errors)
        # Vectors have errors if "auto" has chosen so. DCP reads only what a job that has not chosen yet saves too.
        vectors = {name: errors.pop(name).full_tensor().cpu() for name in sorted(errors.keys() - shapes.keys())}
        content = {"version": saved["format_version"], "shards": shards, "squares": squares, "vectors": vectors}
        left = {name: no_error(found) for name, found in self._left.items() if found.sharded_param.requires_grad}
        errors |= left
        squares |= dict.fromkeys(left, 0.0)
        if self._engine.given.planned:
            content["plans"] = self._gather(saved["plan"])
        errors = renamed(errors, {new: old for old, new in self._names.items()})
        # Factors are saved as bytes, since the number of shards and the rank may be different when they are loaded.
        return {"error": errors, "factors": pickled(content), "iteration": saved["iteration"]}

    def load_state_dict(self, state_dict: StateDict, *, rename: Mapping[str, str] | None = None) -> LoadReport:
        """Continue from a saved state of any mesh and rank. Collective. ``dcp.load`` calls this method.

        Args:
            state_dict: Result of ``state_dict`` on this worker. Errors may also be whole tensors, equal on all workers.
            rename: {saved name: name here}. With ``dcp.load``, use ``renamed`` instead.

        Raises:
            ValueError, DisagreementError: See ``Handle.load_state_dict``. Nothing was changed.
        """
        return self._loading(state_dict, rename=rename or self._names)()

    def _loading(self, state_dict: StateDict, **options: Any) -> Callable[[], LoadReport]:
        # Fetching errors may be collective, so that no worker may refuse its state alone before.
        nearest, errors, sums = self._together("load_state_dict", lambda: self._checked(state_dict, **options))
        found, known = weighted_squares(errors), self._engine.tensors()
        fetched = {name: self._part_of(name).whole(error, known[name]).flatten() for name, error in errors.items()}

        def read() -> tuple[dict[str, Any], dict[str, Size]]:
            other = [name for name, total in found.items() if not math.isclose(total, sums[name], rel_tol=1e-6)]
            if other:
                raise ValueError(f"the saved errors of {listing(other)} are {FOREIGN}")
            shapes = {name: shape for name, shape in self._engine.tensors().items() if name in errors}
            tensors = sizes(shapes | self._matrices(), self._engine.given)
            saved = nearest["matrices"]
            fitted = {name: fitting(saved.get(name, {}), size, fetched.get(name)) for name, size in tensors.items()}
            matrices = {name: parts for name, parts in fitted.items() if parts}
            # What has no basis counts as not compressed: its first one is drawn as in a run from the start.
            known = {name: size if "basis" in fitted[name] else size._replace(rank=0) for name, size in tensors.items()}
            return {**nearest, "tensors": {n: plain(size) for n, size in known.items()}, "matrices": matrices}, tensors

        # Parameters that are frozen now may be trained later, from a first basis.
        saved, report = compared(self._engine, read, strict=False)
        # Quantized vectors have errors, and with factors they are not read.
        unused = {**self._left, **self._engine.tensors()} if self._engine.given.error_feedback else sums
        dropped = (*report.dropped, *(name for name in sorted(unused.keys() - errors.keys()) if sums.get(name)))
        return functools.partial(adopt, self._engine, saved, dataclasses.replace(report, dropped=dropped))

    def save(self, folder: Folder) -> None:
        # What an interrupted call has left is gone before a worker writes.
        self._together("save", lambda: remove(Path(folder) / f"{FOLDER}.new"))
        super().save(folder)

    def _file(self) -> str:
        return FOLDER

    def _find(self, path: Path) -> Path | None:
        # What an interrupted ``save`` has left.
        return super()._find(path) or super()._find(path.with_suffix(".old"))

    def _write(self, state: Mapping[str, Any], folder: Path) -> None:
        path, (group, writes) = folder / FOLDER, self._holders()
        if not writes:
            return
        new, old = path.with_suffix(".new"), path.with_suffix(".old")
        try:
            dcp_save(dict(state), checkpoint_id=new, process_group=group)
        except CheckpointException as error:
            raise OSError(f"the state cannot be written to {new}: {error}") from error
        # All workers have written. One is the first of all its groups. If interrupted, ``load`` finds the old state.
        if all(workers.index == 0 for workers in (self._communicator, *self._communicator.others)):
            if os.path.lexists(path):
                remove(old)
                path.rename(old)
            new.rename(path)
            remove(old)

    def _read(self, path: Path) -> StateDict:
        saved = self.state_dict()

        def read() -> None:
            try:
                dcp_load(saved, checkpoint_id=path, process_group=self._holders()[0])
            except CheckpointException as error:
                # Without the tracebacks of all workers.
                reasons = sorted({str(failure[0]) for failure in error.failures.values()})
                raise ValueError(f"the saved state {path} cannot be read: {'; '.join(reasons)}") from error

        self._together("load", read)
        return saved

    def _holders(self) -> tuple[dist.ProcessGroup | None, bool]:
        """Return the group in which DCP saves and loads, None for all workers, and whether this replica saves."""
        communicator = self._communicator
        groups = [w for w in (communicator, *communicator.others) if w.world_size > 1] or [communicator]
        number = math.prod(workers.world_size for workers in groups)
        if number == dist.get_world_size():
            return None, True
        if len(groups) == 1:
            return groups[0].group, True
        # The model uses a part of the workers, as replicas of shards. Each replica has the whole state.
        if len(groups) == 2 and groups[0] is communicator:
            return groups[1].group, communicator.index == 0
        raise ValueError(
            "save and load need a process group of all workers of the model, and with tensor parallelism on "
            f"{number} of {dist.get_world_size()} workers there is none; start the program on these workers only"
        )

    def _checked(
        self, state_dict: Any, rename: Mapping[str, str]
    ) -> tuple[dict[str, Any], dict[str, DTensor], dict[str, float]]:
        """Return the nearest shard as a saved state, this worker's errors, and the squares of all that were saved."""
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"expected the result of state_dict(); got {type(state_dict).__name__}")
        if missing := {"error", "factors", "iteration"} - state_dict.keys():
            raise ValueError(f"expected the result of state_dict(); {sorted(missing)} are missing")
        if not isinstance(state_dict["error"], Mapping):
            raise ValueError(f"expected errors as {{name: DTensor}}; got {type(state_dict['error']).__name__}")
        saved_names = {new: old for old, new in rename.items()}
        copies = {saved_names.get(name, name): self._shard(name)[0] for name in self._communicator.copies}
        matrices, plan, squares, vectors = read_factors(state_dict["factors"], *self._shard(), copies)
        # A saved state may have tensors that other workers average here; see ``fsdp2.DividedState``.
        known = self._engine.tensors()
        plan = {key: renamed(part, rename) for key, part in plan.items()}
        nearest = {
            "format_version": FORMAT_VERSION,
            "iteration": state_dict["iteration"],
            "matrices": renamed(matrices, rename),
            "plan": {k: {n: v for n, v in p.items() if n in known or k == "settled"} for k, p in plan.items()},
        }
        errors: dict[str, DTensor] = {}
        if self._engine.given.error_feedback:
            found, needed = {**vectors, **state_dict["error"]}, self._matrices()
            for name in known:
                saved = saved_names.get(name, name)
                if saved in found and saved in squares and (name in needed or saved in vectors):
                    errors[name] = own_part(saved, found[saved], self._place(name))
                elif name in needed:
                    raise ValueError(f"the saved state has no error of {saved!r}; does it belong to another model?")
        return nearest, errors, renamed(squares, rename)

    def renamed(self, names: Mapping[str, str]) -> "ShardedHandle":
        """Return this state for ``dcp.load`` of a checkpoint with other names. ``names`` is {saved name: name here}."""
        unknown = sorted(set(names.values()) - self._matrices().keys())
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a trainable parameter of two or more dimensions of this model")
        view = copy.copy(self)
        view._names = dict(names)
        return view

    def _matrices(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of the tensors that have an error: matrices, and all tensors if they are quantized.

        It does not depend on what is chosen during the training, so that a job that has not chosen yet can load.
        """
        least = 2 if self._engine.given.quantize is None else 0
        return {name: tuple(shape) for name, shape in self._engine.tensors().items() if len(shape) >= least}


def in_own_group(communicator: Communicator, device: torch.device, node_group: NodeGroup = None) -> Communicator:
    """Return collectives of the same workers in a new group, where they do not wait for the framework's. Collective."""
    group = communicator.group
    ranks = dist.get_process_group_ranks(group)
    # All workers have to make a new group together. (Not so with use_local_synchronization=True. But then members that
    # have made different numbers of groups wait for each other forever.)
    if len(ranks) == dist.get_world_size():
        group = new_group(group, ranks, device)
    others = [workers.group for workers in communicator.others if workers.group is not None]
    return Communicator(group, others, node_group=node_group, copies=communicator.copies)
