"""FSDP: passes that use other parts of a model by turns, averages on other paths, and choices from measured times."""

import functools
import math
import operator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.checkpoint import checkpoint

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.planning import tuning
from powersgd_triton.planning.cost import ComputeTime, Network
from tests.support import tensor_parallel
from tests.support.checks import same_bits, set_times
from tests.support.distributed import make_test
from tests.support.sharded_training import (
    RANK_2,
    RATE,
    Net,
    backward,
    batch,
    check_said,
    loss_of,
    mesh_of,
    parameters,
    sharded,
    train,
)
from tests.support.training import complaint, relative
from tests.support.wrappers import FSDP1, FSDP2, HSDP, means


def by_turns(worker: int, world_size: int) -> None:
    """A backward pass that begins with a unit that the last one did not use has its own verdict and loss scale."""
    plain, name, scale = Net(), "sometimes.weight", torch.ones(())
    loss_of(plain, batch(worker, 0)).backward()
    expected = means({name: plain.sometimes.weight.grad})[name]  # type: ignore[dict-item]
    for wrapper, mesh in ((FSDP1, None), (FSDP2, mesh_of(shard=world_size)), (HSDP, mesh_of(replicate=2, shard=2))):
        net, options = Net(), dict[str, Any]()
        if mesh is None:
            options["auto_wrap_policy"] = CustomPolicy(functools.partial(operator.is_, net.sometimes))
        else:
            fully_shard(net.sometimes, mesh=mesh)
        made = wrapper(net, RANK_2, **options)
        made.state.attach(lambda: scale)
        scale.fill_(1)
        net.use, net.inject = False, functools.partial(torch.mul, math.nan)
        backward(made.module, worker)
        scale.fill_(4)
        net.use, net.inject = True, None
        made.module.zero_grad()
        (4 * loss_of(made.module, batch(worker, 0))).backward()
        before = made.parameters()
        made.update()
        averages = {key: (value - made.parameters()[key]) / RATE / 4 for key, value in before.items()}
        assert made.mean_error()[name].any()
        assert relative(averages[name] + made.mean_error()[name], expected) < 1e-5, wrapper


def by_themselves(worker: int, world_size: int) -> None:
    """A step of one part of a container does not undo one of others, in which activation checkpointing runs forward."""

    def errors(*scales: float) -> dict[str, Tensor]:
        parts = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)) for _ in range(3))
        for part in parts:
            for layer in (*part.children(), part):
                fully_shard(layer, mesh=mesh_of(shard=world_size))
        state = apply_powersgd(parts, RANK_2)
        for step, scale in enumerate(scales):
            values = torch.ones(8, 24, requires_grad=True) * torch.arange(worker, worker + 24)
            for part in parts[2:] if step else parts[:2]:
                values = checkpoint(part, values, use_reentrant=False)
            (scale * values.square().sum()).backward()
            assert state.iteration == step + 1
        return {name: error for name, error in means(state.error()).items() if name[0] in "01"}

    torch.manual_seed(0)
    before = errors(1)
    torch.manual_seed(0)
    assert same_bits(errors(1, math.nan), before)
    assert any(error.any() for error in before.values())


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.weight = nn.Parameter(torch.eye(24))

    def project(self, values: Tensor) -> Tensor:
        product: Tensor = values @ self.weight
        return product

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(self.project(values)))
        return found


def by_methods(worker: int, world_size: int) -> None:
    """So is one that inner modules run, or a method that FSDP does not know as the forward pass."""
    values = torch.arange(worker, worker + 24.0).repeat(8, 1).requires_grad_()
    found = list[dict[str, Tensor]]()
    for then in (None, "second", "project"):
        torch.manual_seed(0)
        model = Parts()
        for unit in (model.first, model.second, model):
            fully_shard(unit, mesh=mesh_of(shard=world_size))
        register_fsdp_forward_method(model, "project")
        state = apply_powersgd(model, RANK_2)
        model(values).sum().backward()
        model.first(values).square().sum().backward()
        if then is not None:
            (math.nan * getattr(model, then)(values).sum()).backward()
        found.append(means(state.error()))
        assert state.iteration == 2 + (then is not None)
    assert same_bits(found[1], found[0])
    assert same_bits(found[2], found[0])
    assert found[0]["first.weight"].any()


def compiled_before(_worker: int, world_size: int) -> None:
    """A model that is compiled before it is sharded, as by Accelerate, has the parameters of the root too."""
    for first in (True, False):
        inner = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
        names, model = {name for name, _ in inner.named_parameters()}, cast(Any, torch.compile(inner, backend="eager"))
        if first:
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        else:
            for unit in (inner[0], model):
                fully_shard(unit, mesh=mesh_of(shard=world_size))
        state = attach(model, RANK_2)
        model(torch.ones(8, 24)).sum().backward()
        assert {tensor.name for tensor in state.report().tensors} == names


test_passes = make_test([by_turns, by_themselves, by_methods, compiled_before], 4)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "WARM_UP", 1)
        patch.setattr(tuning, "MEASURED", 1)
        # Two tensor-parallel workers have 17 and 16 rows of the embedding.
        patch.setattr(tensor_parallel, "TOKENS", 33)
        mesh = mesh_of(replicate=2, shard=1, tensor=2)
        net = tensor_parallel.Net(0, 8)
        net.mix = nn.Identity()  # type: ignore[assignment]
        parallel = tensor_parallel.parallel(net, mesh)
        config = PowerSGDConfig(compression=2, max_overhead=0.3, min_compression_rate=1)
        limited = apply_powersgd(parallel, config)
        train(parallel, worker // 2, range(6))
        # Not quantized gradients where they are not supported.
        numel = sum(parameter.numel() for parameter in Net().parameters())
        cheap = lambda kind, *_: ComputeTime((1e-9 if kind.quantize else 1e3,) * 3)  # noqa: E731
        set_times(patch, Network(2, card=4.0 * numel), 1.0, cheap)
        split = tensor_parallel.parallel(tensor_parallel.Net(0, 8), mesh)
        state = apply_powersgd(split, PowerSGDConfig(compression="auto"))
        train(split, worker // 2, range(6))
        assert state._engine.plan.settled == {"compression": None}
    model = sharded(Net(), mesh_of(shard=world_size))
    with pytest.raises(ValueError, match="a sharded model without replicas does not: choose a number"):
        apply_powersgd(model, PowerSGDConfig(compression="auto"))
    chosen = limited._engine.plan.settled
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, chosen)
    assert chosen is not None
    assert all(other == chosen for other in everywhere)


test_more_on_four_workers = pytest.mark.slow(make_test([guards, settled], 4))
