"""A mixture of experts under FSDP2, on the meshes that training programs give its experts. All runs inside a worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

EXPERTS = 8
WIDTH = 24
HIDDEN = 16


class Experts(nn.Module):
    """Each worker applies the experts that it has: all, or its part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 5)
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.first, self.use_gate = 0, True

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        up, gate, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.gate, self.down))
        hidden = torch.tanh(torch.einsum("ti,ehi->eth", x, up))
        if self.use_gate:
            hidden = hidden * torch.einsum("ti,ehi->eth", x, gate)
        outputs = torch.einsum("eth,eih->eti", hidden, down)
        return torch.einsum("te,eti->ti", weights[:, self.first : self.first + len(up)], outputs).clone()


class Block(nn.Module):
    """A dense layer, and experts among which a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        # The experts that get tokens.
        self.busy = torch.ones(EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.dense(x))
        outputs: Tensor = x + self.experts(x, self.router(x).softmax(-1) * self.busy)
        return outputs


class Mixture(nn.Module):
    """Two blocks and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.head(x)
        return outputs


@functools.cache
def mesh_of(*sizes: int, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of all workers."""
    return DeviceMesh("cpu", torch.arange(torch.Size(sizes).numel()).view(sizes), mesh_dim_names=names)


def sharded(
    model: Mixture,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    dim: int = 0,
    parallel: DeviceMesh | None = None,
    by_module: bool = False,
) -> Any:
    """``fully_shard`` as torchtitan applies it: experts on a mesh of their own, in each block's second parameter group.

    ``dim`` is that on which experts are sharded, and ``parallel`` distributes whole experts before. With ``by_module``
    experts are a unit.
    """
    for block in (child for child in model.blocks if isinstance(child, Block)):
        if parallel is not None:
            for name, parameter in list(block.experts.named_parameters()):
                setattr(block.experts, name, nn.Parameter(distribute_tensor(parameter.data, parallel, [Shard(0)])))
            block.experts.first = parallel.get_local_rank() * EXPERTS // parallel.size()
        place: Callable[[nn.Parameter], Any] | None = None
        if by_module:
            fully_shard(block.experts, mesh=experts, shard_placement_fn=lambda _: Shard(dim))
        elif experts is None:
            place = functools.partial(_placement, {*block.experts.parameters()}, Shard(dim))
        else:
            place = functools.partial(
                _placed_on, {*block.experts.parameters()}, Shard(dim), *map(_info, (experts, mesh))
            )
        fully_shard(block, mesh=mesh, shard_placement_fn=place)
    return fully_shard(model, mesh=mesh)


def _placement(experts: set[nn.Parameter], placement: Shard, parameter: nn.Parameter) -> Shard | None:
    return placement if parameter in experts else None


def _info(mesh: DeviceMesh) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    return _get_mesh_info(mesh, None)


def _placed_on(experts: set[nn.Parameter], placement: Shard, own: Any, rest: Any, parameter: nn.Parameter) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    if parameter in experts:
        return ShardPlacementResult(placement=placement, mesh_info=own)
    return ShardPlacementResult(placement=Shard(0), mesh_info=rest)


def backward(model: Any, worker: int, step: int) -> None:
    """Gradients of a step with a worker's data."""
    model.zero_grad()
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(100 * step + worker))
    F.mse_loss(model(x), x.roll(1, dims=1).sin()).backward()


def gradients(model: Any) -> dict[str, Tensor]:
    """This worker's parts of all gradients."""
    return {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}
