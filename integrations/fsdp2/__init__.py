"""FSDP2 (``fully_shard``): compression across replicas (HSDP), or across the workers that hold shards (1-D).

from powersgd_triton.integrations.fsdp2 import apply_powersgd
mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh["shard"])
powersgd = apply_powersgd(model, PowerSGDConfig(rank=4), replicate_group=mesh["replicate"].get_group())
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.fsdp2.replicas import broadcast_from_first, unequal_tensors
from powersgd_triton.integrations.fsdp2.units import Unit, find_units
from powersgd_triton.integrations.sharded import (
    FullSizeState,
    ShardedState,
    check_config,
    contiguous_stride,
    rows_of,
)
from powersgd_triton.layout.layout import matrix_shape

__all__ = ["FullShardState", "HybridShardState", "apply_powersgd"]


def apply_powersgd(
    model: nn.Module, config: PowerSGDConfig, replicate_group: dist.ProcessGroup | None = None
) -> HybridShardState | FullShardState:
    """Compress the gradients of a model to which ``fully_shard`` was applied. Call it once, before the first step.

    With ``replicate_group`` (HSDP) the model is sharded on a mesh's shard dimension alone. FSDP reduce-scatters inside
    the shard group as ever, and each worker's shard of the gradients is averaged over the replicas in compressed form.
    Parameters and buffers are overwritten with those of the first replica.

    Without it (1-D) compression takes the reduce-scatter's place. Every worker then has an error buffer of the whole
    model's size; prefer HSDP where there is memory for the shards of a model on fewer workers.

    Args:
        model: the root module; blocks of it may have been given to ``fully_shard`` too.
        config: what to compress and how.
        replicate_group: the workers that hold the same shard, ``mesh["replicate"].get_group()``.

    Returns:
        The compression's state, for checkpoints and statistics.

    Raises:
        TypeError: ``config`` is no configuration.
        ValueError: the model is not sharded, or in a way that is not supported, or ``apply_powersgd`` was called
            before, or the configuration's budget is too small. The message says what to do; nothing was changed.
        RuntimeError: this torch is too old, or the group cannot be used.
    """
    check_config(config)
    _check_torch("set_all_reduce_hook" if replicate_group is not None else "set_custom_reduce_scatter")
    units = find_units(model, config, replicate_group)
    if replicate_group is None:
        flat = FullShardState(model, config, units)
        for unit in units:
            unit.module.set_custom_reduce_scatter(_reduce_scatter(flat, unit))
        return flat
    state = HybridShardState(model, config, units, replicate_group)
    broadcast_from_first(model, replicate_group)
    for unit in units:
        unit.module.set_all_reduce_hook(functools.partial(state._all_reduce, unit))
    return state


def _check_torch(method: str) -> None:
    if not hasattr(FSDPModule, method):
        raise RuntimeError(f"FSDPModule.{method} is needed, which torch {torch.__version__} lacks; install a newer one")


class HybridShardState(ShardedState):
    """Compression across replicas of each worker's shard of the gradients; made by ``apply_powersgd``.

    Gradient accumulation works as with FSDP's own HSDP: ``model.set_requires_gradient_sync(False)`` for all but the
    last micro-batch communicates nothing, ``model.set_requires_all_reduce(False)`` reduce-scatters and keeps the sums
    (one fp32 shard of the gradients) until a backward pass with ``True``.
    """

    def __init__(
        self, model: nn.Module, config: PowerSGDConfig, units: list[Unit], replicate_group: dist.ProcessGroup
    ) -> None:
        self._shard_group = units[0].shard_group
        super().__init__(config, replicate_group, [Communicator(self._shard_group)])
        self._model, self._units, self._group = model, units, replicate_group
        self._unreduced: dict[Unit, Tensor] = {}
        self._begin_plan()

    def check_replicas(self) -> None:
        """Compare parameters and buffers of all replicas, bit by bit. Collective.

        Raises:
            RuntimeError: they are not the same; names them.
        """
        names = unequal_tensors(self._model, self._group)
        if names:
            raise RuntimeError(
                f"replicas differ in {len(names)} tensors, the first of them {names[:3]}. They are equal after "
                "apply_powersgd and stay so if every worker loads the same checkpoint and takes the same steps"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any], *, rename: Mapping[str, str] | None = None) -> None:
        """As for every state; gradients of micro-batches that were not averaged yet are forgotten."""
        super().load_state_dict(state_dict, rename=rename)
        self._unreduced.clear()

    @torch.no_grad()
    def _all_reduce(self, unit: Unit, output: Tensor) -> None:
        """FSDP's hook: ``output`` is what the reduce-scatter gave this worker, and what FSDP goes on with."""
        if output.is_cuda:
            output.record_stream(torch.cuda.current_stream(output.device))
        earlier = self._unreduced.pop(unit, None)
        if earlier is not None and earlier.numel() != output.numel():
            raise RuntimeError(
                "other parameters than in the micro-batch before had a gradient; call "
                "model.set_reduce_scatter_unused_params(True) where micro-batches use different ones"
            )
        buffer = output if earlier is None else earlier.add_(output)
        if not unit.parameter_group.all_reduce_grads:
            wide = torch.promote_types(output.dtype, torch.float32)
            self._unreduced[unit] = output.to(wide, copy=True) if earlier is None else earlier
            output.zero_()
            return
        self._average(unit, buffer)
        factor = 1
        if getattr(unit.parameter_group, "gradient_divide_factor", None) is not None:
            # What the user divides by counts all workers.
            factor = self._communicator.world_size
            buffer.mul_(factor)
        if buffer is not output:
            output.copy_(buffer)
        if output.dtype != buffer.dtype or factor > 1:
            self._note_overflow(output)

    def _average(self, unit: Unit, buffer: Tensor) -> None:
        layout = unit.layout(padded=True)
        # Where a parameter had no gradient, FSDP leaves it out and does not say which one it was.
        whole = layout.numel == buffer.numel()
        if not self._begin(unit, buffer.device) or not whole:
            self._reducer.average(buffer, last=True, done=lambda: None)
            return
        views = {s.name: buffer[s.offset : s.offset + s.numel].view(s.shape) for s in layout.segments}
        self._compress(layout, views)

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        return {s.name: s.shape for unit in self._units for s in unit.layout(padded=True).segments}

    def _parameter(self, name: str) -> DTensor:
        return next(unit.parameters[name] for unit in self._units if name in unit.parameters)

    def _place(self, name: str, error: Tensor) -> DTensor:
        parameter = self._parameter(name)
        local = parameter.to_local()
        rows = error.view(-1, *local.shape[1:])[: local.shape[0]].to(parameter.device_mesh.device_type)
        return DTensor.from_local(
            rows.contiguous(), parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=contiguous_stride(parameter.shape),
        )  # fmt: skip

    def _take(self, name: str, error: DTensor) -> Tensor:
        n, m = matrix_shape(self._matrices()[name])
        local = error.to_local()
        matrix = local.new_zeros(n, m)
        matrix[: local.shape[0]] = local.reshape(-1, m)
        return matrix

    def _shard(self) -> tuple[int, int]:
        return dist.get_rank(self._shard_group), dist.get_world_size(self._shard_group)

    def _gather(self, factors: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(self._shard_group)
        dist.all_gather_object(gathered, factors, group=self._shard_group)
        return gathered


class FullShardState(FullSizeState):
    """Compression of whole gradients, of which each worker keeps its shard; made by ``apply_powersgd``."""

    def __init__(self, model: nn.Module, config: PowerSGDConfig, units: list[Unit]) -> None:
        super().__init__(
            config, units[0].shard_group, units[0].parameter_group.fsdp_params[0].sharded_param.device_mesh
        )
        self._model, self._units = model, units
        self._begin_plan()

    @torch.no_grad()
    def _reduce_scatter(self, unit: Unit, output: Tensor, sent: Tensor, default: Any, **how: Any) -> None:
        """``sent`` is [workers, shard], where a shard has each parameter's rows of one worker, padded."""
        padded = unit.layout(padded=True)
        compressing = self._begin(unit, output.device)
        if how["op"] not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(
                f"expected sums or means over workers, FSDP asks for {how['op']}; where set_gradient_divide_factor is "
                "used, call set_force_sum_reduction_for_comms(True) on the same modules"
            )
        if not compressing or padded.numel != output.numel():
            default(output_tensor=output, input_tensor=sent, **how)
            return
        layout = unit.layout(padded=False)
        shards = sent.view(self._workers, -1)
        memory = sent.new_empty(layout.numel)
        gradients: dict[str, Tensor] = {}
        ranges: dict[str, tuple[int, Tensor]] = {}
        for whole, part in zip(layout.segments, padded.segments, strict=True):
            gradient = gradients[whole.name] = memory[whole.offset : whole.offset + whole.numel].view(whole.shape)
            columns = shards[:, part.offset : part.offset + part.numel]
            gradient.copy_(columns.reshape(-1, *part.shape[1:])[: whole.shape[0]])
            first, behind = rows_of(self._worker, self._workers, whole.shape[0])
            width = part.numel // part.shape[0]
            mine = output[part.offset : part.offset + part.numel]
            mine[(behind - first) * width :].zero_()
            ranges[whole.name] = (first * width, mine[: (behind - first) * width])
        self._compress(layout, gradients, ranges)
        if how["op"] == dist.ReduceOp.SUM:
            self._note_overflow(output.mul_(self._workers))

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        return {s.name: s.shape for unit in self._units for s in unit.layout(padded=False).segments}


def _reduce_scatter(state: FullShardState, unit: Unit) -> Any:
    """What FSDP calls for one unit. Its base class is imported here, since older versions of torch lack it."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    default = unit.parameter_group._reduce_scatter_comm

    class PowerSGDReduceScatter(ReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            state._reduce_scatter(unit, output_tensor, input_tensor, default, group=group, op=op, async_op=async_op)

    return PowerSGDReduceScatter()
