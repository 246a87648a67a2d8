"""What the adapters for sharded training share: steps and statistics, and checkpoints of errors and factors."""

from __future__ import annotations

import abc
import datetime
import io
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.loss_scale import LossScaleSource
from powersgd_triton.core.reducer import Reducer
from powersgd_triton.core.saved_state import FORMAT_VERSION, Size
from powersgd_triton.core.state import State
from powersgd_triton.layout.layout import Layout, compressed_rank, matrix_shape
from powersgd_triton.ops.reference import note_overflow
from powersgd_triton.ranks.report import RankReport

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it, as ``torch.distributed.checkpoint`` has it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def rows_of(worker: int, workers: int, rows: int) -> tuple[int, int]:
    """(first, behind the last) of a tensor's rows that a worker holds where dim 0 is sharded, as FSDP2 does it."""
    each = -(-rows // workers)
    return min(worker * each, rows), min((worker + 1) * each, rows)


class StepState(abc.ABC):
    """Configuration and memory of one model's compression: what needs no knowledge of how the model is sharded.

    Args:
        config: what to compress and how.
        communicator: whom to average with.
        others: further workers that compress the same model, see ``Reducer``.

    Raises:
        TypeError: ``config`` is no configuration.
    """

    def __init__(self, config: PowerSGDConfig, communicator: Communicator, others: Sequence[Communicator] = ()) -> None:
        check_config(config)
        self.config = config
        self._communicator = communicator
        self._core = State(config)
        self._others = tuple(others)
        self._reducer = Reducer(self._core, self._communicator, others)
        self._seen: set[Hashable] = set()
        self._device: torch.device | None = None
        # Whether workers wrote different parts of averages that may not fit.
        self._unequal = False
        self._before = self._after = 0

    @property
    def iteration(self) -> int:
        """Number of steps done. A step is what lies between two averages of the same gradients."""
        return self._core.iteration + bool(self._seen)

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, elements before, elements after) over all compressed steps so far; rate 0 before the first."""
        return (self._before / self._after if self._after else 0.0, self._before, self._after)

    def layout(self) -> Layout:
        """All tensors in one layout, with the ranks that they have now."""
        return self._core.layout(self._tensors())

    def error_numel(self) -> int:
        """Elements of this worker's error buffers, as far as they have been made."""
        return sum(matrix.error.numel() for matrix in self._core.matrices.values() if matrix.error is not None)

    def report(self) -> RankReport:
        """Which parameters are compressed, at which rank, and the bytes of a step; ``print`` it.

        Where parameters are sharded and shards are compressed, these are of this worker's shard.
        """
        return self._core.report(self._tensors())

    @abc.abstractmethod
    def _tensors(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of all trainable parameters, as this worker compresses them."""

    def attach(self, scaler: LossScaleSource) -> None:
        """Let the error follow the loss scale of a gradient scaler, or one that a function returns.

        Raises:
            TypeError: it is neither.
        """
        self._core.attach(scaler)

    def error(self) -> dict[str, Tensor]:
        """{name: E as a matrix}: what this worker still owes, without loss scale; copies. Collective.

        Empty without error feedback.
        """
        self._end_step()
        return self._core.error()

    # A step -----------------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        if self._seen:
            self._seen.clear()
            if self._device is not None and self._core.iteration >= self.config.start_iter:
                # Who shares sums sees the same; others may have seen another gradient overflow. Who writes a part of
                # an average sees whether that part fits.
                for other in [*self._others, *([self._communicator] if self._unequal else [])]:
                    other.minimum(self._core.verdict(self._device))
            self._unequal = False
            self._reducer.end_step()

    def _compress(
        self,
        layout: Layout,
        gradients: Mapping[str, Tensor],
        ranges: Mapping[str, tuple[int, Tensor]] | None = None,
    ) -> None:
        """Average one unit's gradients in place, or those ranges of the averages."""
        layout = self._core.plan.layout(layout)
        if ranges is not None and self._core.follows_loss_scale:
            self._unequal |= any(_narrow(gradient) for gradient in gradients.values())
        self._before += layout.numel
        self._after += layout.sent_numel(self.config, self._core.iteration)
        self._reducer.reduce(layout, gradients, last=True, done=_nothing, ranges=ranges)

    def _note_overflow(self, averages: Tensor) -> None:
        """Where averages that were written are changed: the step is not finite if they no longer fit their dtype."""
        if _narrow(averages):
            verdict = self._core.verdict(averages.device)
            note_overflow(averages, self._core.verdict_on_averages(verdict))


class ShardedState(StepState):
    """A sharded model's state, usable as a ``Stateful`` of DCP.

    Args:
        config: what to compress and how.
        group: whom to average with.
        others: further workers that compress the same model, see ``Reducer``.

    Raises:
        TypeError: ``config`` is no configuration.
    """

    def __init__(
        self, config: PowerSGDConfig, group: dist.ProcessGroup | None, others: Sequence[Communicator] = ()
    ) -> None:
        check_config(config)
        super().__init__(config, Communicator(group), others)

    def _begin_plan(self) -> None:
        """Once ``_tensors`` is known. Raises: ValueError: the configuration's budget is too small."""
        self._core.plan.begin(self._tensors())

    def _begin(self, unit: Hashable, device: torch.device) -> bool:
        """Whether the gradients of a unit are to be compressed. A unit that comes again begins a new step."""
        if self._device is None:
            self._reducer.check(self._matrices(), device)
            self._device = device
        if unit in self._seen:
            self._end_step()
        self._seen.add(unit)
        return self._core.iteration >= self.config.start_iter

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The mean error as DTensors placed like their parameters, factors and the step, for DCP. Collective.

        It fits other meshes, numbers of workers and ranks: every parameter of two or more dimensions has its error in
        it, and on another mesh a matrix starts from the basis of the saved shard that overlaps with its own.
        """
        self._end_step()
        saved = self._core.state_dict(self._communicator.mean)
        errors: dict[str, DTensor] = {}
        if self.config.error_feedback:
            for name, shape in self._matrices().items():
                error = saved["matrices"].get(name, {}).pop("error", None)
                errors[name] = self._place(name, torch.zeros(shape) if error is None else error)
        parts = {
            name: {key: part.cpu() for key, part in parts.items()} for name, parts in sorted(saved["matrices"].items())
        }
        factors = io.BytesIO()
        content = {"version": saved["format_version"], "shards": self._gather(parts)}
        if self.config.planned:
            content["plans"] = self._gather(saved["plan"])
        torch.save(content, factors)
        # Bytes, since the number of shards and the rank may be others when they are loaded.
        return {"error": errors, "factors": factors.getvalue(), "iteration": saved["iteration"]}

    def renamed(self, names: Mapping[str, str]) -> Renamed:
        """This state as a checkpoint knows it in which parameters had other names, for ``dcp.load``.

        Args:
            names: {saved name: name here}.

        Raises:
            ValueError: a name is not a matrix of this model.
        """
        unknown = sorted(set(names.values()) - self._matrices().keys())
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no trainable parameter of two or more dimensions of this model")
        return Renamed(self, names)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, rename: Mapping[str, str] | None = None) -> None:
        """Go on from a saved state, of any mesh and rank. ``dcp.load`` calls it.

        Args:
            state_dict: from ``state_dict``.
            rename: {saved name: name here}; for ``dcp.load`` see ``renamed``.

        Raises:
            ValueError: it is of another model or format. Nothing was changed.
        """
        missing = {"error", "factors", "iteration"} - set(state_dict)
        if missing:
            raise ValueError(f"expected what state_dict() gave; {sorted(missing)} are missing")
        factors = torch.load(io.BytesIO(state_dict["factors"]), weights_only=True)
        if factors["version"] != FORMAT_VERSION:
            raise ValueError(f"expected factors of format {FORMAT_VERSION}; got {factors['version']!r}")
        worker, workers = self._shard()
        shards = factors["shards"]
        # The saved shard in which this one's first rows were; the same one on all replicas.
        index = worker * len(shards) // workers
        nearest, plan = shards[index], factors["plans"][index] if "plans" in factors else {}
        saved_names = {new: old for old, new in (rename or {}).items()}
        plan = {key: {(rename or {}).get(n, n): value for n, value in part.items()} for key, part in plan.items()}
        tensors: dict[str, Size] = {}
        matrices: dict[str, dict[str, Tensor]] = {}
        for name, shape in self._matrices().items():
            rank, saved = compressed_rank(shape, self.config, name), saved_names.get(name, name)
            tensors[name] = (*matrix_shape(shape), rank)
            error = None
            if self.config.error_feedback:
                if saved not in state_dict["error"]:
                    raise ValueError(f"the saved state has no error of {saved!r}; is it of another model?")
                error = self._take(name, state_dict["error"][saved]).float()
                if rank == 0 and error.any():
                    matrices[name] = {"error": error}
            if rank:
                bases = {key: part[:, :rank].contiguous() for key, part in nearest.get(saved, {}).items()}
                # Left bases have the rows of a shard.
                parts = bases if len(shards) == workers else {}
                parts["basis"] = bases["basis"] if "basis" in bases else _random_basis(shape, rank)
                matrices[name] = parts if error is None else {**parts, "error": error}
        self._core.load_state_dict(
            {
                "format_version": FORMAT_VERSION,
                "iteration": state_dict["iteration"],
                "tensors": tensors,
                "matrices": matrices,
                "plan": plan,
            },
            tensors,
        )
        self._seen.clear()

    # What an adapter knows --------------------------------------------------------------------------------------

    def _matrices(self) -> dict[str, tuple[int, ...]]:
        """Those of two or more dimensions."""
        return {name: shape for name, shape in self._tensors().items() if len(shape) > 1}

    @abc.abstractmethod
    def _place(self, name: str, error: Tensor) -> DTensor:
        """The mean error as a tensor of the parameter's shape, sharded like it."""

    @abc.abstractmethod
    def _take(self, name: str, error: DTensor) -> Tensor:
        """The inverse of ``_place``: the matrix [n, m] that this worker compresses."""

    def _shard(self) -> tuple[int, int]:
        """(index, number) of shards that have factors of their own."""
        return 0, 1

    def _gather(self, factors: Any) -> list[Any]:
        """The factors of all shards in their order."""
        return [factors]


class Renamed:
    """A sharded state whose parameters had other names when it was saved; see ``ShardedState.renamed``."""

    def __init__(self, state: ShardedState, names: Mapping[str, str]) -> None:
        self._state, self._names = state, dict(names)

    def state_dict(self) -> dict[str, Any]:
        """As it was saved. Collective."""
        saved_names = {new: old for old, new in self._names.items()}
        found = self._state.state_dict()
        return {**found, "error": {saved_names.get(name, name): error for name, error in found["error"].items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from it."""
        self._state.load_state_dict(state_dict, rename=self._names)


class FullSizeState(ShardedState):
    """A state whose matrices are whole parameters on every worker, while the parameters themselves are sharded.

    Args:
        config: what to compress and how.
        group: the workers that hold shards. Where they are all workers, what is sent travels in a new group of them, so
            that it does not queue behind the framework's collectives; else in this one.
        mesh: a mesh of one dimension over these workers.
    """

    def __init__(self, config: PowerSGDConfig, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
        check_config(config)
        ranks = dist.get_process_group_ranks(group)
        # A new group must be made by all workers there are. (With use_local_synchronization=True it need not, but then
        # members that know different numbers of groups wait for each other for ever.)
        if len(ranks) == dist.get_world_size():
            super().__init__(config, dist.new_group(ranks, timeout=_timeout(group, mesh.device_type)))
        else:
            super().__init__(config, group)
        self._worker, self._workers = dist.get_rank(group), dist.get_world_size(group)
        self._mesh = mesh

    def _place(self, name: str, error: Tensor) -> DTensor:
        shape = torch.Size(self._matrices()[name])
        first, behind = rows_of(self._worker, self._workers, shape[0])
        local = error.view(shape)[first:behind].to(self._mesh.device_type)
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=contiguous_stride(shape)
        )  # fmt: skip

    def _take(self, name: str, error: DTensor) -> Tensor:
        return error.full_tensor().reshape(matrix_shape(self._matrices()[name]))


def _timeout(group: dist.ProcessGroup, device_type: str) -> datetime.timedelta | None:
    """How long a group waits for a peer; None where its backend does not say, for torch's default."""
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
    return timeout


def check_config(config: PowerSGDConfig) -> None:
    """Raises: TypeError: it is no configuration."""
    if not isinstance(config, PowerSGDConfig):
        raise TypeError(f"config must be a PowerSGDConfig; got {type(config).__name__}")


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    shape = tuple(shape)
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _random_basis(shape: tuple[int, ...], rank: int) -> Tensor:
    """The same on all workers, for a matrix that was not compressed where the state was saved."""
    generator = torch.Generator().manual_seed(0)
    basis: Tensor = torch.linalg.qr(torch.randn(matrix_shape(shape)[1], rank, generator=generator))[0]
    return basis


def _narrow(gradient: Tensor) -> bool:
    """Whether factors in range may have an average out of the gradient's, other than next to the largest fp32."""
    return gradient.dtype == torch.float16


def _nothing() -> None:
    """What is to be done once the averages are written."""
