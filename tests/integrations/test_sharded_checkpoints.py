"""Checkpoints of the FSDP adapters through torch.distributed.checkpoint: saved on one mesh, loaded on another.

The table saves and loads by ``save(folder)``, and damages what is saved on one worker.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from powersgd_triton import attach
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.layout.layout import compressed_rank
from tests.support.distributed import folder
from tests.support.fsdp1_training import compressed
from tests.support.sharded_training import (
    RANK_2,
    Net,
    batch,
    full_mesh,
    full_shard,
    hybrid,
    hybrid_mesh,
    in_one_group,
    outcome,
    replica_mesh,
    replicated,
    sharded,
    two_dimensional,
    whole,
)
from tests.support.small import complaint
from tests.support.training import flat, relative

Shape = tuple[int, int]
Gradients = dict[str, Tensor]
Optimizers = torch.optim.Optimizer | tuple[()]
# Replicas × shards: where they are loaded that were saved there.
QUICK_LOADS: dict[Shape, list[Shape]] = {(2, 2): [(1, 3)], (4, 1): [(2, 2)]}
LOADS: dict[Shape, list[Shape]] = {(2, 2): [(2, 2), (1, 2), (2, 1), (1, 3), (4, 1)], (4, 1): [(2, 2), (1, 3)]}


def replicas(net: Net) -> tuple[Any, Any]:
    module = replicated(net, replica_mesh(4))
    return module, apply_powersgd(module, RANK_2)


BUILD: dict[str, Callable[[Net], tuple[Any, Any]]] = {
    "hybrid": lambda net: hybrid(net, hybrid_mesh(2, 2), RANK_2),
    "mesh": lambda net: two_dimensional(net, hybrid_mesh(2, 2), RANK_2),
    "replicate": replicas,
    "full": lambda net: full_shard(net, full_mesh(4), RANK_2),
    "fsdp1": lambda net: compressed(net, RANK_2),
}


def step(module: Any, worker: int, number: int, optimizer: torch.optim.Optimizer | None = None) -> Gradients:
    """Train; the averaged gradients, whole (with FSDP1 this worker's part)."""
    module.zero_grad()
    tokens, targets = batch(worker, number)
    F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten()).backward()
    found = {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None and p.grad.numel()}
    if optimizer is not None:
        optimizer.step()
    return found


def sgd(module: Any, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum)


