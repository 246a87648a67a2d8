"""Tensor parallelism with replicas on gloo workers: full rank equals FSDP's own averaging; resume; conservation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from powersgd_triton.integrations.fsdp2 import apply_powersgd
from tests.support.distributed import folder
from tests.support.sharded_training import (
    FULL_RANK,
    RANK_2,
    check_full_rank,
    compare,
    in_one_group,
    outcome,
    train,
    whole,
)
from tests.support.tensor_parallel import Net, mesh_of, parallel
from tests.support.training import flat, relative


def sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def tensor_parallel(
    worker: int, world_size: int, *, shape: tuple[int, int, int], hidden: int = 50, two_dimensional: bool = True
) -> dict[str, Any]:
    """Full rank against native HSDP; at rank 2 a run that is saved and resumed in mid-run, against one that is not."""
    mesh = mesh_of(*shape)
    data = worker // shape[2]

    def build(config: Any, seed: int = 0) -> tuple[Any, Any]:
        module = parallel(Net(seed, hidden), mesh, two_dimensional=two_dimensional)
        return module, apply_powersgd(module, config, None if two_dimensional else mesh["replicate"].get_group())

    native = train(parallel(Net(hidden=hidden), mesh), data)
    module, state = build(FULL_RANK)
    full_rank = compare(train(module, data), native)
    state.check_replicas()

    module, state = build(RANK_2)
    first = train(module, data, steps=range(1), optimizer=sgd(module))
    owed = {name: whole(error) for name, error in state.state_dict()["error"].items()}
    conserved = {name: first.gradients[0][name] + error for name, error in owed.items()}
    optimizer = sgd(module)
    train(module, data, steps=range(1, 3), optimizer=optimizer)
    other, other_state = build(RANK_2, seed=7)
    with folder(worker) as path:
        dcp_save({"model": module.state_dict(), "powersgd": state}, checkpoint_id=path)
        errors = {name: error.to_local().clone() for name, error in state.state_dict()["error"].items()}
        whole_errors = {name: whole(error) for name, error in state.state_dict()["error"].items()}
        saved = {"model": other.state_dict(), "powersgd": other_state}
        dcp_load(saved, checkpoint_id=path)
        other.load_state_dict(saved["model"])
        moved = on_other_mesh(path, shape, hidden, whole_errors)
    loaded = {name: error.to_local() for name, error in other_state.state_dict()["error"].items()}
    expected = train(module, data, steps=range(3, 6), optimizer=optimizer)
    resumed = train(other, data, steps=range(3, 6), optimizer=sgd(other))
    state.check_replicas()
    return {
        "full rank": full_rank,
        "resumed": compare(resumed, expected),
        "errors": all(torch.equal(loaded[name], error) for name, error in errors.items()),
        "conserved": relative(flat(conserved), flat({name: native.gradients[0][name] for name in owed})),
        "lossy": relative(flat(owed), flat({name: native.gradients[0][name] for name in owed})),
        "shapes": {name: tuple(error.shape) for name, error in state.error().items()},
        "moved": moved,
    }


def on_other_mesh(path: str, shape: tuple[int, int, int], hidden: int, errors: dict[str, Any]) -> float:
    """Load the state where columns are split into another number of parts."""
    replicas, shards, parts = shape
    mesh = mesh_of(replicas, shards * parts, 1)
    module = parallel(Net(hidden=hidden), mesh)
    state = apply_powersgd(module, RANK_2)
    dcp_load({"powersgd": state}, checkpoint_id=path)
    loaded = {name: whole(error) for name, error in state.state_dict()["error"].items()}
    return relative(flat(loaded), flat(errors))


def check(found: list[dict[str, Any]]) -> None:
    check_full_rank([seen["full rank"] for seen in found])
    for seen in found:
        assert seen["resumed"]["gradient"] <= 1e-6, seen
        assert seen["resumed"]["parameters"] <= 1e-6, seen
        assert seen["errors"]
        assert seen["conserved"] <= 1e-6 < 1e-2 < seen["lossy"]
        assert seen["moved"] <= 1e-7


@functools.cache
def four() -> dict[str, list[Any]]:
    names = {"mesh": True, "group": False}
    return in_one_group(
        {
            name: functools.partial(tensor_parallel, shape=(2, 1, 2), two_dimensional=two_dimensional)
            for name, two_dimensional in names.items()
        },
        4,
    )


@pytest.mark.parametrize("case", ["mesh", "group"])
def test_every_kind_of_layer(case: str) -> None:
    found = outcome(four(), case)
    check(found)
    # 17 tokens are 9 and 8 of two tensor-parallel workers.
    assert [seen["shapes"]["head.weight"] for seen in found] == [(9, 24), (8, 24)] * 2
    assert found[0]["shapes"]["blocks.0.down.weight"] == (24, 25)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 3), (1, 2, 2)])
def test_other_meshes(shape: tuple[int, int, int]) -> None:
    workers = shape[0] * shape[1] * shape[2]
    case = functools.partial(tensor_parallel, shape=shape, hidden=51 if shape[2] == 3 else 50)
    check(outcome(in_one_group({"case": case}, workers), "case"))
