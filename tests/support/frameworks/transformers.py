"""transformers' Trainer."""

import os
from typing import Any

from accelerate import ParallelismConfig
from accelerate.state import GradientState
from torch import Tensor
from transformers import Trainer, TrainingArguments

from powersgd_triton.integrations.transformers import PowerSGDCallback
from tests.support.frameworks.accelerate import pretend_gpus
from tests.support.frameworks.job import DDP, HSDP, ZERO2, Data, Job, growing_scale, whole


def trainer_for(job: Job, **options: Any) -> Any:
    """Make the trainer that a user of this wrapper makes. ``options`` are further training arguments."""
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if job.wrapper == ZERO2:
        options["deepspeed"] = job.deepspeed()
    elif job.wrapper != DDP:
        options["fsdp"] = True
        # Whole optimizer states would be gathered on the device of a GPU.
        options["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["Block"],
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        if job.wrapper == HSDP:
            options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    arguments = TrainingArguments(
        output_dir=str(job.folder),
        use_cpu=True,
        bf16=job.bf16,
        max_steps=Job.STEPS,
        per_device_train_batch_size=Job.BATCH,
        gradient_accumulation_steps=Job.MICRO_BATCHES,
        max_grad_norm=job.clip or 0.0,
        optim="adamw_torch",
        learning_rate=Job.ADAM["lr"],
        adam_epsilon=Job.ADAM["eps"],
        lr_scheduler_type="constant",
        save_strategy="steps" if job.save else "no",
        save_steps=Job.SAVED,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )
    if job.wrapper != DDP:
        pretend_gpus(deepspeed=job.wrapper == ZERO2)
    trainer = Trainer(job.net(), arguments, train_dataset=Data())
    if job.scaled:
        trainer.accelerator.scaler = growing_scale()
    if job.options is not None:
        trainer.add_callback(PowerSGDCallback(trainer, **job.options))
    return trainer


def train(job: Job) -> dict[str, Tensor]:
    """Return the parameters after the last step."""
    trainer = trainer_for(job)
    trainer.train(resume_from_checkpoint=str(job.folder / f"checkpoint-{Job.SAVED}") if job.resume else None)
    return whole(trainer.model_wrapped)
