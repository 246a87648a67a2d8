"""Shared by the adapters for sharded parameters: checkpoints with torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import datetime
import io
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from powersgd_triton.checkpoint import StateDict, unpickled
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.handle import FOUND, Folder, Handle
from powersgd_triton.core.saved_state import LoadReport, Size, check_version, is_part, listing
from powersgd_triton.layout.layout import compressed_rank, matrix_shape
from powersgd_triton.ops.reference import note_overflow

FOLDER = "powersgd"
"""The folder that ``save`` makes in a checkpoint's folder."""

FOREIGN = (
    "neither whole nor this worker's own. If one worker wrote the state with torch.save(), it has only that worker's "
    "shards. Write and read it on all workers: with save(folder) and load(folder), or with torch.distributed.checkpoint"
)


class Sharding(Protocol):
    """How the errors and factors of one model are sharded. Each adapter tells this to its checkpoints."""

    def place(self, name: str, error: Tensor) -> DTensor:
        """Return a mean error as a DTensor with the parameter's shape and sharding."""

    def fetch(self, error: DTensor) -> Tensor:
        """Return the rows of an error that this worker needs. Possibly collective."""

    def take(self, name: str, rows: Tensor) -> Tensor:
        """Return the matrix [n, m] that this worker compresses. With ``fetch`` it is the inverse of ``place``."""

    def shard(self) -> tuple[int, int]:
        """Return (index of this worker's shard, number of shards), counting shards with factors of their own."""

    def gather(self, factors: Any) -> list[Any]:
        """Return the factors of all shards in order. Collective."""


