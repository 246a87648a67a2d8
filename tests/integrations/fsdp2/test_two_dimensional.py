"""HSDP on a two-dimensional mesh, and ``replicate()``, on gloo workers: equal to FSDP's own averaging; guards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method

from powersgd_triton.integrations.fsdp2 import apply_powersgd, seams
from tests.support.sharded_training import (
    CASES,
    FULL_RANK,
    RANK_2,
    Net,
    against_native,
    batch,
    check_full_rank,
    compare,
    full_mesh,
    hybrid_mesh,
    in_one_group,
    outcome,
    replica_mesh,
    replicated,
    sharded,
    train,
    two_dimensional,
    whole,
)
from tests.support.small import complaint

# Full rank against the framework's own averaging ----------------------------------------------------------------------


def no_reshard(module: Any) -> None:
    module.set_reshard_after_forward(False)


def compiled(backend: str, model: Net) -> None:
    """Compile the blocks."""
    for block in model.blocks:
        block.compile(backend=backend)


# What torch sums in bf16 is rounded once more or less often than our averages.
BF16_LIMITS = {"gradient": 2 * 2**-8, "parameters": 2**-12}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
RESHARDING: dict[str, dict[str, Any]] = {
    "reshard to two": {"options": {"reshard_after_forward": 2}},
    "no reshard": {"options": {"reshard_after_forward": False}},
    "no reshard, set": {"after": no_reshard},
}
ALL: dict[str, dict[str, Any]] = {
    **CASES,
    **RESHARDING,
    "bf16": {"options": {"mp_policy": BF16}},
    "offload": {"options": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
    "compiled": {"prepare": functools.partial(compiled, "eager")},
}


def cases(mode: str, names: Any, **settings: Any) -> dict[str, Callable[..., Any]]:
    return {f"{mode} {name}": functools.partial(against_native, mode=mode, **ALL[name], **settings) for name in names}


FAST = {
    **cases("mesh", ["plain", "no all-reduce", "frozen", "offload", "compiled", "bf16"]),
    **cases("replicate", ["plain", "no sync"]),
}

# Initialization on the meta device ------------------------------------------------------------------------------------


def on_meta(mesh: DeviceMesh) -> Any:
    with torch.device("meta"):
        model = Net()
    return sharded(model, mesh)


def initialize(module: Any, replica: int) -> None:
    """Values that differ between replicas."""
    module.to_empty(device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            torch.nn.init.uniform_(parameter, -0.3, 0.3)
            parameter.to_local().add_(0.01 * replica)


def meta(worker: int, world_size: int) -> dict[str, Any]:
    """Replicas are made equal when training begins, also if one of them was evaluated before."""
    mesh = hybrid_mesh(2, 2)
    replica = mesh.get_local_rank("replicate")
    native = on_meta(mesh)
    initialize(native, 0)
    expected = train(native, worker)
    module = on_meta(mesh)
    state: Any = apply_powersgd(module, FULL_RANK)
    initialize(module, replica)
    different = complaint(state.check_replicas)
    if replica == 0:
        with torch.no_grad():
            module.eval()(batch(0, 0)[0])
        # FSDP leaves the root's parameters whole, and an optimizer must not get those.
        module.reshard()
    got = train(module.train(), worker)
    state.check_replicas()
    bypassing = on_meta(mesh)
    apply_powersgd(bypassing, FULL_RANK)
    initialize(bypassing, replica)
    bypassing.predict = bypassing.forward
    register_fsdp_forward_method(bypassing, "predict")
    loss = bypassing.predict(batch(0, 0)[0]).sum()
    return {**compare(got, expected), "different": different, "bypassing": complaint(loss.backward)}


def evaluated_first(worker: int, world_size: int) -> dict[str, Any]:
    """After an evaluation the root's parameters are whole. They are shards when replicas are made equal."""
    mesh = hybrid_mesh(2, 2)
    expected = train(sharded(Net(), mesh), worker)
    module = sharded(Net(seed=mesh.get_local_rank("replicate")), mesh)
    with torch.no_grad():
        module(batch(0, 0)[0])
    state: Any = apply_powersgd(module, FULL_RANK)
    got = train(module, worker)
    with torch.no_grad():
        module(batch(0, 0)[0])
    state.check_replicas()
    return compare(got, expected)


# Guards ---------------------------------------------------------------------------------------------------------------


def others_average(output: Tensor) -> None:
    """What another library might set as the all-reduce hook."""
    dist.all_reduce(output)


