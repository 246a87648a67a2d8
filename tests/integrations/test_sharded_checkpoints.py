"""Checkpoints of the FSDP adapters through torch.distributed.checkpoint: saved on one mesh, loaded on another.

The table saves and loads by ``save(folder)``, and damages what is saved on one worker.
"""

from __future__ import annotations

import io
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

from powersgd_triton import attach
from powersgd_triton.layout.layout import compressed_rank
from tests.support.checks import same_bits
from tests.support.distributed import folder
from tests.support.properties import check_close
from tests.support.sharded_training import RANK_2, Net, batch, full_mesh, hybrid, hybrid_mesh, make_test, sharded, whole
from tests.support.small import complaint
from tests.support.training import flat, relative
from tests.support.wrappers import FSDP1, FSDP2, HSDP, WithReplicateGroup, Wrapped, loss_of

Gradients = dict[str, Tensor]
KINDS = (WithReplicateGroup, FSDP2, FSDP1)
# Replicas × shards: where it was saved, and where it is loaded.
LOADS = [((2, 2), (1, 3)), ((4, 1), (2, 2))]


def steps(made: Wrapped, worker: int, numbers: range) -> None:
    for number in numbers:
        made.step([batch(worker, number)])


def gradients(module: Any, worker: int) -> Gradients:
    """Averages, whole."""
    module.zero_grad()
    loss_of(module, batch(worker, 50)).backward()
    return {name: whole(p.grad) for name, p in module.named_parameters()}


def sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def errors_of(state: Any) -> Gradients:
    """The mean errors as whole tensors."""
    return {name: whole(error) for name, error in state.state_dict()["error"].items()}


def save(path: str, module: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp_save({"model": model_state, "optimizer": optimizer_state, "powersgd": state}, checkpoint_id=path)


def load(path: str, module: Any, optimizer: torch.optim.Optimizer, state: Any, group: Any = None) -> None:
    model_state, optimizer_state = get_state_dict(module, optimizer)
    saved = {"model": model_state, "optimizer": optimizer_state, "powersgd": state}
    dcp_load(saved, checkpoint_id=path, process_group=group)
    set_state_dict(module, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def on_other_meshes(worker: int, _world_size: int) -> None:
    """Nothing is lost on another mesh, where other matrices are compressed."""
    ranks = [compressed_rank((-(-3 // shards), 25), RANK_2) for shards in (1, 2, 3)]
    assert ranks == [2, 0, 0], "no errors of matrices that are no longer compressed, and no new ones"
    for saved_on, loaded_on in LOADS:
        mesh = hybrid_mesh(*loaded_on)
        group = dist.new_group(mesh.mesh.flatten().tolist())
        module, state = hybrid(Net(), hybrid_mesh(*saved_on), RANK_2)
        optimizer = sgd(module)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(module, batch(worker, number)).backward()
            optimizer.step()
        errors = errors_of(state)
        parameters = {name: whole(p) for name, p in module.named_parameters()}
        with folder(worker) as path:
            save(path, module, optimizer, state)
            if worker < mesh.size():
                load_on(path, worker, mesh, group, errors, parameters)


def load_on(path: str, worker: int, mesh: Any, group: Any, errors: Gradients, parameters: Gradients) -> None:
    """Σ Ĝ + E over the step after loading is what exact averaging gives plus the loaded errors."""
    module, state = hybrid(Net(seed=9), mesh, RANK_2)
    load(path, module, sgd(module), state, group)
    state.check_replicas()
    assert flat(errors).norm() > 0
    assert same_bits(errors_of(state), errors)
    assert same_bits({name: whole(p) for name, p in module.named_parameters()}, parameters)
    assert state.iteration == 3
    exact_module = sharded(Net(seed=9), mesh)
    # Both are sharded alike, on meshes of one and two dimensions.
    with torch.no_grad():
        for ours, theirs in zip(exact_module.parameters(), module.parameters(), strict=True):
            ours.to_local().copy_(theirs.to_local())
    exact, averages = gradients(exact_module, worker), gradients(module, worker)
    after = errors_of(state)
    arrived = {name: averages[name] + after[name] for name in errors}
    given = {name: exact[name] + errors[name] for name in errors}
    assert relative(flat(arrived), flat(given)) <= 1e-6
    assert relative(flat(averages), flat(exact)) > 1e-3


def goes_on(worker: int, _world_size: int) -> None:
    """HSDP with a mesh of both dimensions goes on, with its optimizer, where HSDP with a group was saved."""
    one, other = WithReplicateGroup(Net(), RANK_2), HSDP(Net(seed=5), RANK_2)
    for made in (one, other):
        made.optimizer = sgd(made.module)
    steps(one, worker, range(2))
    with folder(worker) as path:
        save(path, one.module, one.optimizer, one.state)
        load(path, other.module, other.optimizer, other.state)
    start = one.parameters()
    for made in (one, other):
        steps(made, worker, range(2, 4))
    check_close(other.parameters(), one.parameters(), start, limit=1e-4)
    assert one.state.iteration == other.state.iteration == 4


def between_adapters(worker: int, _world_size: int) -> None:
    """Errors saved by one adapter are loaded by others, and by a model whose parameters have other names now."""
    made = WithReplicateGroup(Older(), RANK_2)
    steps(made, worker, range(2))
    errors = errors_of(made.state)
    errors["head.weight"] = errors.pop("top.weight")
    assert errors["head.weight"].any()
    with folder(worker) as path:
        dcp_save({"powersgd": made.state}, checkpoint_id=path)
        for kind in KINDS:
            other = kind(Net(), RANK_2).state
            dcp_load({"powersgd": other.renamed({"top.weight": "head.weight"})}, checkpoint_id=path)
            assert same_bits(errors_of(other), errors), kind
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
    state = WithReplicateGroup(Net(), RANK_2).state
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
    for kind in KINDS:
        made = kind(Net(), RANK_2)
        state: Any = made.state
        steps(made, worker, range(2))
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
        for good in (of(worker), whole_state, *([of(worker ^ 2)] if kind is WithReplicateGroup else [])):
            state.load_state_dict(good)
        assert same_bits(errors_of(state), before), kind
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


test_checkpoints = make_test(
    [on_other_meshes, goes_on, between_adapters, refuses, torn_apart, torn_apart_in_equal_parts], 4
)
