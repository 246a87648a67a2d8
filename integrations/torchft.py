"""DistributedDataParallel under a ``torchft.Manager``: workers come and go without a restart."""

from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.elastic.managed import Managed
from powersgd_triton.integrations.common import register
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook


class Backward:
    """The buckets of one backward pass after the other.

    DDP must see neither the exception of a lost worker nor a Future that is never completed. It then copies gradients
    that are not averaged, and the manager does not commit the step.
    """

    def __init__(self, state: PowerSGDState) -> None:
        self.state, self.runs = state, False
        self.pending: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []


def managed_hook(backward: Backward, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the workers of the quorum, or return it as it is once a worker was lost in this pass."""
    state, managed, buffer = backward.state, backward.state._managed, bucket.buffer()
    if bucket.index() == 0:
        backward.pending, backward.runs = [], managed.begin()
    average = managed.guarded(lambda: powerSGD_hook(state, bucket)) if backward.runs else None
    future: torch.futures.Future[torch.Tensor] = average or torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    backward.pending.append((future, buffer))
    if average is None:
        backward.runs = False
        for waiting, own in backward.pending:
            if not waiting.done():
                waiting.set_result(own)
    return future


def attach(model: Any, config: PowerSGDConfig, manager: Any) -> PowerSGDState:
    """Compress the gradients of a DDP model over the workers of each quorum. See ``powersgd_triton.attach``.

    ValueError: The model or the manager is not supported.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"manager= is for DistributedDataParallel and Compressor; got {type(model).__name__}. FSDP and DeepSpeed "
            "shard a model over workers that must all stay"
        )
    workers, finds, static = model.process_group.size(), model.find_unused_parameters, model.static_graph
    if workers != 1 or not finds or static:
        raise ValueError(
            "manager= needs a DDP model that sends nothing itself and never rebuilds its buckets: process_group="
            "torchft.process_group.ProcessGroupDummy(0, 1), find_unused_parameters=True, static_graph=False; "
            f"got {workers} workers, find_unused_parameters={finds} and static_graph={static}"
        )
    # The module itself: which parameters no worker has used is not known.
    state = PowerSGDState(config, module=model.module)
    state._managed = Managed(manager, state._engine)
    register(model, Backward(state), managed_hook)
    return state