def units_of(module: Any) -> list[Any]:
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def parameter_group(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def guards(worker: int, world_size: int) -> dict[str, Any]:
    """Averaging on another path ends the backward pass; what only adds to ours does not."""
    mesh = hybrid_mesh(2, 2)
    found: dict[str, Any] = {}

    def replaced() -> Any:
        module, _ = two_dimensional(Net(), mesh, RANK_2)
        train(module, worker, steps=range(2))
        module.zero_grad()
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
        module = sharded(Net(), full_mesh(4))
        native = parameter_group(module)._reduce_scatter_comm
        apply_powersgd(module, RANK_2)
        for unit in units_of(module):
            unit.set_custom_reduce_scatter(native)
        return module

    def in_accumulation() -> Any:
        module = replaced()
        for unit in units_of(module):
            unit.set_all_reduce_hook(others_average)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return module

    for name, build in (
        ("replaced", replaced),
        ("reset", reset),
        ("reduce-scatter", reduce_scattered),
        ("in accumulation", in_accumulation),
    ):
        module = build()
        before = {n: whole(p) for n, p in module.named_parameters()}
        found[name] = complaint(module(batch(worker, 0)[0]).sum().backward)
        for unit in units_of(module):
            unit.reshard()
        found[f"{name} changed"] = any(not torch.equal(whole(p), before[n]) for n, p in module.named_parameters())
    module, state = two_dimensional(Net(), mesh, RANK_2)
    counted: list[int] = []
    for unit in units_of(module):
        ours = parameter_group(unit)._all_reduce_hook

        def counting(output: Tensor, ours: Any = ours) -> None:
            counted.append(output.numel())
            ours(output)

        unit.set_all_reduce_hook(counting)
    train(module, worker, steps=range(2))
    return {**found, "counted": len(counted), "iteration": state.iteration}


def wrong_use(worker: int, world_size: int) -> dict[str, Any]:
    mesh = hybrid_mesh(2, 2)
    twice, _ = two_dimensional(Net(), mesh, RANK_2)
    copies = replicated(Net(), replica_mesh(4))
    apply_powersgd(copies, RANK_2)
    # One worker has another version of torch, so to speak.
    with mock.patch.object(seams, "TORCH_VERSIONS", ((1, 0), (1, 9)) if worker == 1 else seams.TORCH_VERSIONS):
        version = complaint(apply_powersgd, sharded(Net(), mesh), RANK_2)
    return {
        "twice": complaint(apply_powersgd, twice, RANK_2),
        "replicate, twice": complaint(apply_powersgd, copies, RANK_2),
        "other group": complaint(apply_powersgd, sharded(Net(), mesh), RANK_2, mesh["shard"].get_group()),
        "own group": complaint(apply_powersgd, sharded(Net(), mesh), RANK_2, mesh["replicate"].get_group()),
        "version": version,
    }


# Tests ----------------------------------------------------------------------------------------------------------------


@functools.cache
def four() -> dict[str, list[Any]]:
    others = {"meta": meta, "evaluated first": evaluated_first, "wrong use": wrong_use, "guards": guards}
    return in_one_group({**FAST, **others}, 4)


def check(found: list[dict[str, Any]], name: str) -> None:
    if "bf16" not in name:
        check_full_rank(found)
        return
    for seen in found:
        assert all(seen[key] <= limit for key, limit in BF16_LIMITS.items()), seen


@pytest.mark.parametrize("case", FAST)
def test_full_rank_equals_native(case: str) -> None:
    found = outcome(four(), case)
    check(found, case)
    assert all(seen["sent"][1] > 0 for seen in found)


@pytest.mark.parametrize("case", ["meta", "evaluated first"])
def test_replicas_that_start_differently(case: str) -> None:
    check_full_rank(outcome(four(), case))


def test_replicas_on_meta_are_made_equal_before_the_first_step() -> None:
    for seen in outcome(four(), "meta"):
        assert "replicas differ" in seen["different"]
        assert "RuntimeError: replicas were not made equal" in seen["bypassing"]


def test_gradients_averaged_on_another_path_are_noticed() -> None:
    for seen in outcome(four(), "guards"):
        for name in ("replaced", "in accumulation"):
            assert "RuntimeError: gradients of" in seen[name]
            assert "test_two_dimensional.others_average" in seen[name]
        assert "its mesh_info was replaced" in seen["reset"]
        assert "reduce scatter comm: it was replaced by" in seen["reduce-scatter"]
        assert "DefaultReduceScatter" in seen["reduce-scatter"]
        assert not any(seen[f"{name} changed"] for name in ("replaced", "reset", "reduce-scatter"))
        # A hook that calls ours is not in the way. There are four units.
        assert (seen["counted"], seen["iteration"]) == (8, 2)


@pytest.mark.parametrize("attempt", ["twice", "replicate, twice", "other group", "own group", "version"])
def test_wrong_use_is_explained(attempt: str) -> None:
    for worker, found in enumerate(outcome(four(), "wrong use")):
        said = found[attempt]
        if attempt == "own group":
            assert said == "nothing"
        elif attempt == "other group":
            assert "ValueError: replicate_group has the workers" in said
            assert "leave replicate_group out" in said
        elif attempt == "version":
            assert "models with a replicate dimension in their mesh were run with torch 1.0 to 1.9" in said
            assert f"but this is torch {torch.__version__}" in said
            assert 'replicate_group=mesh["replicate"].get_group()' in said
            assert said.startswith("RuntimeError" if worker == 1 else "DisagreementError: apply_powersgd failed on")
        else:
            assert "ValueError" in said
            assert "apply_powersgd called before" in said


@pytest.mark.parametrize(("version", "fits"), [("2.8.1", False), ("2.9.0", True), ("2.13.0+cpu", True), ("3.0", False)])
def test_versions_of_torch(version: str, fits: bool) -> None:
    assert (complaint(seams.check_torch, version) == "nothing") == fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "workers", "shape"),
    [
        ("mesh", 4, (2, 2)),
        ("mesh", 4, (1, 4)),
        ("mesh", 3, (3, 1)),
        ("replicate", 4, None),
        ("replicate", 3, None),
        ("full", 4, None),
    ],
)
def test_all_combinations_equal_native(mode: str, workers: int, shape: tuple[int, int] | None) -> None:
    left_out = {
        "mesh": {"reshard to two"} if shape == (3, 1) else set(),
        "replicate": {*RESHARDING},
        "full": {"no all-reduce"},
    }
    chosen = cases(mode, [name for name in ALL if name not in left_out[mode]], shape=shape)
    results = in_one_group(chosen, workers)
    for name in chosen:
        check(outcome(results, name), name)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks(backend: str) -> None:
    case = functools.partial(against_native, mode="mesh", prepare=functools.partial(compiled, backend))
    check_full_rank(outcome(in_one_group({"compiled": case}, 2), "compiled"))
