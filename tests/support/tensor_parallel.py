"""A model with tensor-parallel layers of every kind, on replicas × shards × tensor-parallel workers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.support.sharded_training import TOKENS


class Block(nn.Module):
    """Column- and row-wise layers, and a norm for sequence parallelism."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, hidden, bias=False)
        self.down = nn.Linear(hidden, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    """An embedding, two blocks, a head, and a matrix that is not split. The number of tokens is odd."""

    def __init__(self, seed: int = 0, hidden: int = 50) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(TOKENS, 24)
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(2)])
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, TOKENS, bias=False)
        self.mix = nn.Linear(TOKENS, TOKENS, bias=False)
        self.use = True
        # As in ``sharded_training.Net``.
        self.inject: Callable[[Tensor], Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.inject is not None:
            x.register_hook(self.inject)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.mix(self.head(self.norm(x)))
        return logits


def parallel(model: Net, mesh: DeviceMesh, *, two_dimensional: bool = True) -> Any:
    """Tensor parallelism inside, FSDP over replicas and shards, or over shards alone, outside."""
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    inner = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tensor"], plan)
    data = mesh["replicate", "shard"] if two_dimensional else mesh["shard"]
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], inner)
        fully_shard(block, mesh=data)
    return fully_shard(model, mesh=data)
