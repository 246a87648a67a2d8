"""A loop without a framework: what the others are compared with."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import attach
from tests.support.frameworks.job import (
    ADAM,
    CLIP,
    DDP,
    HSDP,
    MICRO_BATCHES,
    REPLICATE,
    SAVED,
    ZERO2,
    Job,
    batches,
    deepspeed_configuration,
    whole,
)


def train(job: Job) -> dict[str, Tensor]:
    """Return the parameters after the last step."""
    return _with_deepspeed(job) if job.wrapper == ZERO2 else _with_torch(job)


def _wrap(job: Job, net: nn.Module) -> nn.Module:
    workers = dist.get_world_size()
    if job.wrapper == DDP:
        return DistributedDataParallel(net)
    if job.wrapper == HSDP:
        mesh = init_device_mesh("cpu", (2, workers // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (workers,), mesh_dim_names=("workers",))
    shard: Any = replicate if job.wrapper == REPLICATE else fully_shard
    for block in net.get_submodule("blocks").children():
        shard(block, mesh=mesh)
    wrapped: nn.Module = shard(net, mesh=mesh)
    return wrapped


def _with_torch(job: Job) -> dict[str, Tensor]:
    model = _wrap(job, job.net())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    powersgd = None if job.options is None else attach(model, **job.options)
    if job.resume:
        weights, moments = get_state_dict(model, optimizer)
        dcp_load({"model": weights, "optimizer": moments}, checkpoint_id=job.folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        if powersgd is not None:
            powersgd.load(job.folder)
    data = iter(batches(job.steps.start))
    for step in job.steps:
        for micro in range(MICRO_BATCHES):
            with _synchronizing(model, last=micro == MICRO_BATCHES - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=job.bf16):
                    loss = model(**next(data))["loss"] / MICRO_BATCHES
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if job.save and step + 1 == SAVED:
            weights, moments = get_state_dict(model, optimizer)
            dcp_save({"model": weights, "optimizer": moments}, checkpoint_id=job.folder)
            if powersgd is not None:
                powersgd.save(job.folder)
    return whole(model)


def _synchronizing(model: Any, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """Forward and backward in this context average gradients if this is the last micro-batch."""
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def _with_deepspeed(job: Job) -> dict[str, Tensor]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    net = job.net()
    configuration = deepspeed_configuration() | {"bf16": {"enabled": job.bf16}}
    optimizer = torch.optim.AdamW(net.parameters(), **ADAM)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=configuration)
    if job.options is not None:
        attach(engine, **job.options)
    if job.resume:
        engine.load_checkpoint(job.folder)
    data = iter(batches(job.steps.start))
    for step in job.steps:
        for _ in range(MICRO_BATCHES):
            engine.backward(engine(**next(data))["loss"])
            engine.step()
        if job.save and step + 1 == SAVED:
            engine.save_checkpoint(job.folder)
    return whole(engine.module)
