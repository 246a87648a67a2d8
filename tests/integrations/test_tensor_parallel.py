"""Matrices that tensor parallelism does not split: its workers have copies, which must stay equal."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from tests.support.distributed import folder, make_test
from tests.support.sharded_training import mesh_of
from tests.support.wrappers import local

PLANNED = PowerSGDConfig(compression=8, replan_every=2, min_compression_rate=1)
SHAPES = {"split": (64, 48), "copied": (48, 48)}


class Net(nn.Module):
    """Gradients are what ``forward`` is given."""

    def __init__(self, tensor_parallel: Any) -> None:
        super().__init__()
        self.split, self.copied = (nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values())
        if tensor_parallel is not None:
            whole = self.split.detach()
            self.split = nn.Parameter(distribute_tensor(whole, tensor_parallel, [Shard(0)], src_data_rank=None))

    def forward(self, split: Tensor, copied: Tensor) -> Tensor:
        return (local(self.split) * split).sum() + (self.copied * copied).sum()


def made(replicas: int, shards: int, parts: int) -> tuple[Net, Any]:
    if parts == 1:
        net, mesh = Net(None), mesh_of(replicate=replicas, shard=shards)
    else:
        whole = mesh_of(replicate=replicas, shard=shards, tensor=parts)
        net, mesh = Net(whole["tensor"]), whole["replicate", "shard"] if replicas > 1 else whole["shard"]
    fully_shard(net, mesh=mesh)
    return net, apply_powersgd(net, PLANNED)


def train(net: Net, steps: range, worker: int, parts: int) -> None:
    for step in steps:
        seeds = {"split": 100 * step + worker, "copied": 100 * step + 50 + worker // parts}
        given = {n: torch.randn(SHAPES[n], generator=torch.Generator().manual_seed(seed)) for n, seed in seeds.items()}
        # Their parts have other demands.
        given["split"] = given["split"][: SHAPES["split"][0] // parts] * 10 ** (worker % parts)
        if step == 1 and worker == 1:
            given["split"][0, 0] = math.inf
        net.zero_grad()
        net(**given).backward()
        averages = [p.grad.to_local() for p in net.parameters()]  # type: ignore[union-attr]
        finite = torch.tensor(all(bool(average.isfinite().all()) for average in averages), dtype=torch.int64)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        for parameter, average in zip(net.parameters(), averages, strict=True):
            parameter.detach().to_local().sub_(average * finite if finite else 0)  # type: ignore[attr-defined]


def different(tensor: Any) -> float:
    """The largest difference between the tensor-parallel workers, which are side by side."""
    own = tensor.detach().to_local().contiguous()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return max(float((one - other).abs().max()) for one, other in zip(found[::2], found[1::2], strict=True))


def copies(worker: int, _world_size: int) -> None:
    """Of an overflow in a part that only one of them has, and with ranks that are planned."""
    for replicas, shards in ((2, 1), (1, 2)):
        net, state = made(replicas, shards, 2)
        ranks = state._engine.plan.ranks["copied"]
        train(net, range(6), worker, 2)
        assert different(net.copied) == 0
        assert different(state.state_dict()["error"]["copied"]) == 0
        assert net.copied.to_local().any()  # type: ignore[attr-defined]
        assert state._engine.plan.ranks["copied"] == ranks
        with folder(worker) as path:
            state.save(path)
            state.load(path)


def loaded(worker: int, _world_size: int) -> None:
    """From a state of other shards, which has no copies."""
    net, state = made(2, 2, 1)
    train(net, range(2, 4), worker, 1)
    with folder(worker) as path:
        state.save(path)
        net, again = made(2, 1, 2)
        again.load(path)
    train(net, range(4, 6), worker, 2)
    assert again.iteration == 4
    assert different(net.copied) == 0


test_tensor_parallel = make_test([copies, loaded], 4)
