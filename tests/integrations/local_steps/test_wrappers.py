"""Local steps across nodes of models in DDP or FSDP2 inside a node, with four processes as two nodes of two."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.comm.agreement import DisagreementError
from powersgd_triton.integrations.local_steps import LocalSteps, node_mpu
from tests.support.local_steps import theta
from tests.support.local_wrappers import (
    BUILD,
    EVERY,
    NODE,
    STEPS,
    TERNARY,
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
    resumes,
    same_bits,
    watched,
)
from tests.support.sharded_training import in_one_group, outcome

LOST = 3e-6


def averages_states(kind: str) -> bool:
    setup = BUILD[kind](Net())
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across(), optimizer=setup.optimizer)
    setup.train(range(EVERY), sync)
    buffers = [real(state["momentum_buffer"]).reshape(-1) for state in setup.optimizer.state.values()]
    return len(buffers) == 7 and same_bits(torch.cat(buffers), setup.mean_over)


def trains_in_bf16(kind: str) -> bool:
    setup = BUILD[kind](Net().bfloat16())
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across())
    setup.train(range(STEPS), sync)
    return torch.equal(setup.flat(), theta(sync).bfloat16()) and same_bits(theta(sync), setup.mean_over)


def ddp_gives_its_node(_worker: int, _world_size: int) -> tuple[bool, set[tuple[int, ...]]]:
    """Whether sums take two levels, and the workers of the collectives that carry an exchange."""
    setup = in_ddp(Net())
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across())
    setup.train(range(EVERY), sync)
    setup.train(range(EVERY - 1), sync)
    with watched() as groups:
        sync.step()
    return sync._engine.communicator.inside is not None, set(groups)


def refuses(worker: int, _world_size: int) -> dict[str, str]:
    """What each worker hears."""

    def attempt(make: Any, group: Any = None, config: Any = TERNARY) -> str:
        try:
            LocalSteps(make(), config, EVERY, group=group)
        except (TypeError, ValueError, DisagreementError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    def in_fsdp1() -> Any:
        return FullyShardedDataParallel(nn.Linear(4, 4), process_group=node(), device_id=torch.device("cpu"))

    def one_worker() -> Any:
        return Net() if worker else "no model"

    found = {
        "DDP over all": attempt(lambda: DistributedDataParallel(Net())),
        "DDP over all, group": attempt(lambda: DistributedDataParallel(Net()), across()),
        "DDP, group of the node": attempt(lambda: in_ddp(Net()).model, node()),
        "one worker": attempt(one_worker),
        "HSDP": attempt(lambda: fully_shard(Net(), mesh=mesh()), across()),
        "FSDP2, no group": attempt(lambda: in_fsdp2(Net()).model),
        "FSDP1": attempt(in_fsdp1, across()),
        "inside": attempt(lambda: nn.Sequential(in_ddp(Net()).model), across()),
    }
    try:
        node_mpu(node(), node())
    except ValueError as error:
        found["mpu"] = str(error)
    return found


REFUSED = {
    "DDP over all": r"DistributedDataParallel averages gradients over the workers \[0, 1, 2, 3\] in every step.*"
    "process_group=node",
    "DDP over all, group": r"LocalSteps averages changes over the workers \[\d, \d\].*group=across",
    "DDP, group of the node": "must have worker . in common, and no other",
    "one worker": "model must be a torch.nn.Module; got str",
    "HSDP": r'has a replicate dimension.*give fully_shard mesh\["shard"\], and LocalSteps group=mesh\["replicate"\]',
    "FSDP2, no group": r'fully_shard averages gradients over the workers.*group=mesh\["replicate"\]',
    "FSDP1": r"local steps support fully_shard \(FSDP2\); got FullyShardedDataParallel",
    "inside": "expected the wrapped model; got Sequential, which has one as '0'",
    "mpu": "must have this worker in common, and no other",
}


def accepts_compressed_gradients(_worker: int, _world_size: int) -> bool:
    """Whether gradients can be compressed inside a node at the same time."""
    setup = in_ddp(Net())
    attach(setup.model, PowerSGDConfig(rank=2, min_compression_rate=0))
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across())
    setup.train(range(STEPS), sync)
    return same_bits(setup.whole(), None)


KINDS = ("ddp", "fsdp2")


def alone(_worker: int, _world_size: int, *, case: Any, **options: Any) -> Any:
    return case(**options)


CASES: dict[str, Any] = {
    f"{case.__name__} {kind}": functools.partial(alone, case=case, kind=kind)
    for case in (equals_averaging, conserves, resumes, averages_states, trains_in_bf16)
    for kind in KINDS
}
CASES |= {
    "odd": functools.partial(alone, case=conserves, kind="ddp", net=OddNet),
    "offload": functools.partial(
        alone, case=conserves, kind="fsdp2", offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "levels": ddp_gives_its_node,
    "refuses": refuses,
    "compressed": accepts_compressed_gradients,
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return in_one_group(CASES, WORKERS)


kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_exact_messages_average_the_replicas(found: Any, kind: str) -> None:
    for difference, learned, inside in outcome(found, f"equals_averaging {kind}"):
        assert difference <= 1e-5 < 0.01 < learned
        assert inside


@pytest.mark.parametrize("name", [*(f"conserves {kind}" for kind in KINDS), "odd", "offload"])
def test_nothing_is_lost_and_all_workers_have_the_same_bits(found: Any, name: str) -> None:
    for seen in outcome(found, name):
        assert {key: missing for key, (missing, _) in seen.items() if not missing <= LOST} == {}
        assert {key for key, (_, same) in seen.items() if not same} == set()


@kinds
def test_a_resumed_round_goes_on_with_the_same_bits(found: Any, kind: str) -> None:
    assert all(all(seen.values()) for seen in outcome(found, f"resumes {kind}"))


@kinds
def test_states_of_an_optimizer_are_averaged_on_request(found: Any, kind: str) -> None:
    assert all(outcome(found, f"averages_states {kind}"))


@kinds
def test_bf16_parameters_follow_shared_ones_in_fp32(found: Any, kind: str) -> None:
    assert all(outcome(found, f"trains_in_bf16 {kind}"))


def test_the_workers_of_a_ddp_node_share_an_exchange(found: Any) -> None:
    for worker, (inside, groups) in enumerate(outcome(found, "levels")):
        first = worker // NODE * NODE
        assert inside
        assert {(first, first + 1), (worker % NODE, worker % NODE + NODE)} < groups


def test_gradients_may_be_compressed_inside_a_node(found: Any) -> None:
    assert all(outcome(found, "compressed"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(found: Any, name: str) -> None:
    for texts in outcome(found, "refuses"):
        assert re.search(REFUSED[name], texts[name], re.DOTALL), texts[name]
