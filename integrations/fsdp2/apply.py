"""FSDP2: the function that users call, and one state for parameters that different workers average."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from powersgd_triton.checkpoint import StateDict
from powersgd_triton.comm.agreement import Facts, found, together
from powersgd_triton.config import PowerSGDConfig, logger
from powersgd_triton.core.passes import Passes
from powersgd_triton.core.saved_state import LoadReport, listing, renamed
from powersgd_triton.integrations.common import plain_name
from powersgd_triton.integrations.fsdp2.states import FullShardState, HybridShardState, refuse_unequal
from powersgd_triton.integrations.fsdp2.units import check, divide, local_tensors
from powersgd_triton.integrations.saved_shards import join
from powersgd_triton.integrations.several import Several, check_shared, merged_loads
from powersgd_triton.integrations.sharded import ShardedHandle
from powersgd_triton.planning.tuning import refuse_auto


def apply_powersgd(
    model: nn.Module, config: PowerSGDConfig, replicate_group: dist.ProcessGroup | None = None
) -> "HybridShardState | FullShardState | DividedState":
    """Compress the gradients of a model to which ``fully_shard`` or ``replicate`` was applied. Collective.

    Call it once, before the first step. If the model has replicas (HSDP), FSDP reduce-scatters inside the shard group
    as usual. Each worker's shard of the gradients is averaged over the replicas in compressed form. Parameters and
    buffers are overwritten with those of the first replica, at the beginning of the first training step if they are on
    the meta device. The model has replicas if its mesh has a replicate dimension, or with ``replicate_group``.

    Otherwise (1-D), compression replaces the reduce-scatter. Every worker then has an error buffer of the whole model's
    size, if errors are kept. Prefer HSDP if the model's shards fit on fewer workers, or ``quantize="int8"``.

    Each parameter is averaged over the workers of its own mesh, experts over others than dense layers if theirs differ.
    What only one worker has is left to FSDP, and named in the log and in ``report().left_out``.

    Args:
        model: The root module. ``fully_shard`` may have been applied to its submodules too.
        config: Configuration of the compression.
        replicate_group: The workers that hold the same shard, ``mesh["replicate"].get_group()``, of a model that is
            sharded on ``mesh["shard"]``. Not needed if the whole mesh was given to ``fully_shard``.

    Returns:
        The state of the compression, for checkpoints and statistics.

    Raises:
        TypeError, ValueError: ``config`` is not a configuration, or its budget is too small; the model is not sharded,
            or in a way that is not supported; ``apply_powersgd`` was called before. Nothing was changed.
        RuntimeError: The group cannot be used, or this torch was not tried with a replicate dimension in the mesh.
    """
    divisions = found("apply_powersgd", lambda: divide(model, replicate_group))

    def prepare() -> tuple[dict[str, HybridShardState | FullShardState], Facts, Facts]:
        for unit in (unit for division in divisions for unit in division.units):
            check(unit, replicate_group)
        averaging = [each for each in divisions if dist.get_world_size(each.group) > 1] or divisions[:1]
        left_out = [unit for division in divisions if division not in averaging for unit in division.units]
        # Tensors that FSDP does not shard, as buffers, follow the first replicas.
        rest = {plain_name(name) for name, _ in local_tensors(model)} - {n for each in divisions for n in each.names}
        states: dict[str, HybridShardState | FullShardState] = {}
        for division in averaging:
            # Named by its first parameter.
            name = division.names[0]
            if division.hybrid:
                states[name], rest = HybridShardState(model, config, division, {*division.names, *rest}), set()
            else:
                states[name] = FullShardState(config, division)
                refuse_auto(config, "a sharded model without replicas")
            if config.whole_format and division.copies:
                field = "quantize" if config.quantize else "bypass"
                raise ValueError(
                    f"{field} does not keep tensors equal that tensor parallelism does not split, since 128 adjacent "
                    "elements, also of several tensors, share a scale: give rank or compression alone"
                )
            # The user's functions may fail, which all must hear before FSDP is made to call the state.
            states[name]._layout()
        if len(states) > 1:
            check_shared(config)
        first = next(iter(states.values()))
        left = {name: p for unit in left_out for name, p in unit.parameters.items()}
        first.left_out = tuple(left)
        first._left = {name: p for name, p in left.items() if p.sharded_param.dim() > 1}
        plans = [state._engine.plan for state in states.values()]
        # Of copies, also on workers with parts of other sizes.
        ranks = {f"rank of {n!r}": rank for plan in plans for n, rank in plan.ranks.items() if n in plan.copies}
        return states, {"averaged together": [each.names for each in averaging], **ranks}, {}

    # Collectives follow, so that no worker may raise an error alone.
    states = together("apply_powersgd", prepare, divisions[0].communicator)
    # A program may call the parts of a model by themselves, such as the two models of a GAN.
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    passes = Passes(modules, [state._engine for state in states.values()])
    for module in modules:
        # Methods that were given to torch's ``register_fsdp_forward_method`` call this one, and no hooks.
        inner: Any = module._get_fsdp_state()
        inner._pre_forward = _after(passes.note, inner._pre_forward)
    for state in states.values():
        state._take_over(passes)
    first = next(iter(states.values()))
    if first.left_out:
        logger.info("PowerSGD leaves to FSDP what no other replica or shard has: %s", listing(first.left_out))
    return first if len(states) == 1 else DividedState(states, passes)


def _after(first: Callable[[], None], act: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls both."""

    @functools.wraps(act)
    def both(*args: Any) -> Any:
        first()
        return act(*args)

    return both


class DividedState(Several[ShardedHandle], ShardedHandle):
    """The compression of a model by several states. It saves them as one, which loads on any mesh.

    Each parameter is in the state of those workers that average it, which are others on another mesh.
    """

    def __init__(self, states: Mapping[str, ShardedHandle], passes: Passes) -> None:
        super().__init__(states)
        self._passes = passes

    def check_replicas(self) -> None:
        """Compare the parameters of all replicas. Collective. See ``HybridShardState.check_replicas``."""
        # All of them before an error, which only the workers of some shards may raise.
        refuse_unequal([n for state in self if isinstance(state, HybridShardState) for n in state.unequal()])

    def error(self) -> dict[str, Tensor]:
        self._passes.finish()
        return super().error()

    def state_dict(self) -> dict[str, Any]:
        self._passes.finish()
        saved = join([state.state_dict() for state in self])
        return {**saved, "error": renamed(saved["error"], {new: old for old, new in self._names.items()})}

    def _loading(self, state_dict: StateDict, **options: Any) -> Callable[[], LoadReport]:
        # What one part refuses, no other loads.
        loading = [state._loading(state_dict, **options) for state in self]
        return lambda: merged_loads(go_on() for go_on in loading)

    def _matrices(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for state in self for name, shape in state._matrices().items()}
