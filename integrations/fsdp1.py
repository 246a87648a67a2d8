"""FSDP1 (``FullyShardedDataParallel``): a communication hook that compresses whole gradients."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import Shard

from powersgd_triton.comm.agreement import Facts, together
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import NodeGroup, given_groups
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.passes import Passes
from powersgd_triton.integrations.common import plain_name
from powersgd_triton.integrations.saved_shards import Part, cut
from powersgd_triton.integrations.sharded import ShardedHandle, in_own_group
from powersgd_triton.layout.layout import Layout
from powersgd_triton.planning.tuning import refuse_auto
from powersgd_triton.schemes import new_engine

__all__ = ["PowerSGDState", "powerSGD_hook"]


class Unit:
    """The places of the parameters in the flat gradient of one FSDP unit."""

    def __init__(self, module: FullyShardedDataParallel, prefix: str) -> None:
        handle: Any = module._handle
        flat = handle.flat_param
        self.offsets: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        # With use_orig_params=True a unit may also have frozen parameters, whose gradients are zeros. They may change.
        self._parameters: dict[str, nn.Parameter] = {}
        # FSDP flattens parameters that are not contiguous in the order of memory.
        self._strides: dict[str, tuple[int, ...]] = {}
        # Without the padding that makes shards equal.
        index = self.numel = 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                name = plain_name(f"{prefix}.{flat._fqns[index]}" if prefix else flat._fqns[index])
                self._shapes[name], self.offsets[name] = tuple(flat._shapes[index]), self.numel
                self._strides[name] = tuple(flat._strides[index])
                if flat._params is not None:
                    self._parameters[name] = flat._params[index]
                index += 1
            self.numel += numel

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of the parameters that are trainable now."""
        frozen = {name for name, parameter in self._parameters.items() if not parameter.requires_grad}
        return {name: shape for name, shape in self._shapes.items() if name not in frozen}

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return a view of the flat gradient: that of a parameter, with its shape."""
        return flat[self.offsets[name] :].as_strided(self._shapes[name], self._strides[name])


def _units(fsdp_model: FullyShardedDataParallel) -> dict[Unit, Any]:
    """Return the model's units with FSDP's handles. ValueError if one is not supported, or if none is trainable.

    Units that are frozen are among them if FSDP lets them be unfrozen, with ``use_orig_params=True``.
    """
    units: dict[Unit, Any] = {}
    for path, module in fsdp_model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        name = plain_name(path)
        where = f"module {name!r}" if name else "the root module"
        if module.sharding_strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
            raise ValueError(
                f"{where} has the strategy {module.sharding_strategy.name}, for which FSDP1 has no communication "
                "hook; use fully_shard and powersgd_triton.integrations.fsdp2 with replicate_group instead"
            )
        if module._comm_hook is not None:
            raise ValueError(f"{where} has a communication hook already; create one state and register it once")
        if module.process_group is not fsdp_model.process_group:
            raise ValueError(f"{where} has another process group than the root module; use one group for all")
        flat = None if module._handle is None else module._handle.flat_param
        if flat is not None and (flat.requires_grad or flat._params is not None):
            units[Unit(module, name)] = module._handle
    if not any(unit.shapes() for unit in units):
        raise ValueError("the model has no trainable parameters; unfreeze them before creating the state")
    return units


class PowerSGDState(ShardedHandle):
    """The compression of one FSDP1 model's gradients. All workers create it together.

    It supports FULL_SHARD, SHARD_GRAD_OP and NO_SHARD. Errors have a whole model's size, less with ``node_group``.

    Args:
        fsdp_model: The outermost ``FullyShardedDataParallel``, before its first backward pass.
        config: Configuration of the compression.
        node_group: See ``Compressor``.

    Raises:
        TypeError: The model does not use FSDP1, ``config`` is not a configuration, or ``node_group`` is something else.
        ValueError: The strategy is hybrid, the model has a hook or no trainable parameters, or the budget is too small.
    """

    def __init__(
        self, fsdp_model: FullyShardedDataParallel, config: PowerSGDConfig, *, node_group: NodeGroup = None
    ) -> None:
        # Another model has none, and all workers are told.
        group: Any = getattr(fsdp_model, "process_group", None)
        device = getattr(fsdp_model, "compute_device", None) or torch.device("cpu")
        communicator = Communicator(group)

        def prepare() -> tuple[tuple[dict[Unit, Any], Engine], Facts, Facts]:
            if not isinstance(fsdp_model, FullyShardedDataParallel):
                raise TypeError(
                    f"expected a model wrapped in FullyShardedDataParallel; got {type(fsdp_model).__name__}. Use "
                    "powersgd_triton.integrations.fsdp2 for fully_shard, …integrations.ddp for DistributedDataParallel"
                )
            given_groups(node_group)
            units = _units(fsdp_model)

            def shapes() -> dict[str, tuple[int, ...]]:
                return {name: shape for unit in units for name, shape in unit.shapes().items()}

            engine = new_engine(config, communicator, shapes, device, buckets=len(units))
            if any(handle.uses_sharded_strategy for handle in units.values()):
                refuse_auto(config, "a sharded model")
            # The user's functions may fail, which all must hear before anything is registered.
            Layout.build(shapes(), config)
            return (units, engine), {}, {}

        # A new group is made together, so that no worker may raise an error alone before.
        units, engine = together("PowerSGDState", prepare, communicator, device)
        mesh = DeviceMesh.from_group(group, device.type)

        def part_of(name: str) -> Part:
            shape = engine.tensors()[name]
            return Part(0, *cut(shape[0], mesh), mesh, [Shard(0)], shape, workers=mesh)

        super().__init__(engine, part_of)
        engine.connect(in_own_group(communicator, device, node_group))
        self.replaces_reduce_scatter = any(handle.uses_sharded_strategy for handle in units.values())
        self._passes = Passes([fsdp_model], [engine])
        self._current: Unit | None = None
        self._unmarked = dict(units)
        self._mark_units()
        # Units may be unfrozen.
        fsdp_model.register_forward_pre_hook(torch.compiler.disable(self._mark_units))

    def _mark_units(self, *_: object) -> None:
        """Let each trainable unit say that its gradient is next, which FSDP does not tell its hook."""
        for unit in [unit for unit in self._unmarked if unit.shapes()]:
            flat = self._unmarked.pop(unit).flat_param
            # FSDP does so too, but later.
            flat.requires_grad_()
            flat.register_post_accumulate_grad_hook(functools.partial(self._mark, unit))

    def _mark(self, unit: Unit, _parameter: Tensor) -> None:
        self._current = unit

    def _unit_of(self, gradient: Tensor) -> Unit:
        unit, self._current = self._current, None
        if unit is None or not unit.numel <= gradient.numel() < unit.numel + self._communicator.world_size:
            raise RuntimeError(
                f"powerSGD_hook was called with {gradient.numel()} elements of a unit that this state does not know. "
                "Build PowerSGDState from the model on which register_comm_hook is called, after the whole model is "
                "wrapped and after parameters are frozen or unfrozen"
            )
        return unit


# DDP refuses other annotations and names than its own, with a message that does not help, before it calls a hook.
@torch.no_grad()
def powerSGD_hook(state: PowerSGDState, bucket, output=None):  # type: ignore[no-untyped-def]
    """Average a unit's flat gradient in compressed form. Register it with ``fsdp_model.register_comm_hook(state, …)``.

    Args:
        state: State created from the same model.
        bucket: Flat gradient of the whole unit, a tensor. With NO_SHARD it is averaged in place.
        output: A tensor that takes this worker's shard of the average. None with NO_SHARD.

    Raises:
        TypeError: ``state`` is not a ``PowerSGDState`` of this module.
        RuntimeError: The gradient belongs to a unit that the state does not know.
    """
    if isinstance(bucket, GradBucket):
        raise TypeError(
            "this powerSGD_hook is for FullyShardedDataParallel. For DistributedDataParallel, import PowerSGDState and "
            "powerSGD_hook from powersgd_triton.integrations.ddp"
        )
    if not isinstance(state, PowerSGDState):
        raise TypeError(f"expected a PowerSGDState of {__name__}; got {type(state).__module__}.{type(state).__name__}")
    gradient: Tensor = bucket
    unit, engine, communicator = state._unit_of(gradient), state._engine, state._communicator
    state._passes.begin()
    bucket = engine.begin((unit, *unit.shapes()), unit.shapes, gradient.device, keys=(unit,))
    if not engine.compressing:
        if output is None:
            engine.average_exactly(gradient)
        else:
            dist.reduce_scatter_tensor(output, gradient.div_(communicator.world_size), group=communicator.group)
        return
    places = {name: unit.view(gradient, name) for name in bucket.layout.shapes}
    # This copies a gradient that is not contiguous, such as one in channels_last.
    gradients = {name: place.contiguous() for name, place in places.items()}
    copied = [name for name, place in places.items() if gradients[name] is not place]
    ranges: dict[str, tuple[int, Tensor]] | None = None
    shards: dict[str, tuple[int, Tensor]] = {}
    if output is not None:
        # FSDP passes uninitialized memory. Padding and the gradients of frozen parameters must be zero.
        output.zero_()
        low = communicator.index * output.numel()
        high = low + output.numel()
        for name, place in places.items():
            offset = unit.offsets[name]
            first, behind = max(offset, low), min(offset + place.numel(), high)
            if first < behind:
                shards[name] = first - offset, output[first - low : behind - low]
        # A shard in another order than that of the shape is cut from the whole average.
        ranges = shards | {name: (0, gradients[name].view(-1)) for name in copied if name in shards}
    engine.average(bucket, gradients, ranges=ranges)
    for name in copied:
        places[name].copy_(gradients[name])
        if name in shards:
            first, shard = shards[name]
            shard.copy_(gradient[unit.offsets[name] + first :][: shard.numel()])
