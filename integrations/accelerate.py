"""Accelerate: compression in one line, for every wrapper that ``accelerator.prepare`` makes."""

import weakref
from pathlib import Path
from typing import Any

from torch import nn

from powersgd_triton.comm.nodes import NodeGroup
from powersgd_triton.compressor import Compressor
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.handle import Handle
from powersgd_triton.integrations.attach import attach, attached, chosen, load_from
from powersgd_triton.integrations.common import UNSAID, announce

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("Accelerate is not installed; in a clone, run pip install '.[accelerate]'") from error

__all__ = ["compress"]

_followed: weakref.WeakSet[Accelerator] = weakref.WeakSet()
"""Accelerators that save and load the states of their models."""


def compress(
    accelerator: Accelerator,
    model: nn.Module,
    config: PowerSGDConfig | None = None,
    *,
    node_group: NodeGroup = None,
    **options: Any,
) -> Handle:
    """Compress the gradients of a prepared model, from its next step on. Collective. Prints one line on worker 0.

    From then on the accelerator's ``save_state`` and ``load_state`` include it. Errors follow its ``GradScaler``.

    Args:
        accelerator: The ``Accelerator`` that has prepared the model.
        model: What ``accelerator.prepare`` returned for the model.
        config, node_group, options: See ``powersgd_triton.attach``. With DeepSpeed, its section "powersgd" is enough.

    Returns:
        The state of the compression, the same in a second call. With one process, a ``Compressor`` that nothing uses.

    Raises:
        TypeError, ValueError: See ``powersgd_triton.attach``. The model is not prepared, for example.
    """
    if accelerator.num_processes == 1:
        announce("powersgd: off, since there is only one process and nothing to send")
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        return Compressor(chosen(config, options) or UNSAID, trained)
    try:
        state = attach(model, config, loss_scale=accelerator.scaler, node_group=node_group, **options)
    except TypeError as error:
        if config is not None and options:
            raise
        raise TypeError(f"{error}. With Accelerate, give what accelerator.prepare(model) has returned") from None
    if accelerator not in _followed:
        _followed.add(accelerator)
        _follow_checkpoints(accelerator)
    return state


def _follow_checkpoints(accelerator: Accelerator) -> None:
    """Make the accelerator save and load the states of its models."""

    def places(folder: str) -> list[tuple[Handle, Path]]:
        states = {accelerator.unwrap_model(model): state for model, state in attached().items()}
        # A model that accelerator.free_memory has released is no longer among these.
        models = [model for model in map(accelerator.unwrap_model, accelerator._models) if model in states]
        found = [states[model] for model in models if not states[model].saved_with_model]
        if len(found) == 1:
            return [(found[0], Path(folder))]
        return [(state, Path(folder) / f"powersgd_{index}") for index, state in enumerate(found)]

    # Not accelerator.register_for_checkpointing, which saves what worker 0 has: of a sharded state, that is one shard.
    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:  # noqa: ARG001
        for state, place in places(folder):
            state.save(place)

    def load(models: list[nn.Module], folder: str) -> None:  # noqa: ARG001
        for state, place in places(folder):
            load_from(state, place)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
