"""FSDP1 (``FullyShardedDataParallel``): a communication hook that compresses whole gradients.

from powersgd_triton.integrations.fsdp1 import PowerSGDState, powerSGD_hook
state = PowerSGDState(fsdp_model, PowerSGDConfig(rank=4))
fsdp_model.register_comm_hook(state, powerSGD_hook)
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.integrations.names import plain_name
from powersgd_triton.integrations.sharded import ShardedHandle, WholeParameters, group_of_its_own
from powersgd_triton.layout.layout import Layout

__all__ = ["PowerSGDState", "powerSGD_hook"]

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class Unit:
    """One FSDP unit: where in its flat gradient each trainable parameter lies.

    Attributes:
        offsets: {parameter's name: first element}.
        layout: the same parameters.
        numel: elements without the padding that makes shards equal.
    """

    def __init__(self, module: FullyShardedDataParallel, prefix: str, config: PowerSGDConfig) -> None:
        handle: Any = module._handle
        flat = handle.flat_param
        self.name = prefix or "the root module"
        self.offsets: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        index = self.numel = 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                # With use_orig_params=True a unit may have frozen parameters too; their gradients are zeros.
                if flat._params is None or flat._params[index].requires_grad:
                    name = plain_name(f"{prefix}.{flat._fqns[index]}" if prefix else flat._fqns[index])
                    # What is not contiguous lies there in another order than its shape says: averaged exactly.
                    shape = tuple(flat._shapes[index])
                    shapes[name] = shape if flat._contiguities[index] else (math.prod(shape),)
                    self.offsets[name] = self.numel
                index += 1
            self.numel += numel
        self.layout = Layout.build(shapes, config)


class PowerSGDState(ShardedHandle):
    """Memory of the compression of one FSDP1 model's gradients.

    FULL_SHARD, SHARD_GRAD_OP and NO_SHARD; every worker keeps errors of the whole model's size. The sums of factors
    travel in a process group of the state's own, so that they do not queue behind all-gathers that FSDP has prefetched
    (in the model's group where that is not of all workers).

    Args:
        fsdp_model: the outermost ``FullyShardedDataParallel``, before its first backward pass.
        config: what to compress and how.

    Raises:
        TypeError: the model is not of FSDP1, or ``config`` is no configuration.
        ValueError: its sharding strategy is hybrid, it has a hook already, nothing of it is trainable, or the
            configuration's budget is too small for it.
    """

    def __init__(self, fsdp_model: FullyShardedDataParallel, config: PowerSGDConfig) -> None:
        if not isinstance(config, PowerSGDConfig):
            raise TypeError(f"config must be a PowerSGDConfig; got {type(config).__name__}")
        if not isinstance(fsdp_model, FullyShardedDataParallel):
            raise TypeError(
                f"expected a model wrapped in FullyShardedDataParallel; got {type(fsdp_model).__name__}. For models of "
                "fully_shard use powersgd_triton.integrations.fsdp2, for DistributedDataParallel …integrations.ddp"
            )
        modules = {
            plain_name(name): module
            for name, module in fsdp_model.named_modules()
            if isinstance(module, FullyShardedDataParallel)
        }
        for name, module in modules.items():
            where = f"module {name!r}" if name else "the root module"
            if module.sharding_strategy in HYBRID:
                raise ValueError(
                    f"{where} has the strategy {module.sharding_strategy.name}, for which FSDP1 has no communication "
                    "hook; use fully_shard and powersgd_triton.integrations.fsdp2 with replicate_group instead"
                )
            if module._comm_hook is not None:
                raise ValueError(f"{where} has a communication hook already; build one state and register it once")
            if module.process_group is not fsdp_model.process_group:
                raise ValueError(f"{where} has another process group than the root module; give all the same")
        trainable = {
            name: module
            for name, module in modules.items()
            if module._handle is not None and module._handle.flat_param.requires_grad
        }
        if not trainable:
            raise ValueError("the model has no trainable parameters; unfreeze them before building the state")
        group: Any = fsdp_model.process_group
        device = fsdp_model.compute_device or torch.device("cpu")
        units = [Unit(module, name, config) for name, module in trainable.items()]
        shapes = {s.name: s.shape for unit in units for s in unit.layout.segments}
        sharding = WholeParameters(group, DeviceMesh.from_group(group, device.type), lambda: shapes)
        communicator = Communicator(group_of_its_own(group, device.type))
        super().__init__(Engine(config, communicator, lambda: shapes), sharding)
        self._workers, self._worker = sharding.workers, sharding.worker
        self._current: Unit | None = None
        for unit, module in zip(units, trainable.values(), strict=True):
            # FSDP does not tell its hook the unit. This fires just before it, in backward passes without
            # synchronisation too, where no hook follows.
            handle: Any = module._handle
            handle.flat_param.register_post_accumulate_grad_hook(functools.partial(self._mark, unit))

    def _mark(self, unit: Unit, _parameter: Tensor) -> None:
        self._current = unit

    def _unit_of(self, gradient: Tensor) -> Unit:
        unit, self._current = self._current, None
        if unit is None or not unit.numel <= gradient.numel() < unit.numel + self._workers:
            raise RuntimeError(
                f"powerSGD_hook was called with {gradient.numel()} elements of a unit that this state does not know. "
                "Build PowerSGDState from the model on which register_comm_hook is called, after all of it is wrapped "
                "and with the parameters trainable that are to be trained"
            )
        return unit


@torch.no_grad()
def powerSGD_hook(state: PowerSGDState, gradient: Tensor, output: Tensor | None = None) -> None:
    """Average a unit's flat gradient in compressed form; register it with ``fsdp_model.register_comm_hook(state, …)``.

    Args:
        state: built from the same model.
        gradient: flat, of the whole unit; averaged in place with NO_SHARD.
        output: this worker's shard of the average, written; None with NO_SHARD.

    Raises:
        TypeError: ``state`` is not of this module.
        RuntimeError: the gradient belongs to a unit that the state does not know.
    """
    if not isinstance(state, PowerSGDState):
        raise TypeError(f"expected a PowerSGDState of {__name__}; got {type(state).__module__}.{type(state).__name__}")
    unit = state._unit_of(gradient)
    engine = state._engine
    if not engine.begin(unit.layout, gradient.device):
        if output is None:
            engine.average_exactly(gradient)
        else:
            dist.reduce_scatter_tensor(output, gradient.div_(state._workers), group=engine.communicator.group)
        return
    views = {
        s.name: gradient[unit.offsets[s.name] : unit.offsets[s.name] + s.numel].view(s.shape)
        for s in unit.layout.segments
    }
    if output is None:
        engine.average(unit.layout, views)
        return
    # Frozen parameters and padding have no part in it.
    output.zero_()
    low, high = state._worker * output.numel(), (state._worker + 1) * output.numel()
    ranges: dict[str, tuple[int, Tensor]] = {}
    for segment in unit.layout.segments:
        offset = unit.offsets[segment.name]
        first, behind = max(offset, low), min(offset + segment.numel, high)
        if first < behind:
            ranges[segment.name] = first - offset, output[first - low : behind - low]
    engine.average(unit.layout, views, ranges=ranges)
