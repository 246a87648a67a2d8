"""One call for every wrapper: compress the gradients of a model that is wrapped for data parallelism."""

import functools
import weakref
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.comm.agreement import Facts, found, together
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import NodeGroup, given_groups
from powersgd_triton.config import PowerSGDConfig, logger
from powersgd_triton.handle import Folder, Handle
from powersgd_triton.integrations import common
from powersgd_triton.ops.step import LossScale, LossScaleSource

_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]] = weakref.WeakKeyDictionary()
"""The state of each wrapped model, whose hooks keep it alive. A copy of a model has no hooks, and so it is not here."""


def attach(
    model: nn.Module,
    config: PowerSGDConfig | None = None,
    *,
    loss_scale: LossScaleSource | None = None,
    node_group: NodeGroup = None,
    manager: Any = None,
    **options: Any,
) -> Handle:
    """Compress the gradients of a wrapped model, from its next step on. Collective. Prints one line on worker 0.

    Args:
        model: A ``DistributedDataParallel`` or ``FullyShardedDataParallel``, a model to which ``fully_shard`` or
            ``replicate`` was applied (also on a two-dimensional mesh), a DeepSpeed engine, or one of these compiled by
            ``torch.compile``.
        config: Configuration of the compression. None takes ``options``, and without these rank 32 in int4. A DeepSpeed
            engine has its section "powersgd" if both are left out.
        loss_scale: The ``torch.amp.GradScaler`` of the training, or a function that returns the loss scale. DeepSpeed's
            own needs not be given.
        node_group: "auto", or groups of the workers that share a node, for DDP, FSDP1 and DeepSpeed; see
            docs/cluster.md.
        manager: A ``torchft.Manager``, over whose quorums a DistributedDataParallel averages; see
            docs/guides/torchft.md.
        options: Fields of ``PowerSGDConfig``, for example ``compression=20`` or ``rank=8``.

    Returns:
        The state of the compression. Its ``save(folder)`` and ``load(folder)`` belong into a checkpoint, and
        ``report()`` shows the rank of each parameter. A second call for the same model returns the same state.

    Raises:
        TypeError: The model is not wrapped for data parallelism, or both ``config`` and ``options`` are given.
        ValueError: It is compressed with another configuration, or an adapter refuses either. Nothing was changed.
    """

    def given() -> tuple[PowerSGDConfig | None, Facts, Facts]:
        given_groups(node_group)
        if loss_scale is not None:
            LossScale(loss_scale)
        are_given = {"node_group is given": node_group is not None, "loss_scale is given": loss_scale is not None}
        return chosen(config, options), are_given, {}

    bare = common.uncompiled(model)
    state = attached().get(bare) if isinstance(bare, nn.Module) else None
    if state is None and manager is not None:
        # Not collective, since a worker that returns attaches alone.
        config, _, _ = given()
        if node_group is not None:
            raise ValueError("give either node_group= or manager=, whose quorums say who the workers are")
        from powersgd_triton.integrations import torchft

        state = torchft.attach(bare, config or common.UNSAID, manager)
        _attached[bare] = weakref.ref(state)
        common.announce(f"powersgd: on, {common.describe_ranks(state.config)}, over the workers of each quorum")
    elif state is None:
        state = _compress(bare, together("attach", given, found("attach", lambda: _workers(bare))), node_group)
        _attached[bare] = weakref.ref(state)
        if not common.is_deepspeed(bare):
            # DeepSpeed's adapter has said it. The functions of a configuration may fail on one worker only.
            common.announce(state._together("attach", functools.partial(common.describe, state)))
    elif (wanted := chosen(config, options)) is not None and wanted != (before := state._engine.given):
        raise ValueError("the model is compressed with {} already; got {}".format(*common.unlike(before, wanted)))
    elif node_group is not None and node_group != state._communicator.node_group:
        raise ValueError(f"the model has node_group={state._communicator.node_group!r} already; got {node_group!r}")
    if loss_scale is not None:
        state.attach(loss_scale)
    return state


def attached() -> dict[nn.Module, Handle]:
    """Return {wrapped model: state} of all that ``attach`` has compressed."""
    return {model: state for model, reference in _attached.items() if (state := reference()) is not None}


def chosen(config: PowerSGDConfig | None, options: dict[str, Any]) -> PowerSGDConfig | None:
    """Return the configuration that a user gave as such, or by its fields. None if there is neither."""
    if config is not None and not isinstance(config, PowerSGDConfig):
        raise TypeError(f"config must be a PowerSGDConfig; got {type(config).__name__}. Give fields as compression=20")
    if config is not None and options:
        raise TypeError(f"give either a configuration or its fields; got both, with {', '.join(options)}")
    return PowerSGDConfig.from_dict(options) if options else config


def _workers(model: object) -> Communicator:
    """Return the workers that average a model's gradients. TypeError if it is not wrapped."""
    # Imported when they are needed: FSDP takes about a second, and every import of powersgd_triton would wait for it.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if common.is_deepspeed(model):
        return Communicator()
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        return Communicator(model.process_group)
    if isinstance(model, nn.Module) and any(isinstance(module, FSDPModule) for module in model.modules()):
        from powersgd_triton.integrations.fsdp2.units import divide

        return divide(model, None)[0].communicator
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)) or common.is_deepspeed(module):
            raise TypeError(f"attach expects a wrapped model; {type(model).__name__} has one as {name!r}: attach that")
    raise TypeError(
        f"attach expects a model that is wrapped for data parallelism; got {type(model).__name__}. Wrap it first: "
        "DistributedDataParallel(model), fully_shard(model), FullyShardedDataParallel(model), replicate(model) of "
        "torch.distributed._composable.replicate_with_fsdp, or deepspeed.initialize(model=model, …). For a plain loop "
        "use powersgd_triton.integrations.optimizer"
    )


def _compress(model: nn.Module, config: PowerSGDConfig | None, node_group: NodeGroup) -> Handle:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if common.is_deepspeed(model):
        from powersgd_triton.integrations import deepspeed

        state = deepspeed.enable(model, config, node_group=node_group)
        if state is None:
            raise ValueError('the section "powersgd" of the DeepSpeed configuration has "enabled": false')
        return state
    config = config or common.UNSAID
    if isinstance(model, DistributedDataParallel):
        from powersgd_triton.integrations import ddp

        def make() -> tuple[Handle, Facts, Facts]:
            state = ddp.PowerSGDState(config, process_group=model.process_group, module=model, node_group=node_group)
            # The user's functions may fail, which all must hear before anything is registered.
            state._layout()
            return state, {}, {}

        handle = together("attach", make, Communicator(model.process_group), next(model.parameters()).device)
        handle._together("attach", functools.partial(common.register, model, handle, ddp.powerSGD_hook))
        return handle
    if isinstance(model, FullyShardedDataParallel):
        from powersgd_triton.integrations import fsdp1

        sharded = fsdp1.PowerSGDState(model, config, node_group=node_group)
        model.register_comm_hook(sharded, fsdp1.powerSGD_hook)
        return sharded
    from powersgd_triton.integrations.fsdp2 import apply_powersgd

    if node_group is not None:
        raise ValueError("fully_shard takes no node_group: use a mesh that shards within nodes and replicates across")
    return apply_powersgd(model, config)


def load_from(state: Handle, folder: Folder) -> None:
    """Continue from a checkpoint's state. Start with errors of zero, and log that, if it has none. Collective."""
    if state.load(folder, missing_ok=True) is None:
        logger.warning(common.NO_STATE, folder)
