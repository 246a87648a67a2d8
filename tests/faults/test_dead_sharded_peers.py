"""As in ``test_dead_peers``, for models that are sharded: what the survivor goes on from is a checkpoint of DCP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.nn import functional as F

from powersgd_triton.integrations import fsdp1
from powersgd_triton.integrations.names import plain_name
from tests.support.dead_peers import ALONE, DEATH, PEER, SURVIVOR, TOGETHER, interrupt, start_group, two_workers
from tests.support.distributed import on_workers
from tests.support.sharded_training import RANK_2, Net, batch, full_shard, hybrid, whole
from tests.support.thinned import thinned
from tests.support.training import LIMIT, flat, relative

Named = dict[str, Tensor]


def build(kind: str) -> tuple[Any, Any]:
    """Model and state on all workers of the default group: "hsdp" (replicas that are not sharded), "fsdp2", "fsdp1"."""
    workers = torch.arange(dist.get_world_size())
    if kind == "hsdp":
        return hybrid(Net(), DeviceMesh("cpu", workers.view(-1, 1), mesh_dim_names=("replicate", "shard")), RANK_2)
    if kind == "fsdp2":
        return full_shard(Net(), DeviceMesh("cpu", workers), RANK_2)
    module = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(module, StateDictType.SHARDED_STATE_DICT)
    state = fsdp1.PowerSGDState(module, RANK_2)
    module.register_comm_hook(state, fsdp1.powerSGD_hook)
    return module, state


def backward(model: Any, worker: int, step: int) -> None:
    model.zero_grad()
    tokens, targets = batch(worker, step)
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()


def gradients_of(model: Any) -> Named:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: whole(gradient) for name, gradient in found.items() if gradient is not None}


def owed(state: Any) -> Named:
    return {name: whole(error) for name, error in state.state_dict()["error"].items()}


@thinned("kind, message_silent", ("hsdp", "fsdp2", "fsdp1"), ((0, False), (1, False), (1, True)), together=1)
@on_workers(2, casualties=[PEER])
def test_sharded_training_goes_on_from_its_checkpoint(
    worker: int, world_size: int, kind: str, message_silent: tuple[int, bool], tmp_path: Path
) -> None:
    message, silent = message_silent
    with two_workers(tmp_path, worker, silent):
        survive(worker, tmp_path, kind, message, silent)


def survive(worker: int, folder: Path, kind: str, message: int, silent: bool) -> None:
    """Train until the peer is gone, then load what was saved before in a new group, and go on alone.

    Parameters stay as they are there, so that the gradients are known: a plain model's.
    """
    warnings.filterwarnings("ignore")
    model, state = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(TOGETHER):
        backward(model, worker, step)
        optimizer.step()
    saved = owed(state)
    dcp_save({"model": get_model_state_dict(model), "powersgd": state}, checkpoint_id=f"{folder}/checkpoint")
    interrupt(lambda: backward(model, worker, TOGETHER), worker, message, folder, silent)
    start_group(folder, "alone", 0, 1, DEATH)
    alone, state = build(kind)
    loaded = {"model": get_model_state_dict(alone), "powersgd": state}
    dcp_load(loaded, checkpoint_id=f"{folder}/checkpoint")
    set_model_state_dict(alone, loaded["model"])
    before = owed(state)
    assert all(torch.equal(before[name], error) for name, error in saved.items())
    assert flat(before).norm() > 0
    plain = Net()
    with FullyShardedDataParallel.summon_full_params(alone) if kind == "fsdp1" else torch.no_grad():
        plain.load_state_dict(
            {name.replace("_fsdp_wrapped_module.", ""): whole(p) for name, p in alone.named_parameters()}
        )
    given, got = torch.zeros(()), torch.zeros(())
    for step in range(TOGETHER, TOGETHER + ALONE):
        backward(alone, SURVIVOR, step)
        backward(plain, SURVIVOR, step)
        got = got + total(gradients_of(alone), before)
        given = given + total(gradients_of(plain), before)
    left, right = got + total(owed(state), before), given + total(before, before)
    assert left.isfinite().all()
    assert relative(left, right) <= LIMIT
    # With one worker FSDP2 reduces nothing, hence asks for no compression: gradients are exact, the error waits.
    assert state.iteration == (TOGETHER if kind == "fsdp2" else TOGETHER + ALONE)


def total(tensors: Named, names: Named) -> Tensor:
    by_name = {plain_name(name): tensor for name, tensor in tensors.items()}
    return torch.cat([by_name[name].reshape(-1) for name in sorted(names)]).double()
