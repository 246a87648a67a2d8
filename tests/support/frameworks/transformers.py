"""transformers' Trainer."""

from __future__ import annotations

import os
from typing import Any

from accelerate import ParallelismConfig
from accelerate.state import GradientState
from torch import Tensor
from transformers import Trainer, TrainingArguments

from powersgd_triton.integrations.transformers import PowerSGDCallback
from tests.support.frameworks.accelerate import pretend_gpus
from tests.support.frameworks.job import (
    ADAM,
    BATCH,
    CLIP,
    DDP,
    HSDP,
    MICRO_BATCHES,
    REPLICATE,
    SAVED,
    STEPS,
    ZERO2,
    Data,
    Job,
    NotOfferedError,
    deepspeed_configuration,
    whole,
)


def trainer_for(job: Job, **options: Any) -> Trainer:
    """Make the trainer that a user of this wrapper makes. ``options`` are further training arguments.

    Raises:
        NotOfferedError: The framework refuses the wrapper.
    """
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if job.wrapper == ZERO2:
        os.environ["DS_ACCELERATOR"] = "cpu"
        options["deepspeed"] = deepspeed_configuration(job.parameters)
    elif job.wrapper != DDP:
        options["fsdp"] = True
        # Whole optimizer states would be gathered on the device of a GPU.
        options["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["Block"],
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        if job.wrapper != "FSDP2 1-D":
            shards = {HSDP: 2, REPLICATE: 1}[job.wrapper]
            options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=shards)
    arguments = TrainingArguments(
        output_dir=str(job.folder),
        use_cpu=True,
        bf16=job.bf16,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_grad_norm=CLIP,
        optim="adamw_torch",
        learning_rate=ADAM["lr"],
        adam_epsilon=ADAM["eps"],
        lr_scheduler_type="constant",
        save_strategy="steps" if job.save else "no",
        save_steps=SAVED,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )
    if job.wrapper != DDP:
        pretend_gpus(deepspeed=job.wrapper == ZERO2)
    try:
        return Trainer(job.net(), arguments, train_dataset=Data())
    except ValueError as error:
        raise NotOfferedError(str(error)) from error


def train(job: Job) -> dict[str, Tensor]:
    """Return the parameters after the last step."""
    trainer = trainer_for(job)
    if job.options is not None:
        trainer.add_callback(PowerSGDCallback(trainer, **job.options))
    trainer.train(resume_from_checkpoint=str(job.folder / f"checkpoint-{SAVED}") if job.resume else None)
    return whole(trainer.model_wrapped)
