"""Choices from measured times with sharded models: all workers settle the same, also where their shards differ."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from powersgd_triton import PowerSGDConfig
from powersgd_triton.core import tuning
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from tests.support import tensor_parallel
from tests.support.distributed import run
from tests.support.sharded_training import Net, hybrid, hybrid_mesh, train

STEPS = range(6)


def settled(worker: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "WARM_UP", 1)
        patch.setattr(tuning, "MEASURED", 1)
        for fields in ({"compression": "auto"}, {"compression": 3, "max_overhead": 0.3}):
            model, state = hybrid(Net(), hybrid_mesh(2, 2), PowerSGDConfig(**fields))
            train(model, worker, steps=STEPS)
            state.check_replicas()
            found[str(fields)] = state._engine.plan.settled
        # Two tensor-parallel workers have 17 and 16 rows of the embedding.
        patch.setattr(tensor_parallel, "TOKENS", 33)
        net = tensor_parallel.Net(0, 8)
        net.mix = nn.Identity()  # type: ignore[assignment]
        parallel = tensor_parallel.parallel(net, tensor_parallel.mesh_of(2, 1, 2))
        config = PowerSGDConfig(compression=2, max_overhead=0.3, min_compression_rate=1)
        state = apply_powersgd(parallel, config)
        train(parallel, worker // 2, steps=STEPS)
        found["tensor parallel"] = state._engine.plan.settled
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    with pytest.raises(ValueError, match="a sharded model without replicas does not: choose a number"):
        apply_powersgd(model, PowerSGDConfig(compression="auto"))
    return found


def test_all_workers_settle_the_same() -> None:
    first, *others = run(settled, 4)
    assert all(other == first for other in others)
    assert all(choice is not None for choice in first.values())