class ShardedHandle(Handle):
    """The compression of a model with sharded parameters. It is a ``Stateful`` of torch.distributed.checkpoint.

    Args:
        engine: Engine that averages the model's gradients.
        sharding: How errors and factors are sharded.
    """

    def __init__(self, engine: Engine, sharding: Sharding) -> None:
        super().__init__(engine)
        self._sharding = sharding

    def error_numel(self) -> int:
        """Return the number of elements of this worker's error buffers that exist so far."""
        matrices = self._engine.memory.matrices.values()
        return sum(matrix.error.numel() for matrix in matrices if matrix.error is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the mean error as DTensors placed like the parameters, the factors and the step. Collective.

        The result fits other meshes, numbers of workers and ranks, since it has an error for every parameter of two or
        more dimensions. On another mesh, a matrix starts from the basis of another saved shard. The basis is random if
        the saved one does not fit, which happens after a change in the number of tensor-parallel workers.
        """
        saved = self._engine.state_dict()
        errors: dict[str, DTensor] = {}
        if self.config.error_feedback:
            for name, shape in self._matrices().items():
                error = saved["matrices"].get(name, {}).pop("error", None)
                errors[name] = self._sharding.place(name, torch.zeros(shape) if error is None else error)
        parts = {
            name: {key: part.cpu() for key, part in parts.items()} for name, parts in sorted(saved["matrices"].items())
        }
        factors = io.BytesIO()
        content = {
            "version": saved["format_version"],
            "shards": self._sharding.gather(parts),
            "squares": weighted_squares(errors),
        }
        if self.config.planned:
            content["plans"] = self._sharding.gather(saved["plan"])
        torch.save(content, factors)
        # Factors are saved as bytes, since the number of shards and the rank may be different when they are loaded.
        return {"error": errors, "factors": factors.getvalue(), "iteration": saved["iteration"]}

    def load_state_dict(self, state_dict: StateDict, *, rename: Mapping[str, str] | None = None) -> LoadReport:
        """Continue from a saved state of any mesh and rank. Collective. ``dcp.load`` calls this method.

        Args:
            state_dict: Result of ``state_dict``. Errors may also be whole tensors, equal on all workers.
            rename: {saved name: name here}. With ``dcp.load``, use ``renamed`` instead.

        Returns:
            What was used of the state, and what was not.

        Raises:
            ValueError: A worker's state belongs to another model or another worker, or has another format. Nothing was
                changed.
            DisagreementError: Workers load different states, or do not all load one. Nothing was changed.
        """
        rename = rename or {}
        # Fetching errors may be collective, so that no worker may refuse its state alone before.
        nearest, errors, sums = self._together("load_state_dict", lambda: self._checked(state_dict, rename))
        found = weighted_squares(errors)
        fetched = {name: self._sharding.fetch(error) for name, error in errors.items()}

        def read() -> tuple[dict[str, Any], dict[str, Size]]:
            other = [
                name for name, total in found.items() if not math.isclose(total, sums.get(name, total), rel_tol=1e-6)
            ]
            if other:
                raise ValueError(f"the saved errors of {listing(other)} are {FOREIGN}")
            tensors: dict[str, Size] = {}
            matrices: dict[str, dict[str, Tensor]] = {}
            for name, shape in self._matrices().items():
                rank = compressed_rank(shape, self.config, name)
                tensors[name] = (*matrix_shape(shape), rank)
                error = self._sharding.take(name, fetched[name]).float() if name in fetched else None
                if rank == 0 and error is not None and error.any():
                    matrices[name] = {"error": error}
                if rank:
                    rows = dict(zip(("left_basis", "basis"), matrix_shape(shape), strict=True))
                    # A basis has other rows if tensor parallelism split the columns into another number of parts.
                    parts = {
                        key: part[:, :rank]
                        for key, part in nearest["matrices"].get(name, {}).items()
                        if part.shape[0] == rows[key]
                    }
                    if "basis" not in parts:
                        parts["basis"] = _random_basis(shape, rank)
                    matrices[name] = parts if error is None else {**parts, "error": error}
            return {**nearest, "tensors": tensors, "matrices": matrices}, tensors

        return self._engine.load_state_dict(read)

    def save(self, folder: Folder) -> None:
        """See ``Handle.save``. Writes with torch.distributed.checkpoint, on all workers."""
        path = Path(folder) / FOLDER
        new, old = path.with_suffix(".new"), path.with_suffix(".old")
        group, first_replica = self._together("save", self._holders)
        saved, communicator = self.state_dict(), self._everyone()

        def write() -> None:
            if group is None or first_replica:
                try:
                    dcp_save(saved, checkpoint_id=new, process_group=group)
                except CheckpointException as error:
                    raise OSError(f"the state cannot be written to {new}: {error}") from error

        def replace() -> None:
            # If this is interrupted, ``load`` finds the old state. One worker is the first one of all its groups.
            if all(workers.index == 0 for workers in (communicator, *communicator.others)):
                if path.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    path.rename(old)
                new.rename(path)
                shutil.rmtree(old, ignore_errors=True)

        self._together("save", write)
        self._together("save", replace)

    def load(self, folder: Folder, *, missing_ok: bool = False) -> LoadReport | None:
        """See ``Handle.load``."""
        path = Path(folder) / FOLDER
        found = self._together("load", lambda: [p.name for p in (path, path.with_suffix(".old")) if p.exists()], FOUND)
        if not found:
            self._begin_without(path, missing_ok)
            return None
        group, _ = self._together("load", self._holders)
        saved = self.state_dict()

        def read() -> None:
            try:
                dcp_load(saved, checkpoint_id=path.with_name(found[0]), process_group=group)
            except CheckpointException as error:
                raise ValueError(f"the saved state {path.with_name(found[0])} cannot be read: {error}") from error

        self._together("load", read)
        return self.load_state_dict(saved)

    def _holders(self) -> tuple[dist.ProcessGroup | None, bool]:
        """Return the group in which DCP saves and loads the whole state, and whether this is the first replica's.

        DCP needs one process group of all workers that it is called on. None is the default group, of all workers.

        Raises:
            ValueError: There is no such group.
        """
        communicator = self._everyone()
        every = [communicator, *communicator.others]
        groups = [workers for workers in every if workers.world_size > 1] or [communicator]
        if math.prod(workers.world_size for workers in groups) == dist.get_world_size():
            return None, True
        if len(groups) == 1:
            return groups[0].group, True
        # The model uses a part of the workers, as replicas of shards. Each replica has the whole state.
        if len(groups) == 2 and groups[0] is communicator:
            return groups[1].group, communicator.index == 0
        raise ValueError(
            "save and load need a process group of all workers of the model, and with tensor parallelism on "
            f"{math.prod(workers.world_size for workers in groups)} of {dist.get_world_size()} workers there is none; "
            "start the program on these workers only"
        )

    def _checked(
        self, state_dict: Any, rename: Mapping[str, str]
    ) -> tuple[dict[str, Any], dict[str, DTensor], dict[str, float]]:
        """Check a saved state as far as that is not collective.

        Returns:
            The factors of the saved shard that is nearest to this worker's, as a saved state; the errors that are
            needed; and what ``weighted_squares`` returned for the errors that were saved, if that is known.

        Raises:
            ValueError: See ``load_state_dict``.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"expected the result of state_dict(); got {type(state_dict).__name__}")
        missing = {"error", "factors", "iteration"} - state_dict.keys()
        if missing:
            raise ValueError(f"expected the result of state_dict(); {sorted(missing)} are missing")
        if not isinstance(state_dict["error"], Mapping):
            raise ValueError(f"expected errors as {{name: DTensor}}; got {type(state_dict['error']).__name__}")
        factors = _factors(state_dict["factors"])
        worker, workers = self._sharding.shard()
        # The saved shard that contained the first rows of this worker's shard, unless the number of tensor-parallel
        # workers changed. It is the same on all replicas.
        index = worker * len(factors.shards) // workers
        # A left basis has the rows of a shard, so it only fits the same number of shards.
        keys = ("basis", "left_basis") if len(factors.shards) == workers else ("basis",)
        nearest = {
            "format_version": factors.version,
            "iteration": state_dict["iteration"],
            "matrices": {
                rename.get(name, name): {key: parts[key] for key in keys if key in parts}
                for name, parts in factors.shards[index].items()
            },
            "plan": {
                key: {rename.get(n, n): value for n, value in part.items()}
                for key, part in factors.plans[index].items()
            },
        }
        saved_names = {new: old for old, new in rename.items()}
        errors: dict[str, DTensor] = {}
        if self.config.error_feedback:
            for name, shape in self._matrices().items():
                saved = saved_names.get(name, name)
                if saved not in state_dict["error"]:
                    raise ValueError(f"the saved state has no error of {saved!r}; does it belong to another model?")
                like = self._sharding.place(name, torch.zeros(shape))
                errors[name] = _own(saved, state_dict["error"][saved], like)
        return nearest, errors, {rename.get(name, name): total for name, total in factors.squares.items()}

    def renamed(self, names: Mapping[str, str]) -> Renamed:
        """Return this state for ``dcp.load`` of a checkpoint in which parameters have other names.

        Args:
            names: {saved name: name here}.

        Raises:
            ValueError: A name does not belong to a matrix of this model.
        """
        unknown = sorted(set(names.values()) - self._matrices().keys())
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a trainable parameter of two or more dimensions of this model")
        return Renamed(self, names)

    def _matrices(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of two or more dimensions."""
        return {name: tuple(shape) for name, shape in self._engine.tensors().items() if len(shape) > 1}

    def _note_overflow(self, averages: Tensor) -> None:
        """Set the verdict to 0 if averages that were changed after they were written no longer fit their dtype."""
        overflow = self._engine.step.overflow(averages.device)
        # Only fp16 has a smaller range than the factors.
        if overflow is not None and averages.dtype == torch.float16:
            note_overflow(averages, overflow)


class Renamed:
    """A sharded state whose parameters had other names when it was saved. See ``ShardedHandle.renamed``."""

    def __init__(self, state: ShardedHandle, names: Mapping[str, str]) -> None:
        self._state, self._names = state, dict(names)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the saved names. Collective."""
        saved_names = {new: old for old, new in self._names.items()}
        found = self._state.state_dict()
        return {**found, "error": {saved_names.get(name, name): error for name, error in found["error"].items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state that has the saved names."""
        self._state.load_state_dict(state_dict, rename=self._names)


class WholeParameters:
    """The sharding in which every worker compresses whole gradients of sharded parameters.

    Args:
        group: Process group of the workers that hold shards.
        mesh: Mesh of one dimension over these workers.
        shapes: Returns {name: shape} of the whole trainable parameters.

    Attributes:
        worker, workers: Index of this worker in the group, and the group's world size.
    """

    def __init__(
        self, group: dist.ProcessGroup, mesh: DeviceMesh, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> None:
        self.worker, self.workers = dist.get_rank(group), dist.get_world_size(group)
        self._mesh, self._shapes = mesh, shapes

    def place(self, name: str, error: Tensor) -> DTensor:
        shape = torch.Size(self._shapes()[name])
        first, behind = rows_of(self.worker, self.workers, shape[0])
        # A copy, since torch.save() does not take a DTensor whose part is a view.
        local = error.view(shape)[first:behind].to(self._mesh.device_type, copy=True)
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=contiguous_stride(shape)
        )  # fmt: skip

    def fetch(self, error: DTensor) -> Tensor:
        return error.full_tensor()

    def take(self, name: str, rows: Tensor) -> Tensor:
        return rows.reshape(matrix_shape(self._shapes()[name]))

    def shard(self) -> tuple[int, int]:
        return 0, 1

    def gather(self, factors: Any) -> list[Any]:
        return [factors]


def group_of_its_own(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return a new group of all workers, so that sums of factors do not queue behind the framework's collectives.

    If ``group`` does not contain all workers, return ``group``, since all workers have to create a new group together.
    (With use_local_synchronization=True they do not. But then members that have created different numbers of groups
    wait for each other forever.)
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        return group
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    # Keep the timeout of ``group``. None if its backend does not report it, which selects torch's default.
    timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
    new: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout)
    return new


def rows_of(worker: int, workers: int, rows: int) -> tuple[int, int]:
    """Return (first row, row after the last) of a worker's shard on dim 0, sharded as FSDP2 does."""
    each = -(-rows // workers)
    return min(worker * each, rows), min((worker + 1) * each, rows)


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    shape = tuple(shape)
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def weighted_squares(errors: Mapping[str, DTensor]) -> dict[str, float]:
    """Return Σ_ij w_ij E_ij² of each error over all shards, computed in fp64. Collective.

    It tells whether all workers have the shards that were saved. The weights grow with the first two indices, so the
    sums also change if workers have each other's shards.
    """
    placed: dict[tuple[DeviceMesh, Any], dict[str, Tensor]] = {}
    for name, error in errors.items():
        mesh = error.device_mesh
        squares: Any = error.detach().double().square()
        for dim in range(2):
            shape = [1] * error.dim()
            shape[dim] = error.shape[dim]
            weights = torch.linspace(1, 2 + dim, error.shape[dim], dtype=torch.float64, device=mesh.device_type)
            squares = squares * DTensor.from_local(
                weights.view(shape), mesh, [Replicate()] * mesh.ndim, run_check=False
            )
        # Not the error's placements: DTensor gathers what has fewer rows than there are workers.
        placed.setdefault((mesh, squares.placements), {})[name] = squares.to_local().sum()
    totals: dict[str, float] = {}
    for (mesh, placements), sums in placed.items():
        stacked = torch.stack(list(sums.values()))
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(stacked, group=mesh.get_group(dim))
        totals.update(zip(sums, stacked.tolist(), strict=True))
    return totals


def _own(name: str, error: Any, like: DTensor) -> DTensor:
    """Return a saved error as this worker's part of a DTensor like ``like``.

    Raises:
        ValueError: It is neither this worker's part nor whole.
    """
    if not isinstance(error, Tensor) or error.shape != like.shape:
        what = tuple(error.shape) if isinstance(error, Tensor) else type(error).__name__
        raise ValueError(f"the saved error of {name!r} must be a tensor of shape {tuple(like.shape)}; got {what}")
    if not isinstance(error, DTensor):
        return distribute_tensor(error.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    places = [(part.device_mesh, part.placements, part.to_local().shape) for part in (error, like)]
    if places[0] != places[1]:
        raise ValueError(f"the saved error of {name!r} is {FOREIGN}")
    # Not its own mesh, which may have the process groups of the worker that pickled it.
    return DTensor.from_local(
        error.to_local(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class Factors(NamedTuple):
    """What a sharded state saves as bytes.

    Attributes:
        version: Format version.
        shards: {name: parts} of each shard.
        plans: Plan of each shard, empty if ranks are not planned.
        squares: Result of ``weighted_squares``. Empty if an earlier version has saved the state.
    """

    version: int
    shards: list[Any]
    plans: list[Any]
    squares: dict[str, float]


def _factors(content: Any) -> Factors:
    """Read the factors of a saved state.

    Raises:
        ValueError: They cannot be read, or have another format.
    """
    try:
        found = unpickled(content)
    # Damaged content can make the reader raise anything.
    except Exception as error:
        raise ValueError(f"the factors in the saved state cannot be read: {error!r}") from error
    if not isinstance(found, Mapping) or not isinstance(found.get("shards"), list):
        raise ValueError("the factors in the saved state must have a version and a list of shards")
    check_version(found.get("version"))
    shards = found["shards"]
    plans = found.get("plans", [{}] * len(shards))
    plans = plans if isinstance(plans, list) else [plans]
    bases = [parts for shard in shards for parts in (shard.values() if isinstance(shard, Mapping) else [None])]
    values = [part for parts in bases for part in (parts.values() if isinstance(parts, Mapping) else [None])]
    if not shards or not all(map(is_part, values)):
        raise ValueError("the factors of each shard must be {name: {part: matrix}}")
    parts = [part for plan in plans for part in (plan.values() if isinstance(plan, Mapping) else [None])]
    if len(plans) != len(shards) or not all(isinstance(part, Mapping) for part in parts):
        raise ValueError("the plans in the saved state must be one {part: {name: value}} for each shard")
    squares = found.get("squares", {})
    if not isinstance(squares, Mapping) or not all(isinstance(total, float) for total in squares.values()):
        raise ValueError("the squares in the saved state must be {name: number}")
    return Factors(found["version"], shards, plans, dict(squares))


def _random_basis(shape: tuple[int, ...], rank: int) -> Tensor:
    """Return a basis, equal on all workers, for a matrix that was not compressed when the state was saved."""
    generator = torch.Generator().manual_seed(0)
    basis: Tensor = torch.linalg.qr(torch.randn(matrix_shape(shape)[1], rank, generator=generator))[0]
    return basis
