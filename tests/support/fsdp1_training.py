"""FSDP1 around the model of ``sharded_training``, with the hook or without, and its training."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.fsdp1 import PowerSGDState, powerSGD_hook
from tests.support.sharded_training import STEPS, Block, Net, Run, batch


def wrapped(
    model: Net, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, original: bool = True, **options: Any
) -> Any:
    """FSDP1 around each block and the model."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=strategy,
        use_orig_params=original,
        device_id=torch.device("cpu"),
        **options,
    )


def compressed(model: Net, config: PowerSGDConfig, **options: Any) -> tuple[Any, PowerSGDState]:
    module = wrapped(model, **options)
    state = PowerSGDState(module, config)
    module.register_comm_hook(state, powerSGD_hook)
    return module, state


def train_fsdp1(
    module: Any,
    worker: int,
    *,
    micro_batches: int = 1,
    sync_each: bool = True,
    lr: float = 0.05,
    optimizer: torch.optim.Optimizer | None = None,
) -> Run:
    run = Run()
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            quiet = not sync_each and micro < micro_batches - 1
            with module.no_sync() if quiet else contextlib.nullcontext():
                tokens, targets = batch(worker, step, micro)
                loss = F.cross_entropy(module(tokens).float().flatten(0, 1), targets.flatten())
                loss.backward()
        # Each worker's shard; what is compared is all that the optimizer sees.
        gradients = {n: p.grad.detach().float().clone() for n, p in module.named_parameters() if p.grad is not None}
        run.gradients.append({name: gradient for name, gradient in gradients.items() if gradient.numel()})
        run.losses.append(float(loss.detach()))
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(module):
        run.parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    return run
