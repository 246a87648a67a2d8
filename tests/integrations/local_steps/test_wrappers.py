"""Local steps across nodes of DDP, FSDP2 or DeepSpeed inside a node, with four processes as two nodes of two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.integrations.local_steps import LocalSteps, node_mpu
from tests.support.deepspeed_training import BF16, BF16_OPTIMIZER, Job, parametrized
from tests.support.local_steps import TERNARY, same_bits, theta
from tests.support.local_wrappers import (
    BUILD,
    EVERY,
    NODE,
    STEPS,
    WORKERS,
    EngineSetup,
    Net,
    OddNet,
    Watch,
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
)


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


def shares_an_exchange() -> None:
    """The workers of a DDP node share an exchange: sums take two levels."""
    setup = in_ddp(Net())
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across())
    setup.train(range(EVERY), sync)
    setup.train(range(EVERY - 1), sync)
    with Watch() as watch:
        sync.step()
    assert sync._engine.communicator.inside is not None
    worker = dist.get_rank()
    first = worker // NODE * NODE
    assert {(first, first + 1), (worker % NODE, worker % NODE + NODE)} < set(watch.groups)


def refuses() -> None:
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
    refused(lambda: Net() if dist.get_rank() else "no model", "model must be a torch.nn.Module; got str")
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


def compresses_gradients_too() -> None:
    """Gradients may be compressed inside a node at the same time."""
    setup = in_ddp(Net())
    state = attach(setup.model, PowerSGDConfig(rank=2, min_compression_rate=0))
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across())
    setup.train(range(STEPS), sync)
    assert any(error.any() for error in state.error().values())
    assert same_bits(setup.whole(), None)


def refuses_engines() -> None:
    import deepspeed

    from powersgd_triton.integrations import deepspeed as adapter

    def everywhere() -> Any:
        config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}}
        config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
        net = Net()
        return deepspeed.initialize(model=net, model_parameters=list(net.down.parameters()), config=config)[0]

    def compressed() -> Any:
        engine = EngineSetup(Net()).model
        adapter.enable(engine, PowerSGDConfig(rank=2, min_compression_rate=0))
        return engine

    low_rank = PowerSGDConfig(rank=2)
    for make, pattern, config in (
        (lambda: EngineSetup(Net(), 0).model, "need DeepSpeed's ZeRO stage 1 or 2.*got stage 0", TERNARY),
        (lambda: EngineSetup(Net(), 3).model, "need DeepSpeed's ZeRO stage 1 or 2.*got stage 3", TERNARY),
        (everywhere, r"averages gradients over the workers \[0, 1, 2, 3\].*mpu=node_mpu\(node, across\)", TERNARY),
        (compressed, "compresses gradients within its node.*take the section out", TERNARY),
        (lambda: EngineSetup(Net()).model, "no matrices of low rank: give codes", low_rank),
    ):
        deepspeed.utils.groups.mpu = None
        refused(make, pattern, across(), config)


ALL, CODED = ("exact", "ternary", "int2, delay", "rank", "budget"), ("exact", "ternary", "int2, delay")
OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
ENGINES: dict[str, dict[str, Any]] = {
    "stage 1, bf16": {"stage": 1, **BF16},
    "stage 2": {"stage": 2},
    "BF16_Optimizer": {"stage": 1, **BF16_OPTIMIZER},
    "stage 2, offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
}
STAGE_2_BF16: dict[str, Any] = {"stage": 2, **BF16}
QUICK: dict[str, Callable[[], None]] = {
    "ddp averages": partial(equals_averaging, "ddp"),
    "fsdp2 averages": partial(equals_averaging, "fsdp2"),
    "ddp conserves": partial(conserves, "ddp", ("ternary", "rank")),
    "fsdp2 conserves": partial(conserves, "fsdp2", ALL),
    "odd tensors": partial(conserves, "ddp", ("ternary", "budget"), OddNet),
    "offload": partial(conserves, "fsdp2", ("int2, delay",), **OFFLOAD),
    "ddp resumes": partial(resumes, "ddp", "ternary"),
    "fsdp2 resumes": partial(resumes, "fsdp2", "int2, delay"),
    "ddp in bf16": partial(averages_states_and_follows_in_bf16, "ddp"),
    "fsdp2 in bf16": partial(averages_states_and_follows_in_bf16, "fsdp2"),
    "levels": shares_an_exchange,
    "refusals": refuses,
    "gradients": compresses_gradients_too,
}
QUICK_ENGINES: dict[str, Callable[[], None]] = {
    "engines: refusals": refuses_engines,
    "engines average and clip": partial(equals_averaging, "deepspeed", clip=0.1, stage=2, gradient_clipping=0.1),
    "engines conserve": partial(conserves, "deepspeed", CODED, **STAGE_2_BF16),
    "engines resume": partial(resumes, "deepspeed", "int2, delay", **STAGE_2_BF16),
}
SLOW: dict[str, Callable[[], None]] = {
    "odd tensors, everything": partial(conserves, "ddp", ALL, OddNet),
    "offload, everything": partial(conserves, "fsdp2", ALL, **OFFLOAD),
    "ddp resumes, delay": partial(resumes, "ddp", "int2, delay"),
}
SLOW_ENGINES: dict[str, Callable[[], None]] = {
    "engines average, stage 1": partial(equals_averaging, "deepspeed", stage=1),
    "engines resume, BF16_Optimizer": partial(resumes, "deepspeed", "ternary", **ENGINES["BF16_Optimizer"]),
    **{f"engines conserve, {name}": partial(conserves, "deepspeed", CODED, **how) for name, how in ENGINES.items()},
}
JOBS = [
    Job(body, (), WORKERS, cases in (SLOW, SLOW_ENGINES), cases in (QUICK_ENGINES, SLOW_ENGINES), name)
    for cases in (QUICK, QUICK_ENGINES, SLOW, SLOW_ENGINES)
    for name, body in cases.items()
]


@parametrized(JOBS)
def test_local_steps(job: Job, finish: Callable[[Job], None]) -> None:
    """See the functions above and in ``local_wrappers.py``."""
    if job.engine:
        pytest.importorskip("deepspeed")
    finish(job)
