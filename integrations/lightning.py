"""Lightning: compression in one line, for every strategy that averages gradients."""

import functools
import os
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from powersgd_triton.config import PowerSGDConfig, logger
from powersgd_triton.handle import Handle
from powersgd_triton.integrations.attach import attach, chosen, load_from
from powersgd_triton.integrations.common import NO_STATE, announce
from powersgd_triton.integrations.sharded import FOLDER, ShardedHandle

try:
    # `lightning` and `pytorch_lightning` have a class each. Both trainers take callbacks of either.
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        from pytorch_lightning.callbacks import Callback
except ImportError as error:
    raise ImportError("Lightning is not installed; in a clone, run pip install '.[lightning]'") from error

__all__ = ["PowerSGD"]

BESIDE = {"folder": FOLDER}
"""What a checkpoint has in place of the state if this is in a folder of its own."""


class PowerSGD(Callback):  # type: ignore[misc,unused-ignore]
    """Compress the gradients that a ``Trainer`` averages in ``fit()``, and save the state in its checkpoints.

    ``fit(ckpt_path=…)`` continues from the state in the checkpoint, another ``fit()`` of the module from the last one.

    Args:
        config, options: See ``powersgd_triton.attach``. With DeepSpeed, its section "powersgd" is enough.

    Attributes:
        powersgd: The state of the compression. None before ``fit()``, and if gradients are averaged over one worker.

    Raises:
        TypeError, ValueError: Both ``config`` and ``options`` are given, or an option is impossible.
    """

    def __init__(self, config: PowerSGDConfig | None = None, **options: Any) -> None:
        self.powersgd: Handle | None = None
        self._config = chosen(config, options)
        self._module: weakref.ref[nn.Module] | None = None
        self._before: Handle | None = None
        self._restored: tuple[Any, Any] | None = None
        self._follows: weakref.ref[Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Prepare for another ``fit()``."""
        if stage == "fit":
            same = self._module is not None and self._module() is pl_module
            self._before, self.powersgd = self.powersgd if same else None, None
            self._module, self._restored = weakref.ref(pl_module), None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Compress the model that the strategy has wrapped, and continue with the errors that there are."""
        before, self._before = self._before, None
        # A trainer without a strategy for several workers has no sampler for them.
        if (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1) == 1:
            announce("powersgd: off, since gradients are averaged over one worker only and there is nothing to send")
            return
        # Precision plugins for a loss scale have this attribute. DeepSpeed's engine has a scale of its own.
        scaler, model = getattr(trainer.precision_plugin, "scaler", None), trainer.strategy.model
        roots = FullyShardedDataParallel.fsdp_modules(model, root_only=True)
        if len(roots) == 1:
            # A model may wrap its network by itself.
            model = roots[0]
        try:
            self.powersgd = attach(model, self._config, loss_scale=scaler)
        except TypeError as error:
            raise TypeError(f"{error}. The strategy is {type(trainer.strategy).__name__}") from None
        if isinstance(self.powersgd, ShardedHandle):
            self._follow(trainer.strategy)
        if self._restored is not None:
            self._load()
        elif before is not None and before is not self.powersgd:
            self.powersgd.load_state_dict(before.state_dict())

    # Not state_dict() and load_state_dict(), which are not told where the checkpoint is, nor whether it is sharded.

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Add the state to a checkpoint. Lightning calls this on all workers."""
        if self.powersgd is None or self.powersgd.saved_with_model:
            return
        if any(isinstance(value, (DTensor, ShardedTensor)) for value in checkpoint["state_dict"].values()):
            checkpoint["callbacks"][self.state_key] = BESIDE
        else:
            checkpoint["callbacks"][self.state_key] = _whole(self.powersgd.state_dict())

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Continue from the state in a checkpoint."""
        if trainer.state.fn != "fit":
            return
        # The strategy loads from worker 0's path too.
        path = trainer.strategy.broadcast(trainer.ckpt_path)
        self._restored = path, checkpoint["callbacks"].get(self.state_key)
        # Strategies that shard load checkpoints after on_fit_start, and others before it.
        if self.powersgd is not None:
            self._load()

    def _load(self) -> None:
        assert self.powersgd is not None
        assert self._restored is not None
        (path, saved), self._restored = self._restored, None
        if self.powersgd.saved_with_model:
            return
        if saved == BESIDE:
            load_from(self.powersgd, path)
        elif saved:
            self.powersgd.load_state_dict(saved)
        else:
            self.powersgd.forget()
            logger.warning(NO_STATE, path)

    def _follow(self, strategy: Any) -> None:
        """Write the state into each folder that the strategy writes as a sharded checkpoint."""
        if self._follows is not None and self._follows() is strategy:
            return
        self._follows = weakref.ref(strategy)
        save = strategy.save_checkpoint

        # Lightning tells callbacks what it saves, but not where.
        @functools.wraps(save)
        def saving(checkpoint: dict[str, Any], filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
            save(checkpoint, filepath, *args, **kwargs)
            if self.powersgd is not None and checkpoint.get("callbacks", {}).get(self.state_key) == BESIDE:
                # The strategy uses worker 0's path too.
                self.powersgd.save(Path(strategy.broadcast(filepath)))

        strategy.save_checkpoint = saving


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose errors are whole and on the CPU of worker 0, which writes it. Collective."""
    if "error" not in state:
        return state
    errors = {}
    for name, error in state["error"].items():
        whole = error.full_tensor()
        if dist.get_rank() == 0:
            errors[name] = whole.cpu()
    return {**state, "error": errors}
