"""The content of a sharded model's saved state: errors of this worker, and the factors of all shards."""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from powersgd_triton.checkpoint import pickled, unpickled
from powersgd_triton.core.saved_state import check_version, is_part
from powersgd_triton.layout.matrices import Size
from powersgd_triton.ops.gradients import real_shape

FOREIGN = (
    "neither whole nor this worker's own. If one worker wrote the state with torch.save(), it has only that worker's "
    "shards. Write and read it on all workers: with save(folder) and load(folder), or with torch.distributed.checkpoint"
)


def weighted_squares(errors: Mapping[str, DTensor]) -> dict[str, float]:
    """Return Σ_ij w_ij E_ij² of each error over all shards, computed in fp64. Collective.

    The weights grow with the first two indices, so the sums tell whether each worker has the shard that it saved.
    """
    alike: dict[tuple[DeviceMesh, Any], dict[str, Tensor]] = {}
    for name, error in errors.items():
        mesh, squares = error.device_mesh, error.to_local().detach().double().square()
        for dim in range(min(2, error.dim())):
            weights = torch.linspace(1, 2 + dim, error.shape[dim], dtype=torch.float64, device=mesh.device_type)
            weights = weights.view([-1 if other == dim else 1 for other in range(error.dim())])
            # This worker's part of them, without the second that DTensor takes for its first product.
            # Not ``is_shard``: it is false where FSDP divides what tensor parallelism divides along the same dimension.
            along = [part if getattr(part, "dim", None) == dim else Replicate() for part in error.placements]
            squares *= distribute_tensor(weights, mesh, along, src_data_rank=None).to_local()
        alike.setdefault((mesh, error.placements), {})[name] = squares.sum()
    totals: dict[str, float] = {}
    for (mesh, placements), sums in alike.items():
        stacked = torch.stack(list(sums.values()))
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(stacked, group=mesh.get_group(dim))
        totals.update(zip(sums, stacked.tolist(), strict=True))
    return totals


