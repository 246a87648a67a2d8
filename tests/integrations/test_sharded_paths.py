"""FSDP where gradients might be averaged on another path or in another group, and choices from measured times."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.planning import tuning
from powersgd_triton.planning.cost import ComputeTime, Network
from powersgd_triton.planning.trial import time_compute
from tests.support import tensor_parallel
from tests.support.checks import same_bits, set_times
from tests.support.distributed import make_test
from tests.support.sharded_training import (
    RANK_2,
    Net,
    batch,
    check_said,
    mesh_of,
    parameters,
    sharded,
    train,
)
from tests.support.training import complaint
from tests.support.wrappers import FSDP1, HSDP, WithReplicateGroup


def sums_in_its_own_group(worker: int, world_size: int) -> None:
    """FSDP1's reduce-scatters may be under way in the module's."""
    made = FSDP1(Net(), RANK_2)
    made.step([batch(worker, 0)])
    assert made.state._engine.communicator.group is not made.module.process_group


def others_average(output: Tensor) -> None:
    """What another library might set as the all-reduce hook."""
    dist.all_reduce(output)


def units_of(module: Any) -> list[Any]:
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def parameter_group(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def guards(worker: int, world_size: int) -> None:
    """Averaging on another path ends the backward pass; what only adds to ours does not."""
    mesh = mesh_of(replicate=2, shard=2)

    def replaced() -> Any:
        module = HSDP(Net(), RANK_2).module
        train(module, worker, range(1))
        for unit in units_of(module):
            unit.set_all_reduce_hook(others_average)
        return module

    def reset() -> Any:
        module = sharded(Net(), mesh)
        native = parameter_group(module).mesh_info
        apply_powersgd(module, RANK_2)
        for unit in units_of(module):
            parameter_group(unit).mesh_info = native
        return module

    def reduce_scattered() -> Any:
        module = sharded(Net(), mesh_of(shard=4))
        native = parameter_group(module)._reduce_scatter_comm
        apply_powersgd(module, RANK_2)
        for unit in units_of(module):
            unit.set_custom_reduce_scatter(native)
        return module

    accumulated = replaced()
    for parameter in accumulated.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for module, pattern in (
        (replaced(), "RuntimeError: gradients of.*test_sharded_paths.others_average"),
        (accumulated, "RuntimeError: gradients of.*test_sharded_paths.others_average"),
        (reset(), "its mesh_info was replaced"),
        (reduce_scattered(), "reduce scatter comm: it was replaced by.*DefaultReduceScatter"),
    ):
        before = parameters(module)
        check_said((complaint(module(batch(worker, 0)[0]).sum().backward), pattern))
        for unit in units_of(module):
            unit.reshard()
        assert same_bits(parameters(module), before)
    made = HSDP(Net(), RANK_2)
    module, state = made.module, made.state
    counted: list[int] = []
    for unit in units_of(module):
        ours = parameter_group(unit)._all_reduce_hook

        def counting(output: Tensor, ours: Any = ours) -> None:
            counted.append(output.numel())
            ours(output)

        unit.set_all_reduce_hook(counting)
    train(module, worker, range(2))
    assert len(counted) == 2 * len(units_of(module)) == 6
    assert state.iteration == 2


def settled(worker: int, world_size: int) -> None:
    """Of choices from measured times all workers settle the same, also where their shards differ."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "WARM_UP", 1)
        patch.setattr(tuning, "MEASURED", 1)
        for fields in ({"compression": "auto"}, {"compression": 3, "max_overhead": 0.3}):
            made = WithReplicateGroup(Net(), PowerSGDConfig(**fields))
            train(made.module, worker, range(6))
            made.state.check_replicas()
            found[str(fields)] = made.state._engine.plan.settled
        numel = sum(parameter.numel() for parameter in Net().parameters())
        # Not quantized gradients where they are not supported.
        cheap = lambda kind, *_: ComputeTime((1e-9 if kind.quantize else 1e3,) * 3)  # noqa: E731
        set_times(patch, Network(2, card=4.0 * numel), 1.0, cheap)
        split = tensor_parallel.parallel(tensor_parallel.Net(0, 8), mesh_of(replicate=2, shard=1, tensor=2))
        state = apply_powersgd(split, PowerSGDConfig(compression="auto"))
        train(split, worker // 2, range(6))
        assert state._engine.plan.settled == {"compression": None}
        patch.setattr(tuning, "time_compute", time_compute)
        patch.setattr(tuning, "time", time)
        # Two tensor-parallel workers have 17 and 16 rows of the embedding.
        patch.setattr(tensor_parallel, "TOKENS", 33)
        net = tensor_parallel.Net(0, 8)
        net.mix = nn.Identity()  # type: ignore[assignment]
        parallel = tensor_parallel.parallel(net, mesh_of(replicate=2, shard=1, tensor=2))
        config = PowerSGDConfig(compression=2, max_overhead=0.3, min_compression_rate=1)
        state = apply_powersgd(parallel, config)
        train(parallel, worker // 2, range(6))
        found["tensor parallel"] = state._engine.plan.settled
    model = sharded(Net(), mesh_of(shard=world_size))
    with pytest.raises(ValueError, match="a sharded model without replicas does not: choose a number"):
        apply_powersgd(model, PowerSGDConfig(compression="auto"))
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, found)
    assert all(other == found for other in everywhere)
    assert all(choice is not None for choice in found.values())


test_more_on_four_workers = pytest.mark.slow(make_test([sums_in_its_own_group, guards, settled], 4))
