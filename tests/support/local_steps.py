"""A small model in local steps, and what became of its changes. All of it runs inside a worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
    "int8 factors": PowerSGDConfig(rank=2, min_compression_rate=0, wire_dtype="int8"),
    "budget": PowerSGDConfig(compression=3, replan_every=2, min_compression_rate=0),
    "alternating": PowerSGDConfig(rank=2, algorithm="alternating", start_iter=1),
}
LOST = 3e-6
"""What rounding in fp32 may lose of the changes of parameters below 1."""
SGD = functools.partial(torch.optim.SGD, lr=0.1)
WITH_MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(8, 12, generator=generator)
    return x, x[:, :5].sin() + 0.1 * worker


def backward(net: nn.Module, worker: int, step: int) -> None:
    x, y = batch(worker, step)
    net.zero_grad()
    (net(x) - y).square().mean().backward()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def mean(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def same_bits(tensor: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return all(torch.equal(tensor, other) for other in everyone)


def owed(sync: LocalSteps) -> Tensor:
    """This worker's error, as ``flat`` is laid out. Zero where nothing is owed."""
    errors = sync.error()
    return torch.cat([errors.get(name, torch.zeros_like(t)).reshape(-1) for name, t in sync.shared().items()])


def theta(sync: LocalSteps) -> Tensor:
    """The shared parameters, as ``flat`` is laid out."""
    return torch.cat([shared.reshape(-1) for shared in sync.shared().values()])


class Training:
    """Local steps of a model that begins differently on each worker, and the sum of what this worker has changed."""

    def __init__(
        self, worker: int, config: str = "ternary", every: Any = 3, *, optimizer: Callable[..., Any] = SGD, **more: Any
    ) -> None:
        self.worker, self.net, self.done = worker, model(worker), 0
        self.sync = LocalSteps(self.net, CONFIGS[config], every, **more)
        self.optimizer = optimizer(self.net.parameters())
        self.start, self.changed = flat(self.net), torch.zeros_like(flat(self.net))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            backward(self.net, self.worker, self.done)
            before = flat(self.net)
            self.optimizer.step()
            self.changed += before - flat(self.net)
            self.done += 1
            self.sync.step()

    def missing(self) -> float:
        """What neither θ nor the errors nor the local parameters have of all changes. Nothing may be under way."""
        local = theta(self.sync) - flat(self.net)
        lost = mean(self.changed) - (self.start - theta(self.sync)) - mean(owed(self.sync) + local)
        return float(lost.abs().max())

    def check(self) -> None:
        """That nothing is lost, and θ has the same bits on all workers."""
        missing = self.missing()
        assert missing < LOST, missing
        assert same_bits(theta(self.sync)), "workers hold different bits"

    def finish(self) -> None:
        """Exchange the rest, after which the workers' own parameters are θ."""
        self.sync.finish()
        assert torch.equal(flat(self.net), theta(self.sync))
        self.check()
