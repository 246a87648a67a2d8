"""A loop with Accelerate."""

import os
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor

from powersgd_triton.integrations.accelerate import compress
from tests.support.frameworks.job import DDP, HSDP, ZERO2, Data, Job, growing_scale, whole


def pretend_gpus(*, deepspeed: bool = False) -> None:
    """Make Accelerate believe that the workers have GPUs: on CPUs it ignores FSDP and DeepSpeed. GPUs need none.

    Call it before an ``Accelerator`` is made.
    """
    PartialState(cpu=True)
    shared = PartialState._shared_state
    shared["distributed_type"] = DistributedType.MULTI_GPU
    if deepspeed:
        import deepspeed as framework

        framework.init_distributed(dist_backend="gloo", verbose=False)
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        # Accelerate leaves DeepSpeed to GPUs.
        shared["_cpu"] = False


def accelerator_for(job: Job) -> Accelerator:
    """Make the accelerator that a user of this wrapper makes."""
    # An accelerator's state is the process's.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    options: dict[str, Any] = {
        "gradient_accumulation_steps": Job.MICRO_BATCHES,
        "mixed_precision": "bf16" if job.bf16 else "no",
    }
    if job.wrapper == DDP:
        accelerator = Accelerator(cpu=True, **options)
        if job.scaled:
            # Accelerate has a scaler on GPUs only.
            accelerator.scaler = growing_scale()
        return accelerator
    if job.wrapper == ZERO2:
        plugin = DeepSpeedPlugin(hf_ds_config=job.deepspeed())
        pretend_gpus(deepspeed=True)
        return Accelerator(deepspeed_plugin=plugin, **options)
    pretend_gpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    if job.wrapper == HSDP:
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    return Accelerator(cpu=True, fsdp_plugin=plugin, **options)


def train(job: Job) -> dict[str, Tensor]:
    """Return the parameters after the last step."""
    accelerator = accelerator_for(job)
    net = job.net()
    optimizer = torch.optim.AdamW(net.parameters(), **Job.ADAM)
    loader = torch.utils.data.DataLoader(Data(), batch_size=Job.BATCH)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    if job.options is not None:
        compress(accelerator, model, **job.options)
    if job.resume:
        accelerator.load_state(str(job.folder))
    micro, end = (Job.SAVED if job.resume else 0) * Job.MICRO_BATCHES, Job.STEPS * Job.MICRO_BATCHES
    while micro < end:
        epoch = micro % len(loader)
        for batch in accelerator.skip_first_batches(loader, epoch) if epoch else loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients and job.clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), job.clip)
                optimizer.step()
                optimizer.zero_grad()
            micro += 1
            if job.save and micro == Job.SAVED * Job.MICRO_BATCHES:
                accelerator.save_state(str(job.folder))
            if micro == end:
                break
    return whole(model)
