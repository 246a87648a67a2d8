"""An argument that only one worker gives wrongly: all workers of a collective call are told, soon, and go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig, attach
from powersgd_triton.integrations import fsdp1, optimizer
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.checks import everything, gradients
from tests.support.distributed import folder, on_workers
from tests.support.sharded_training import RANK_2, Net, full_mesh, sharded
from tests.support.training import complaint

SHAPES = {"a": (16, 12), "b": (5,)}
Wrong = dict[str, list[Any]]
MODELS: Wrong = {"model": [5, nn.Linear(4, 4)], "config": ["rank", PowerSGDConfig(bytes_per_step=1)]}
ATTACHED: Wrong = {**MODELS, "rank": [0], "rnk": [4], "node_group": [5], "loss_scale": [5]}
STATES: Wrong = {"state_dict": [5, {}, "nowhere"]}
WRAPPERS: dict[str, Callable[[], Any]] = {
    "DDP": lambda: DistributedDataParallel(nn.Linear(40, 40)),
    "FSDP1": lambda: FullyShardedDataParallel(nn.Linear(40, 40), device_id=torch.device("cpu")),
    "FSDP2": lambda: sharded(Net(), full_mesh(2)),
}


def calls(path: str) -> Iterator[tuple[Callable[..., Any], dict[str, Any], Wrong]]:
    """(what all workers call, with what, and what instead on one worker)."""
    for wrap in WRAPPERS.values():
        yield attach, {"model": wrap()}, ATTACHED
        state = attach(wrap(), rank=2)
        yield from checkpoints(state, path)
        yield state.load_state_dict, {"state_dict": state.state_dict()}, {**STATES, "rename": [5]}
    yield apply_powersgd, {"model": WRAPPERS["FSDP2"](), "config": RANK_2}, {**MODELS, "replicate_group": [5]}
    yield fsdp1.PowerSGDState, {"fsdp_model": WRAPPERS["FSDP1"](), "config": RANK_2}, {"fsdp_model": [5], "config": [5]}
    wrong: Wrong = {"model": [5], "config": [5], "every": [0], "delay": [-1], "group": [5], "node_group": [5]}
    yield LocalSteps, {"model": nn.Linear(4, 4), "config": None}, {**wrong, "outer": [5], "optimizer": [5]}
    steps = LocalSteps(nn.Linear(4, 4), None)
    yield from checkpoints(steps, path)
    yield steps.load_state_dict, {"state_dict": steps.state_dict()}, STATES
    compressor, given = Compressor(everything(), SHAPES), gradients(0, SHAPES)
    flat = list(given.values())
    yield compressor.compress, {"gradients": given}, {"gradients": [{}, 5, {**given, "a": 5}, flat[:1], torch.ones(3)]}
    saved = compressor.state_dict()
    yield compressor.load_state_dict, {"state_dict": saved}, {**STATES, "strict": [False], "rename": [5]}
    plain = optimizer.PowerSGD(flat, optimizer.Config(2))
    yield plain.aggregate, {"gradients": flat}, {"gradients": [5, flat[:1], [flat[0].expand(2, 16, 12), 5]]}


def checkpoints(state: Any, path: str) -> Iterator[tuple[Callable[..., Any], dict[str, Any], Wrong]]:
    yield state.save, {"folder": path}, {"folder": [None]}
    yield state.load, {"folder": path}, {"folder": [None, "nowhere", "a\0b"]}
    yield state.load, {"folder": f"{path}/0", "missing_ok": True}, {"missing_ok": [False]}


@on_workers(2)
def test_all_workers_are_told(worker: int, world_size: int) -> None:
    with folder(worker) as path:
        for call, right, wrong in calls(path):
            for name, value in [(name, value) for name, values in wrong.items() for value in values]:
                start = time.monotonic()
                said = complaint(call, **{**right, **({name: value} if worker == 1 else {})})
                assert said != "nothing", (call, name, value)
                assert worker == 1 or "worker 1" in said, (call, name, value, said)
                assert time.monotonic() - start < 30
                dist.barrier()
            assert complaint(call, **right) == "nothing", call
