"""A model, steps and measurements that the tests of the FSDP adapters share. All of it runs inside a worker."""

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from powersgd_triton.config import PowerSGDConfig

WIDTH = 25
TOKENS = 17
FULL_RANK = PowerSGDConfig(rank=999, min_compression_rate=0)
RANK_2 = PowerSGDConfig(rank=2, min_compression_rate=1)
RATE = 0.5
"""The learning rate: a power of two, so that dividing by it rounds nothing."""
Gradients = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Its parameters' first dimensions divide by none of the numbers of workers; a matrix has fewer rows than those."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH + 1)
        self.down = nn.Linear(4 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(torch.tanh(self.up(self.norm(x) * self.scale.mean(0))))
        return outputs


class Net(nn.Module):
    """An embedding, identical blocks, and a layer that is used in some steps only."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.use = True
        self.checkpointing: bool | None = None
        # Called with the gradient of what the embedding returns: may change it, or raise an exception.
        self.inject: Callable[[Tensor], Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.inject is not None:
            x.register_hook(self.inject)
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpointing)
        if self.use:
            x = x + self.sometimes(x)
        logits: Tensor = self.head(x)
        return logits


def batch(worker: int, step: int, micro: int = 0) -> Batch:
    """Tokens and, for each, what is to be predicted."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + worker)
    tokens = torch.randint(0, TOKENS, (8, 6), generator=generator)
    return tokens, (tokens * 3 + 1) % TOKENS


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().clone()


def whole_errors(state: Any) -> Gradients:
    """The mean errors, as a state saves them."""
    return {name: whole(error) for name, error in state.state_dict()["error"].items()}


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def loss_of(module: Any, given: Batch) -> Tensor:
    tokens, targets = given
    return token_loss(module(tokens), targets)


def backward(module: Any, worker: int, step: int = 0) -> None:
    module.zero_grad()
    loss_of(module, batch(worker, step)).backward()


def parameters(module: Any) -> Gradients:
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def train(module: Any, worker: int, steps: range = range(3)) -> Gradients:
    """Whole parameters after some steps of FSDP with the data of a worker."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for step in steps:
        backward(module, worker, step)
        optimizer.step()
    return parameters(module)


@functools.cache
def mesh_of(**sizes: int) -> DeviceMesh:
    """A mesh of the first workers with dimensions of these names; all workers must call it.

    If it has one dimension and all workers, its group is the default one, whose timeout it has.
    """
    workers = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    return DeviceMesh("cpu", workers, mesh_dim_names=tuple(sizes))


def sharded(model: Net, mesh: DeviceMesh, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def replicated(model: Net, **options: Any) -> Any:
    """On all workers."""
    if "mesh" in inspect.signature(replicate).parameters:
        options["mesh"] = mesh_of(replicate=dist.get_world_size())
    else:
        # In torch 2.9 the mesh has a shard dimension of one worker.
        options["device_mesh"] = mesh_of(replicate=dist.get_world_size(), shard=1)
    for block in model.blocks:
        replicate(block, **options)
    return replicate(model, **options)


def freeze(model: Net) -> None:
    """An embedding and one of two identical matrices."""
    model.tokens.weight.requires_grad_(False)
    model.get_parameter("blocks.1.up.weight").requires_grad_(False)


def checkpoint(model: Net, use_reentrant: bool = False) -> None:
    model.checkpointing = use_reentrant


def check_said(*found: tuple[str, str]) -> None:
    for said, pattern in found:
        assert re.search(pattern, said, re.DOTALL), (said, pattern)