def own_part(name: str, error: Any, like: DTensor) -> DTensor:
    """Return a saved error as a DTensor like ``like``. ValueError if it is neither whole nor this worker's part."""
    if not isinstance(error, Tensor) or error.shape != like.shape:
        what = tuple(error.shape) if isinstance(error, Tensor) else type(error).__name__
        raise ValueError(f"the saved error of {name!r} must be a tensor of shape {tuple(like.shape)}; got {what}")
    if not isinstance(error, DTensor):
        return distribute_tensor(error.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    if _place(error) != _place(like):
        raise ValueError(f"the saved error of {name!r} is {FOREIGN}")
    # Not its own mesh, which may have the process groups of the worker that pickled it.
    return placed(error.to_local(), like.device_mesh, like.placements, like.shape)


def _place(part: DTensor) -> tuple[Any, ...]:
    """Return where a worker's part lies. It is equal on all replicas, whose meshes differ for torch 2.9."""
    mesh = part.device_mesh
    return mesh.device_type, mesh.mesh_dim_names, tuple(mesh.shape), part.placements, part.to_local().shape


def placed(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return a contiguous DTensor of this shape from this worker's part."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


class Part(NamedTuple):
    """This worker's part of an error: ``length`` elements of a dimension from ``first`` on, and the DTensor of it.

    ``workers``: those that compress the error as a whole, of which each keeps its shard along ``dim``. None if each
    worker compresses its own part, which is padded.
    """

    dim: int
    first: int
    length: int
    mesh: DeviceMesh
    placements: Sequence[Placement]
    shape: Sequence[int]
    workers: DeviceMesh | None = None

    def of(self, error: Tensor) -> DTensor:
        """Return this worker's part of an error with the shape in which it is compressed."""
        own = error.narrow(self.dim, self.first, self.length)
        # A copy, since torch.save() does not take a DTensor whose part is a view.
        local = own.to(self.mesh.device_type, copy=True).contiguous()
        return placed(local, self.mesh, self.placements, self.shape)

    def whole(self, part: DTensor, shape: Sequence[int]) -> Tensor:
        """Return an error as it is compressed, from the parts of all workers, without padding. Possibly collective."""
        if self.workers is None:
            return part.to_local()
        # Not the error as a whole: other workers have other experts, or other parts of a tensor-parallel matrix.
        return placed(part.to_local(), self.workers, [Shard(self.dim)], shape).full_tensor()


def cut(whole: int, workers: DeviceMesh) -> tuple[int, int]:
    """Return (first, length) of this worker's part of a dimension, as FSDP2 shards it over a one-dimensional mesh."""
    size = -(-whole // workers.size())
    first = min(workers.get_local_rank() * size, whole)
    return first, min(size, whole - first)


def no_error(found: Any) -> DTensor:
    """Return an error of zeros, placed like the parameter that an object of FSDP2 has now."""
    parameter = found.sharded_param
    shape = real_shape(parameter.to_local().shape, parameter.dtype)
    local = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    return placed(local, parameter.device_mesh, parameter.placements, real_shape(parameter.shape, parameter.dtype))


def join(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the saved states of one model's parts as one. ``read_factors`` reads its factors."""
    factors = pickled({"joined": [state["factors"] for state in states]})
    errors = {name: error for state in states for name, error in state["error"].items()}
    return {"error": errors, "factors": factors, "iteration": max(state["iteration"] for state in states)}


def read_factors(
    content: Any, worker: int, workers: int, copies: Mapping[str, int]
) -> tuple[Any, Any, dict[str, float], dict[str, Any]]:
    """Return {name: parts} and the plan of one saved shard, the squares, and whole errors of vectors.

    ``copies`` has the index of the worker whose shard is read instead, for tensors that must be equal on several.
    ValueError: They have another format.
    """
    try:
        found = unpickled(content)
    # Damaged content can make the reader raise anything.
    except Exception as error:
        raise ValueError(f"the factors in the saved state cannot be read: {error!r}") from error
    if isinstance(found, Mapping) and isinstance(found.get("joined"), list):
        parts = [read_factors(part, worker, workers, copies) for part in found["joined"]]
        plan: dict[str, Any] = {}
        for key, ours in (item for part in parts for item in part[1].items()):
            plan[key] = plan.get(key, {}) | ours
        whole: list[dict[str, Any]] = [{n: v for part in parts for n, v in part[i].items()} for i in (0, 2, 3)]
        return whole[0], plan, whole[1], whole[2]
    if not isinstance(found, Mapping) or not isinstance(found.get("shards"), list):
        raise ValueError("the factors in the saved state must have a version and a list of shards")
    check_version(found.get("version"))
    shards = found["shards"]
    plans = found.get("plans", [{}] * len(shards))
    plans = plans if isinstance(plans, list) else [plans]
    if not shards or not all(map(is_part, _values(_values(shards)))):
        raise ValueError("the factors of each shard must be {name: {part: matrix}}")
    if len(plans) != len(shards) or not all(isinstance(part, Mapping) for part in _values(plans)):
        raise ValueError("the plans in the saved state must be one {part: {name: value}} for each shard")
    squares = found.get("squares")
    if not isinstance(squares, Mapping) or not all(isinstance(total, float) for total in squares.values()):
        raise ValueError("the squares in the saved state must be {name: number}")
    vectors = found.get("vectors", {})
    if not isinstance(vectors, Mapping):
        raise ValueError("the errors of vectors in the saved state must be {name: tensor}")
    # The one with the first rows of this worker's shard, unless the number of tensor-parallel workers changed.
    index = worker * len(shards) // workers
    place = {name: other * len(shards) // workers for name, other in copies.items()}
    chosen = {name: shards[place.get(name, index)].get(name, parts) for name, parts in shards[index].items()}
    plan = {
        key: {name: plans[place.get(name, index)].get(key, {}).get(name, value) for name, value in part.items()}
        for key, part in plans[index].items()
    }
    # A left basis has the rows of a shard, so it only fits the same number of shards.
    keys = ("basis", "left_basis") if len(shards) == workers else ("basis",)
    matrices = {name: {key: parts[key] for key in keys if key in parts} for name, parts in chosen.items()}
    return matrices, plan, dict(squares), dict(vectors)


def fitting(saved: Mapping[str, Tensor], size: Size, error: Tensor | None) -> dict[str, Tensor]:
    """Return the parts of a tensor of this size: its error, and the bases if the right one fits."""
    n, m, rank, count = size
    # A basis has other rows if tensor parallelism split the columns into another number of parts.
    lengths = {"left_basis": count * n, "basis": count * m}
    parts = {key: part[:, :rank] for key, part in saved.items() if rank and part.shape[0] == lengths[key]}
    if "basis" not in parts:
        parts = {}
    if error is not None and (parts or error.any()):
        # The rows of a shard are padded.
        parts["error"] = torch.nn.functional.pad(error, (0, size.rows * m - len(error))).view(size.rows, m)
    return parts


def _values(mappings: list[Any]) -> list[Any]:
    """Return the values of all mappings, and None for what is not a mapping."""
    return [value for each in mappings for value in (each.values() if isinstance(each, Mapping) else [None])]


def remove(path: Path) -> None:
    """Remove a folder, if it is there, or the file or the link in its place, but not what a link leads to."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
