"""What only FSDP has, beside the table: whole matrices, replicas that start differently, other hooks, wrong use."""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations import ddp
from powersgd_triton.integrations.fsdp1 import PowerSGDState, powerSGD_hook
from powersgd_triton.integrations.fsdp2 import apply_powersgd, units
from powersgd_triton.layout.matrices import compressed_rank
from tests.support import tensor_parallel
from tests.support.balance import Ledger, check_close
from tests.support.distributed import make_test, named
from tests.support.sharded_training import (
    FULL_RANK,
    RANK_2,
    Net,
    backward,
    batch,
    check_said,
    loss_of,
    mesh_of,
    parameters,
    replicated,
    sharded,
    train,
    whole,
)
from tests.support.training import complaint, relative
from tests.support.wrappers import FSDP1, FSDP2, HSDP, WithReplicateGroup, means


def unequal_replicas(worker: int, world_size: int) -> None:
    """Replicas are made equal at the start, stay so, have errors of their shards, and are noticed if they differ."""
    mesh = mesh_of(replicate=2, shard=2)
    group = mesh["replicate"].get_group()
    net = Net(seed=dist.get_rank(group))
    net.register_buffer("tokens_seen", torch.zeros(2), persistent=False)
    made = WithReplicateGroup(net, RANK_2)
    module, state = made.module, made.state
    train(module, worker)
    module.tokens_seen += worker
    state.check_replicas()
    rows = [(-(-p.shape[0] // 2), *p.shape[1:]) for p in module.parameters()]
    errors = sum(math.prod(shape) for shape in rows if compressed_rank(shape, RANK_2))
    assert sum(matrix.error.numel() for matrix in state._residuals.matrices.values()) == errors > 0
    with torch.no_grad():
        local = next(module.parameters()).to_local()
        if local.numel() and dist.get_rank(group) == 0:
            local.view(-1)[0] += 1e-7 + abs(float(local.view(-1)[0])) * 1e-6
    said = complaint(state.check_replicas)
    assert "RuntimeError: replicas differ in 1 tensors, the first of them ['tokens.weight']" in said, said


def evaluate(module: Any) -> None:
    with torch.no_grad():
        module.eval()(batch(0, 0)[0])
    module.train()


def made_equal(worker: int, world_size: int) -> None:
    """When training begins, from the first one, on the meta device or not, also after an evaluation."""
    mesh = mesh_of(replicate=2, shard=2)
    replica = mesh.get_local_rank("replicate")
    native = sharded(Net(), mesh)
    start, local = parameters(native), [p.detach().to_local().clone() for p in native.parameters()]
    expected = train(native, worker)
    for meta in (False, True):
        with torch.device("meta" if meta else "cpu"):
            module = sharded(Net(seed=replica), mesh)
        if not meta:
            evaluate(module)
        state: Any = apply_powersgd(module, FULL_RANK)
        if meta:
            module.to_empty(device="cpu")
            with torch.no_grad():
                for parameter, value in zip(module.parameters(), local, strict=True):
                    parameter.to_local().copy_(value + 0.01 * replica)
            assert "replicas differ" in complaint(state.check_replicas)
            if replica == 0:
                evaluate(module)
                # FSDP leaves the root's parameters whole, and an optimizer must not get those.
                module.reshard()
        check_close(train(module, worker), expected, start)
        evaluate(module)
        state.check_replicas()
    with torch.device("meta"):
        bypassing = sharded(Net(), mesh)
    apply_powersgd(bypassing, FULL_RANK)
    bypassing.to_empty(device="cpu")
    bypassing.predict = bypassing.forward
    register_fsdp_forward_method(bypassing, "predict")
    loss = bypassing.predict(batch(0, 0)[0]).sum()
    assert "RuntimeError: replicas were not made equal" in complaint(loss.backward)


def with_unused(worker: int, world_size: int) -> None:
    """A unit with an unused parameter is averaged exactly. If it is not finite, the step counts nowhere."""
    plain = Net()
    plain.use = False
    loss_of(plain, batch(worker, 0)).backward()
    expected = means({name: p.grad for name, p in plain.blocks.named_parameters("blocks") if p.grad is not None})
    for wrapper in (FSDP2, HSDP):
        made = wrapper(Net(), RANK_2)
        made.net.use, made.net.inject = False, functools.partial(torch.mul, math.nan)
        backward(made.module, worker)
        errors = made.mean_error()
        for name in ("blocks.0.up.weight", "blocks.1.down.weight"):
            assert relative(errors[name], expected[name]) < 1e-5, (wrapper, name)


def unfrozen(worker: int, world_size: int) -> None:
    """What is trained from a later step on is averaged then: a parameter, and after a load all of a unit."""
    name = "blocks.1.up.weight"
    for wrapper in (FSDP1, FSDP2, HSDP):
        net = Net()
        net.get_parameter(name).requires_grad_(False)
        net.blocks[0].requires_grad_(False)
        made = wrapper(net, RANK_2)
        ledger = Ledger(made)
        ledger.train([0])
        # Else they were averaged exactly, here and below.
        assert made.mean_error()["blocks.1.down.weight"].any(), wrapper
        ledger.given[name].zero_()
        made.net.get_parameter(name).requires_grad_(True)
        ledger.train([1])
        assert made.mean_error()[name].any(), wrapper
        for each, total in ledger.given.items():
            total.mul_(not each.startswith("blocks.0"))
        made.state.load_state_dict(made.state.state_dict())
        made.module.requires_grad_(True)
        ledger.train([2])
        ledger.check()
        assert made.mean_error()["blocks.0.up.weight"].any(), wrapper


SEQUENCES = {"shard": 2, "sequence": 2}
# DTensor finds out for seconds what each operation does there.
WITH_REPLICAS = [{"replicate": 2, "shard": 2, "sequence": 1}, {"replicate": 2, "shard": 1, "sequence": 2}]


def mesh_dims(worker: int, world_size: int, meshes: Sequence[dict[str, int]]) -> None:
    """All parameters and inputs are DTensors on the whole mesh, of which FSDP gets the names of its dimensions."""
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        return
    for sizes in meshes:
        names = tuple(sizes)
        mesh = mesh_of(**sizes)
        # A dimension of one worker may be left out.
        shard = tuple(name for name in names[names.index("shard") :] if name == "shard" or sizes[name] > 1)
        replicate = "replicate" if "replicate" in sizes else None
        dims = torch.distributed.fsdp.DataParallelMeshDims(shard=shard, replicate=replicate)
        runs: list[Tensor] = []
        for config in (None, FULL_RANK):
            torch.manual_seed(0)
            module: Any = distribute_module(nn.Sequential(nn.Linear(40, 81), nn.Tanh(), nn.Linear(81, 40)), mesh)
            for child in (module[0], module):
                fully_shard(child, mesh=mesh, dp_mesh_dims=dims)
            state: Any = None if config is None else apply_powersgd(module, config)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            for step in range(3):
                inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + worker))
                inputs = DTensor.from_local(inputs, mesh, [Shard(0)] * mesh.ndim)
                optimizer.zero_grad()
                (module(inputs) - inputs).square().mean().backward()
                optimizer.step()
            runs.append(torch.cat([whole(parameter).flatten() for parameter in module.parameters()]))
        assert relative(runs[1], runs[0]) <= 1e-6, sizes
        assert state.iteration == 3
        assert state.compression_stats()[2] > 0
        state.load_state_dict(state.state_dict())


def wrong_use(worker: int, world_size: int) -> None:
    applied = FSDP1(Net(), RANK_2)
    # FSDP1's reduce-scatters may be under way in the module's.
    assert applied.state._engine.communicator.group is not applied.module.process_group
    other, of_ddp, hook_of_ddp = (FSDP1(Net(), None).module for _ in range(3))
    other.register_comm_hook(applied.state, powerSGD_hook)
    of_ddp.register_comm_hook(ddp.PowerSGDState(None), powerSGD_hook)
    hook_of_ddp.register_comm_hook(applied.state, ddp.powerSGD_hook)
    wrapped, of_torch = (DistributedDataParallel(Net()) for _ in range(2))
    wrapped.register_comm_hook(applied.state, powerSGD_hook)
    of_torch.register_comm_hook(torchs.PowerSGDState(None), ddp.powerSGD_hook)
    frozen, mixed = Net().requires_grad_(False), Net()
    mixed.sometimes = FullyShardedDataParallel(mixed.sometimes, device_id=torch.device("cpu"))  # type: ignore[assignment]
    partly = FSDP1(mixed, None, auto_wrap_policy=None, sharding_strategy=ShardingStrategy.NO_SHARD).module
    single = dist.new_group([worker], use_local_synchronization=True)
    groups = {"process_group": (dist.group.WORLD, single)}
    cut = FSDP1(Net(), None, sharding_strategy=ShardingStrategy.HYBRID_SHARD, **groups).module
    check_said(
        (complaint(PowerSGDState, applied.module, RANK_2), "ValueError.*communication hook already.*once"),
        (complaint(backward, other, worker), "RuntimeError.*does not know.*Build PowerSGDState from the model"),
        (complaint(backward, of_ddp, worker), r"TypeError.*integrations.fsdp1.*integrations.ddp.PowerSGDState"),
        (complaint(backward, hook_of_ddp, worker), r"TypeError.*this powerSGD_hook is for Distr.*integrations.fsdp1"),
        (complaint(backward, wrapped, worker), r"TypeError.*this powerSGD_hook is for Fully.*integrations.ddp"),
        (complaint(backward, of_torch, worker), r"TypeError.*a PowerSGDState of powersgd_triton.*got one of torch"),
        (complaint(getattr, ddp.PowerSGDState(None), "error_dict"), r"AttributeError.*register.*ddp.powerSGD_hook"),
        (complaint(PowerSGDState, cut, RANK_2), "ValueError.*HYBRID_SHARD.*replicate_group"),
        (complaint(PowerSGDState, nn.Linear(2, 2), RANK_2), "TypeError.*Linear.*integrations.fsdp2"),
        (complaint(PowerSGDState, FSDP1(frozen, None).module, RANK_2), "ValueError.*no trainable parameters"),
        (complaint(PowerSGDState, partly, PowerSGDConfig(compression="auto")), "ValueError.*a sharded model does not"),
    )
    mesh, line = mesh_of(replicate=2, shard=2), mesh_of(shard=world_size)
    shards, group = mesh["shard"], mesh["replicate"].get_group()
    copies = replicated(Net())
    apply_powersgd(copies, RANK_2)
    divided = FSDP2(Net(), RANK_2).module
    divided.set_gradient_divide_factor(8.0)
    custom = Net()
    head: Any = fully_shard(custom.head, mesh=line)
    head.set_custom_reduce_scatter(nn.Identity())

    def attempt(model: Any, replicate_group: Any = group) -> str:
        return complaint(apply_powersgd, model, RANK_2, replicate_group)

    # One worker has another version of torch, so to speak.
    with mock.patch.object(units, "TORCH_VERSIONS", ((1, 0), (1, 9)) if worker == 1 else units.TORCH_VERSIONS):
        version = attempt(sharded(Net(), mesh), replicate_group=None)
    split = tensor_parallel.parallel(tensor_parallel.Net(0, 8), mesh_of(replicate=2, shard=1, tensor=2))
    for field in ("quantize", "bypass"):
        said = complaint(apply_powersgd, split, PowerSGDConfig.from_dict({field: "int8"}))
        check_said((said, f"ValueError: {field} does not keep tensors equal.*tensor parallelism"))
    failed = "^RuntimeError: " if worker == 1 else "DisagreementError: apply_powersgd failed on.*"
    wrong_group, before = "ValueError: replicate_group has the workers.*", "ValueError.*apply_powersgd called before"
    check_said(
        *((attempt(model, replicate_group=None), before) for model in (divided, HSDP(Net(), RANK_2).module, copies)),
        (attempt(WithReplicateGroup(Net(), RANK_2).module), before),
        (attempt(sharded(Net(), shards), replicate_group=shards.get_group()), f'{wrong_group}mesh\\["replicate"]'),
        (attempt(sharded(Net(), mesh), replicate_group=shards.get_group()), f"{wrong_group}leave replicate_group out"),
        (attempt(sharded(Net(), mesh)), "^nothing$"),
        (attempt(Net()), "ValueError.*fully_shard"),
        (
            attempt(sharded(custom, line), replicate_group=None),
            r"'head'.*custom reduce-scatter \(Identity\).*nor set_symm_mem",
        ),
        (complaint(backward, divided, worker), r"RuntimeError.*divide_factor.*_force_sum_reduction_for_comms\(True\)"),
        (
            version,
            f"{failed}models with a replicate dimension in their mesh were run with torch 1.0 to 1.9.*"
            rf"but this is torch {re.escape(torch.__version__)}.*"
            r'replicate_group=mesh\["replicate"].get_group\(\)',
        ),
    )


OTHERS = named([unequal_replicas, made_equal, unfrozen, with_unused, wrong_use])
test_on_four_workers = make_test({**OTHERS, "mesh_dims": functools.partial(mesh_dims, meshes=[SEQUENCES])}, 4)
test_more_dimensions = pytest.mark.slow(make_test({"mesh_dims": functools.partial(mesh_dims, meshes=WITH_REPLICAS)}, 4))


def test_versions_of_torch() -> None:
    for version, fits in (("2.8.1", False), ("2.9.0", True), ("2.13.0+cpu", True), ("3.0", False)):
        assert (complaint(units.check_torch, version) == "nothing") == fits, version
