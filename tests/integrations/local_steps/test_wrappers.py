"""Local steps across nodes of models in DDP or FSDP2 inside a node, with four processes as two nodes of two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.integrations.local_steps import LocalSteps, node_mpu
from tests.support.local_steps import TERNARY, same_bits, theta
from tests.support.local_wrappers import (
    BUILD,
    EVERY,
    NODE,
    STEPS,
    WORKERS,
    Net,
    OddNet,
    across,
    conserves,
    equals_averaging,
    in_ddp,
    in_fsdp2,
    mesh,
    node,
    real,
    refused,
    resumes,
    watched,
)
from tests.support.sharded_training import in_one_group, outcome


def averages_states_and_follows_in_bf16(kind: str) -> None:
    """States of an optimizer are averaged on request. bf16 parameters follow shared ones in fp32."""
    setup = BUILD[kind](Net().bfloat16())
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across(), optimizer=setup.optimizer)
    setup.train(range(2 * EVERY), sync)
    buffers = [real(state["momentum_buffer"]).reshape(-1) for state in setup.optimizer.state.values()]
    assert len(buffers) == 7
    assert same_bits(torch.cat(buffers), setup.mean_over)
    assert torch.equal(setup.flat(), theta(sync).bfloat16())
    assert same_bits(theta(sync), setup.mean_over)


def shares_an_exchange(worker: int, _world_size: int) -> None:
    """The workers of a DDP node share an exchange: sums take two levels."""
    setup = in_ddp(Net())
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across())
    setup.train(range(EVERY), sync)
    setup.train(range(EVERY - 1), sync)
    with watched() as groups:
        sync.step()
    assert sync._engine.communicator.inside is not None
    first = worker // NODE * NODE
    assert {(first, first + 1), (worker % NODE, worker % NODE + NODE)} < set(groups)


def refuses(worker: int, _world_size: int) -> None:
    """Models that communicate with the wrong workers, or that are not supported."""

    def over_all() -> Any:
        return DistributedDataParallel(Net())

    def in_fsdp1() -> Any:
        return FullyShardedDataParallel(nn.Linear(4, 4), process_group=node(), device_id=torch.device("cpu"))

    refused(
        over_all,
        r"DistributedDataParallel averages gradients over the workers \[0, 1, 2, 3\] in every step.*"
        "process_group=node",
    )
    refused(over_all, r"LocalSteps averages changes over the workers \[\d, \d\].*group=across", across())
    refused(lambda: in_ddp(Net()).model, "must have worker . in common, and no other", node())
    refused(lambda: Net() if worker else "no model", "model must be a torch.nn.Module; got str")
    refused(
        lambda: fully_shard(Net(), mesh=mesh()),
        r'has a replicate dimension.*give fully_shard mesh\["shard"\], and LocalSteps group=mesh\["replicate"\]',
        across(),
    )
    refused(
        lambda: in_fsdp2(Net()).model,
        r'fully_shard averages gradients over the workers.*group=mesh\["replicate"\]',
    )
    refused(in_fsdp1, r"local steps support fully_shard \(FSDP2\); got FullyShardedDataParallel", across())
    refused(
        lambda: nn.Sequential(in_ddp(Net()).model),
        "expected the wrapped model; got Sequential, which has one as '0'",
        across(),
    )
    with pytest.raises(ValueError, match="must have this worker in common, and no other"):
        node_mpu(node(), node())


def compresses_gradients_too(_worker: int, _world_size: int) -> None:
    """Gradients may be compressed inside a node at the same time."""
    setup = in_ddp(Net())
    state = attach(setup.model, PowerSGDConfig(rank=2, min_compression_rate=0))
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across())
    setup.train(range(STEPS), sync)
    assert any(error.any() for error in state.error().values())
    assert same_bits(setup.whole(), None)


class Case:
    """A function that is not told which worker it runs on, and its arguments."""

    def __init__(self, function: Callable[..., None], *arguments: Any, **options: Any) -> None:
        self.bound = functools.partial(function, *arguments, **options)

    def __call__(self, _worker: int, _world_size: int) -> None:
        self.bound()


ALL = ("exact", "ternary", "int2, delay", "rank", "budget")
OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
CASES: dict[str, Any] = {
    "ddp averages": Case(equals_averaging, "ddp"),
    "fsdp2 averages": Case(equals_averaging, "fsdp2"),
    "ddp conserves": Case(conserves, "ddp", ("ternary", "rank")),
    "fsdp2 conserves": Case(conserves, "fsdp2", ALL),
    "odd tensors": Case(conserves, "ddp", ("ternary", "budget"), OddNet),
    "offload": Case(conserves, "fsdp2", ("int2, delay",), **OFFLOAD),
    "ddp resumes": Case(resumes, "ddp", "ternary"),
    "fsdp2 resumes": Case(resumes, "fsdp2", "int2, delay"),
    "ddp in bf16": Case(averages_states_and_follows_in_bf16, "ddp"),
    "fsdp2 in bf16": Case(averages_states_and_follows_in_bf16, "fsdp2"),
    "levels": shares_an_exchange,
    "refusals": refuses,
    "gradients": compresses_gradients_too,
}
SLOW: dict[str, Any] = {
    "ddp conserves everything": Case(conserves, "ddp", ALL),
    "odd tensors, everything": Case(conserves, "ddp", ALL, OddNet),
    "offload, everything": Case(conserves, "fsdp2", ALL, **OFFLOAD),
    "ddp resumes, delay": Case(resumes, "ddp", "int2, delay"),
    "fsdp2 resumes, ternary": Case(resumes, "fsdp2", "ternary"),
}


@functools.cache
def results(*, slow: bool) -> dict[str, list[Any]]:
    return in_one_group(SLOW if slow else CASES, WORKERS)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    """See the functions above and in ``local_wrappers.py``."""
    outcome(results(slow=False), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more(name: str) -> None:
    outcome(results(slow=True), name)
