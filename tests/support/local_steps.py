"""A small model and its text for tests of local steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.local_steps import LocalSteps

TERNARY = PowerSGDConfig(codes="ternary")
CONFIGS: dict[str, PowerSGDConfig | None] = {
    "exact": None,
    "ternary": TERNARY,
    "int2": PowerSGDConfig(codes="int2"),
    "int4": PowerSGDConfig(codes="int4"),
    "int8": PowerSGDConfig(codes="int8"),
    "rank": PowerSGDConfig(rank=2, min_compression_rate=0),
    "budget": PowerSGDConfig(compression=3, replan_every=2, min_compression_rate=0),
    "alternating": PowerSGDConfig(rank=2, algorithm="alternating", start_iter=1),
}


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(8, 12, generator=generator)
    return x, x[:, :5].sin() + 0.1 * worker


def backward(net: nn.Module, worker: int, step: int) -> Tensor:
    x, y = batch(worker, step)
    net.zero_grad()
    loss: Tensor = (net(x) - y).square().mean()
    loss.backward()
    return loss.detach()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def mean(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def owed(sync: LocalSteps) -> Tensor:
    """This worker's error, as ``flat`` is laid out. Zero where nothing is owed."""
    errors = sync.error()
    return torch.cat([errors.get(name, torch.zeros_like(t)).reshape(-1) for name, t in sync.shared().items()])


def theta(sync: LocalSteps) -> Tensor:
    """The shared parameters, as ``flat`` is laid out."""
    return torch.cat([shared.reshape(-1) for shared in sync.shared().values()])