def errors_of(state: Any) -> Gradients:
    """The mean errors as whole tensors."""
    return {name: whole(error) for name, error in state.state_dict()["error"].items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def save(path: str, module: Any, optimizer: Optimizers, state: Any) -> None:
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp_save({"model": model_state, "optimizer": optimizer_state, "powersgd": state}, checkpoint_id=path)


def load(path: str, module: Any, optimizer: Optimizers, state: Any, group: Any = None) -> None:
    model_state, optimizer_state = get_state_dict(module, optimizer)
    saved = {"model": model_state, "optimizer": optimizer_state, "powersgd": state}
    dcp_load(saved, checkpoint_id=path, process_group=group)
    set_state_dict(module, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


def on_other_meshes(worker: int, _world_size: int, *, loads: Mapping[Shape, Sequence[Shape]]) -> None:
    """Nothing is lost on another mesh, where other matrices are compressed."""
    ranks = [compressed_rank((-(-3 // shards), 25), RANK_2) for shards in (1, 2, 3)]
    assert ranks == [2, 0, 0], "no errors of matrices that are no longer compressed, and no new ones"
    shapes = {shape: None for loaded_on in loads.values() for shape in loaded_on}
    groups = {shape: dist.new_group(hybrid_mesh(*shape).mesh.flatten().tolist()) for shape in shapes}
    for saved_on, loaded_on in loads.items():
        module, state = hybrid(Net(), hybrid_mesh(*saved_on), RANK_2)
        optimizer = sgd(module)
        for number in range(3):
            step(module, worker, number, optimizer)
        errors = errors_of(state)
        parameters = {name: whole(p) for name, p in module.named_parameters()}
        with folder(worker) as path:
            save(path, module, optimizer, state)
            for shape in loaded_on:
                if worker < hybrid_mesh(*shape).size():
                    load_on(path, worker, shape, groups[shape], errors, parameters)
                dist.barrier()


def load_on(path: str, worker: int, shape: Shape, group: Any, errors: Gradients, parameters: Gradients) -> None:
    """Σ Ĝ + E over the step after loading is what exact averaging gives plus the loaded errors."""
    mesh = hybrid_mesh(*shape)
    module, state = hybrid(Net(seed=9), mesh, RANK_2)
    load(path, module, sgd(module), state, group)
    state.check_replicas()
    assert flat(errors).norm() > 0
    assert same(errors_of(state), errors)
    assert same({name: whole(p) for name, p in module.named_parameters()}, parameters)
    assert state.iteration == 3
    exact_module = sharded(Net(seed=9), mesh)
    # Both are sharded alike, on meshes of one and two dimensions.
    with torch.no_grad():
        for ours, theirs in zip(exact_module.parameters(), module.parameters(), strict=True):
            ours.to_local().copy_(theirs.to_local())
    exact, averages = step(exact_module, worker, 50), step(module, worker, 50)
    after = errors_of(state)
    arrived = {name: averages[name] + after[name] for name in errors}
    given = {name: exact[name] + errors[name] for name in errors}
    assert relative(flat(arrived), flat(given)) <= 1e-6
    assert relative(flat(averages), flat(exact)) > 1e-3


def goes_on(worker: int, _world_size: int, *, saves: str, loads: str) -> None:
    """The run goes on as if it had not been interrupted, with its optimizer."""
    # Without momentum there is no state of the optimizer, which with FSDP1 has no DTensors.
    momentum = 0.0 if saves == "fsdp1" else 0.9
    (module, state), (other, other_state) = BUILD[saves](Net()), BUILD[loads](Net(seed=5))
    optimizer, other_optimizer = sgd(module, momentum), sgd(other, momentum)
    for number in range(2):
        step(module, worker, number, optimizer)
    with folder(worker) as path:
        save(path, module, optimizer if momentum else (), state)
        load(path, other, other_optimizer if momentum else (), other_state)
    for number in range(2, 4):
        expected, got = step(module, worker, number, optimizer), step(other, worker, number, other_optimizer)
        assert relative(flat(got), flat(expected)) <= 1e-4
    ours, theirs = ({n: whole(p) for n, p in one.named_parameters()} for one in (other, module))
    assert relative(flat(ours), flat(theirs)) <= 1e-6
    assert state.iteration == other_state.iteration == 4


def between_adapters(worker: int, _world_size: int) -> None:
    """Errors saved by one adapter are loaded by others, and by a model whose parameters have other names now."""
    module, state = BUILD["hybrid"](Older())
    for number in range(2):
        step(module, worker, number)
    errors = errors_of(state)
    errors["head.weight"] = errors.pop("top.weight")
    assert errors["head.weight"].any()
    with folder(worker) as path:
        dcp_save({"powersgd": state}, checkpoint_id=path)
        for name in ("hybrid", "full", "fsdp1"):
            other = BUILD[name](Net())[1]
            dcp_load({"powersgd": other.renamed({"top.weight": "head.weight"})}, checkpoint_id=path)
            assert same(errors_of(other), errors), name
            assert other.iteration == 2
    assert "'neck.weight' is not a trainable parameter" in complaint(other.renamed, {"top.weight": "neck.weight"})


class Older(Net):
    """The model when its head had another name."""

    def __init__(self) -> None:
        super().__init__()
        self.top = self.head
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        self.__dict__["head"] = self.top
        return super().forward(tokens)


def written(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def refuses(worker: int, _world_size: int) -> None:
    """States of something else, or that are damaged."""
    _, state = BUILD["hybrid"](Net())
    saved = state.state_dict()
    without = {name: error for name, error in saved["error"].items() if name != "head.weight"}
    basis = {"head.weight": {"basis": torch.ones(1, 1).expand(20_000, 20_000)}}
    factors = [
        3,
        b"garbage",
        written([1]),
        written({"version": 3, "shards": []}),
        written({"version": 3, "shards": ["a", "b"]}),
        written({"version": 3, "shards": [{"head.weight": {"basis": torch.ones(3)}}] * 2}),
        written({"version": 3, "shards": [basis] * 2}),
        written({"version": [3], "shards": [{}] * 2}),
        written({"version": 3, "shards": [{}] * 2, "plans": 3}),
    ]
    for bad, pattern in (
        ({"iteration": 3}, "'error', 'factors'"),
        ({**saved, "error": without}, "no error of 'head.weight'"),
        ({**saved, "error": None}, ""),
        *(({**saved, "factors": content}, "") for content in factors),
    ):
        said = complaint(state.load_state_dict, bad)
        assert said.startswith("ValueError"), (bad, said)
        assert pattern in said
    state.load_state_dict(saved)


def torn_apart(worker: int, world_size: int) -> None:
    """States that went through torch.save: of another worker, this one's own, of another replica, and whole ones."""
    for mode in ("hybrid", "full", "fsdp1"):
        module, state = BUILD[mode](Net())
        for number in range(2):
            step(module, worker, number)
        before = errors_of(state)
        files: list[Any] = [None] * world_size
        dist.all_gather_object(files, written(state.state_dict()))
        whole_state = {**state.state_dict(), "error": before}
        part = {**whole_state, "error": {name: error[:1] for name, error in before.items()}}

        def of(writer: int, files: list[Any] = files) -> Any:
            return torch.load(io.BytesIO(files[writer]), weights_only=False)

        for bad, pattern in (
            (of(0), r"torch.save\(\).*save\(folder\)"),
            # The next shard. Replicas have equal shards.
            (of(worker ^ 1), r"torch.save\(\).*save\(folder\)"),
            (part, "must be a tensor of shape"),
        ):
            said = complaint(state.load_state_dict, bad)
            assert said.startswith("ValueError"), said
            assert re.search(pattern, said, re.DOTALL), said
        # A replica has process groups of its own.
        for good in (of(worker), whole_state, *([of(worker ^ 2)] if mode == "hybrid" else [])):
            state.load_state_dict(good)
        assert same(errors_of(state), before), mode
        assert state.iteration == 2


def torn_apart_in_equal_parts(worker: int, world_size: int) -> None:
    """All shards have the same shape, so that only the values tell whose they are."""
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(64, 64, bias=False), mesh=full_mesh(world_size))
    state = attach(model, rank=2)
    model(torch.randn(8, 64, generator=torch.Generator().manual_seed(worker))).square().sum().backward()
    own = state.state_dict()
    files = [written(own)]
    dist.broadcast_object_list(files, 0)
    said = complaint(state.load_state_dict, torch.load(io.BytesIO(files[0]), weights_only=False))
    assert said.startswith("ValueError: the saved errors of 'weight' are neither whole nor this worker's own"), said
    state.load_state_dict(own)


QUICK: dict[str, Callable[..., Any]] = {
    "other meshes": functools.partial(on_other_meshes, loads=QUICK_LOADS),
    # HSDP with a mesh of both dimensions saves what HSDP with a group loads.
    "goes on, hybrid to mesh": functools.partial(goes_on, saves="hybrid", loads="mesh"),
    "other adapters": between_adapters,
    "refuses": refuses,
    "torn apart": torn_apart,
    "torn apart in equal parts": torn_apart_in_equal_parts,
}
SLOW: dict[str, Callable[..., Any]] = {
    "all meshes": functools.partial(on_other_meshes, loads=LOADS),
    "goes on, mesh to hybrid": functools.partial(goes_on, saves="mesh", loads="hybrid"),
    **{
        f"goes on, {mode}": functools.partial(goes_on, saves=mode, loads=mode)
        for mode in ("replicate", "full", "fsdp1")
    },
}


@functools.cache
def results(*, slow: bool) -> dict[str, list[Any]]:
    warnings.filterwarnings("ignore")
    return in_one_group(SLOW if slow else QUICK, 4)


@pytest.mark.parametrize("name", QUICK)
def test_case(name: str) -> None:
    """See the functions above."""
    outcome(results(slow=False), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more(name: str) -> None:
    outcome(results(slow=True), name)
