"""transformers' Trainer: compression in one line, for every wrapper that it makes."""

import functools
import weakref
from pathlib import Path
from typing import Any

from powersgd_triton.config import PowerSGDConfig, logger
from powersgd_triton.handle import Handle
from powersgd_triton.integrations.attach import attach, chosen, load_from
from powersgd_triton.integrations.common import announce

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise ImportError("transformers is not installed; in a clone, run pip install '.[transformers]'") from error

__all__ = ["PowerSGDCallback"]


class PowerSGDCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Compress the gradients of a ``Trainer``'s model in ``train()``, and save the state in its checkpoints.

    ``train(resume_from_checkpoint=…)`` continues from the state in the checkpoint. Another ``train()`` continues from
    the last state, unless ``model_init`` has made a new model.

    Args:
        trainer: The ``Trainer``.
        config, options: See ``powersgd_triton.attach``. With DeepSpeed, its section "powersgd" is enough.

    Attributes:
        powersgd: The state of the compression. None before ``train()``, and if there is only one process.

    Raises:
        TypeError, ValueError: ``trainer`` is not a ``Trainer``, or see ``powersgd_triton.attach``.
    """

    def __init__(self, trainer: Trainer, config: PowerSGDConfig | None = None, **options: Any) -> None:
        if not isinstance(trainer, Trainer):
            kind = type(trainer).__name__
            raise TypeError(f"expected a Trainer, as in PowerSGDCallback(trainer, compression=20); got {kind}")
        self.powersgd: Handle | None = None
        self._trainer = trainer
        self._config = chosen(config, options)
        self._checkpoint: Any = None
        self._trial: Any = None
        # The model of the last train().
        self._model: weakref.ref[Any] | None = None
        train = trainer.train

        # Callbacks are not told of the arguments.
        @functools.wraps(train)
        def noting(*args: Any, **kwargs: Any) -> Any:
            # Passed on as they came, since the train() of a subclass may take fewer arguments.
            given = {**dict(zip(("resume_from_checkpoint", "trial"), args, strict=False)), **kwargs}
            self._checkpoint = given.get("resume_from_checkpoint") or None
            if self._checkpoint is True:
                # The Trainer chooses the last checkpoint in the same way.
                self._checkpoint = get_last_checkpoint(trainer.args.output_dir)
            self._trial = given.get("trial")
            callbacks = trainer.callback_handler.callbacks
            if self in callbacks:
                # First, since others take what is in a checkpoint when it is saved, such as that of Ray Train.
                callbacks.remove(self)
                callbacks.insert(0, self)
            return train(*args, **kwargs)

        trainer.train = noting

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Compress the model that ``train()`` has wrapped, and load the state of the checkpoint it resumes from."""
        if args.world_size == 1:
            announce("powersgd: off, since there is only one process and nothing to send")
            return
        trainer, before, earlier = self._trainer, self.powersgd, self._model
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        self._model = weakref.ref(model)
        self.powersgd = attach(trainer.model_wrapped, self._config, loss_scale=trainer.accelerator.scaler)
        if self._checkpoint is not None:
            # DeepSpeed's engine has loaded its checkpoint before this call, when it did not have the state yet.
            load_from(self.powersgd, self._checkpoint)
        elif state.global_step:
            # The train() of a subclass may choose the checkpoint by itself.
            logger.warning("powersgd: train() resumes, but was not given a checkpoint: errors are not those in it")
        elif before not in (None, self.powersgd) and earlier is not None and earlier() is model:
            # With auto_find_batch_size, the Trainer wraps the model anew.
            self.powersgd.load_state_dict(before.state_dict())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Save the state into the checkpoint that the Trainer has just written."""
        # Nothing can be resumed from a checkpoint that has the model only.
        if self.powersgd is None or self.powersgd.saved_with_model or args.save_only_model:
            return
        # Not args.output_dir: each trial of a hyperparameter search has a folder of its own.
        folder = self._trainer._get_output_dir(trial=self._trial)
        self.powersgd.save(Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
