"""Make sharded replicas of a model equal at the start, and compare them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from powersgd_triton.comm.agreement import fingerprint
from powersgd_triton.comm.communicator import Communicator, travel_device
from powersgd_triton.ops.gradients import as_real, write_back


def reshard(model: nn.Module) -> None:
    """Make the model's parameters its shards. After a forward pass without gradients, the root's are still whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, this worker's part) of all parameters and buffers."""
    reshard(model)
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            yield name, (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@torch.no_grad()
def broadcast_from_first(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Overwrite parameters and buffers with those of the group's first worker."""
    communicator = Communicator(group)
    for _, tensor in local_tensors(model):
        if tensor.numel():
            # With CPU offloading, parameters are on the CPU although the group may be one of GPUs.
            sent = as_real(tensor).to(travel_device(group) if tensor.is_cpu else tensor.device)
            communicator.broadcast(sent)
            write_back(sent, tensor)


@torch.no_grad()
def unequal_tensors(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Return the names of parameters and buffers whose bits differ between workers of the group."""
    names, prints = [], []
    for name, tensor in local_tensors(model):
        names.append(name)
        prints.append(fingerprint(tensor).to(travel_device(group) if tensor.is_cpu else tensor.device))
    if not names:
        return []
    # One all-reduce gives the largest value of each fingerprint and, negated, the smallest.
    extremes = torch.stack([torch.stack(prints), -torch.stack(prints)])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return [name for name, equal in zip(names, (extremes[0] == -extremes[1]).tolist(), strict=True) if not equal]
