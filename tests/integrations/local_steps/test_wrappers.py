"""Local steps across nodes of DDP, FSDP2 or DeepSpeed inside a node, with four processes as two nodes of two."""

import importlib.util
import re
from collections.abc import Callable, Sequence
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
from tests.support.deepspeed_training import BF16, BF16_OPTIMIZER, ready
from tests.support.distributed import folder, make_test
from tests.support.exchanges import Watch
from tests.support.local_steps import (
    BUILD,
    NODE,
    TERNARY,
    WITH_MOMENTUM,
    WORKERS,
    Net,
    OddNet,
    Training,
    across,
    mean,
    mesh,
    node,
    real,
    same_bits,
    theta,
)
from tests.support.training import complaint

STEPS, EVERY = 6, 3


def build(
    kind: str, config: str = "ternary", every: int = EVERY, *, net: nn.Module | None = None, **more: Any
) -> Training:
    return BUILD[kind](dist.get_rank(), config, every, net=net or Net(), optimizer=WITH_MOMENTUM, **more)


def equals_averaging(kind: str, clip: float = torch.inf, **options: Any) -> None:
    """Exact messages average the replicas, as by hand. Steps between exchanges stay in a node, and clip there."""
    expected = build("ddp", every=99, options={"clip": clip})
    for _ in range(STEPS // EVERY):
        expected.train(EVERY)
        for tensor in expected.masters():
            real(tensor).copy_(mean(real(tensor), across()))
    got = build(kind, "exact", net=Net(seed=dist.get_rank(across())), options=options)
    untrained, own = got.whole(), {*dist.get_process_group_ranks(node())}
    for _ in range(STEPS // EVERY):
        with Watch() as watch:
            got.train(EVERY - 1)
        assert watch.groups
        assert all(own.issuperset(group) for group in watch.groups)
        got.train(1)
    assert (got.whole() - expected.whole()).abs().max() <= 1e-5 < 0.01 < (got.whole() - untrained).abs().max()


def conserves(
    kind: str, messages: Sequence[tuple[str, int]], net: Callable[[], nn.Module] = Net, **options: Any
) -> None:
    """Nothing is lost with each kind of message and each delay, and workers have the same bits."""
    for config, delay in messages:
        training = build(kind, config, net=net(), options=options, delay=delay)
        training.train(STEPS - 1)
        training.finish()
        assert training.changed.abs().max() > 0.01, config
        assert same_bits(training.whole(), None), config
        # DDP takes those of a node's first worker in each step.
        assert same_bits(next(training.model.buffers()), training.mean_over), config


def resumes(kind: str, config: str, delay: int = 0, **options: Any) -> None:
    """A run that is killed in a round goes on with the bits of one that is not."""
    first = build(kind, config, options=options, delay=delay)
    first.train(5)
    with folder(dist.get_rank()) as path:
        saved = first.save(path)
        first.sync.save(path)
        first.train(4)
        second = build(kind, config, net=Net(seed=7), options=options, delay=delay)
        second.load(path, saved)
        second.sync.load(path)
        second.done = 5
        second.train(4)
    assert torch.equal(theta(first.sync), theta(second.sync))
    assert torch.equal(first.flat(), second.flat())


def averages_states_and_follows_in_bf16(kind: str) -> None:
    """States of an optimizer are averaged on request. bf16 parameters follow shared ones in fp32."""
    training = build(kind, net=Net().bfloat16(), share=True)
    training.train(2 * EVERY)
    buffers = [real(state["momentum_buffer"]).reshape(-1) for state in training.optimizer.state.values()]
    assert len(buffers) == 7
    assert same_bits(torch.cat(buffers), training.mean_over)
    assert torch.equal(training.flat(), theta(training.sync).bfloat16())
    assert same_bits(theta(training.sync), training.mean_over)


def shares_an_exchange() -> None:
    """The workers of a DDP node share an exchange: sums take two levels. Gradients may be compressed too."""
    training = build("ddp")
    state = attach(training.model, PowerSGDConfig(rank=2, min_compression_rate=0))
    training.train(2 * EVERY - 1)
    with Watch() as watch:
        training.sync.step()
    assert training.sync._engine.communicator.inside is not None
    worker = dist.get_rank()
    first = worker // NODE * NODE
    assert {(first, first + 1), (worker % NODE, worker % NODE + NODE)} < set(watch.groups)
    assert any(error.any() for error in state.error().values())
    assert same_bits(training.whole(), None)


def local(model: Any, group: Any = None) -> LocalSteps:
    return LocalSteps(model, TERNARY, EVERY, group=group)


def refused(cases: Sequence[tuple[Callable[[], Any], str]]) -> None:
    for make, pattern in cases:
        said = complaint(make)
        assert re.search(pattern, said, re.DOTALL), (pattern, said)


def refuses() -> None:
    """Models that communicate with the wrong workers, or that are not supported."""
    over_all, inside = DistributedDataParallel(Net()), DistributedDataParallel(Net(), process_group=node())
    fsdp1 = FullyShardedDataParallel(nn.Linear(4, 4), process_group=node(), device_id=torch.device("cpu"))
    hybrid = fully_shard(Net(), mesh=mesh())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    refused(
        [
            (lambda: local(over_all), r"gradients over the workers \[0, 1, 2, 3\] in every step.*process_group=node"),
            (lambda: local(over_all, across()), r"changes over the workers \[\d, \d\].*group=across"),
            (lambda: local(inside, node()), "must have worker . in common, and no other"),
            (lambda: local(inside, alone), "got 1 nodes .group=. of 2 workers .process_group., of 4"),
            (lambda: local(Net() if dist.get_rank() else "no model"), "model must be a torch.nn.Module; got str"),
            (
                lambda: local(hybrid, across()),
                r'replicate dimension.*give fully_shard mesh\["shard"\], and LocalSteps group=mesh\["replicate"\]',
            ),
            (lambda: build("fsdp2", group=None), r'fully_shard averages.*group=mesh\["replicate"\]'),
            (lambda: local(fsdp1, across()), r"support fully_shard \(FSDP2\); got FullyShardedDataParallel"),
            (lambda: local(nn.Sequential(inside), across()), "wrapped model; got Sequential, which has one as '0'"),
            (lambda: node_mpu(node(), node()), "ValueError.*must have this worker in common, and no other"),
        ]
    )


def refuses_engines() -> None:
    import deepspeed

    from powersgd_triton.integrations import deepspeed as adapter

    def everywhere() -> Any:
        deepspeed.utils.groups.mpu = None
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}}
        config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
        net = Net()
        return deepspeed.initialize(model=net, model_parameters=list(net.down.parameters()), config=config)[0]

    def compressed() -> Any:
        engine = build("deepspeed").model
        adapter.enable(engine, PowerSGDConfig(rank=2, min_compression_rate=0))
        return engine

    refused(
        [
            (lambda: build("deepspeed", options={"stage": 0}), "need DeepSpeed's ZeRO stage 1 or 2.*got stage 0"),
            (lambda: build("deepspeed", options={"stage": 3}), "need DeepSpeed's ZeRO stage 1 or 2.*got stage 3"),
            (lambda: local(everywhere(), across()), r"\[0, 1, 2, 3\].*mpu=node_mpu\(node, across\)"),
            (lambda: local(compressed(), across()), "compresses gradients within its node.*take the section out"),
            (lambda: build("deepspeed", "rank"), "no matrices of low rank: quantize them"),
        ]
    )


CODED = (("exact", 0), ("ternary", 0), ("int2", 2))
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
    "ddp conserves": partial(conserves, "ddp", (("ternary", 0), ("sparse", 2), ("rank", 0))),
    "fsdp2 conserves": partial(conserves, "fsdp2", (("exact", 0), ("int2", 2), ("rank", 0))),
    "odd tensors": partial(conserves, "ddp", (("ternary", 0), ("budget", 0)), OddNet),
    "offload": partial(conserves, "fsdp2", (("int2", 2),), **OFFLOAD),
    "ddp resumes": partial(resumes, "ddp", "ternary"),
    "fsdp2 resumes": partial(resumes, "fsdp2", "int2", 2),
    "ddp in bf16": partial(averages_states_and_follows_in_bf16, "ddp"),
    "fsdp2 in bf16": partial(averages_states_and_follows_in_bf16, "fsdp2"),
    "levels": shares_an_exchange,
    "refusals": refuses,
}
QUICK_ENGINES: dict[str, Callable[[], None]] = {
    "engines: refusals": refuses_engines,
    "engines average and clip": partial(equals_averaging, "deepspeed", clip=0.1, stage=2, gradient_clipping=0.1),
    "engines conserve": partial(conserves, "deepspeed", CODED, **STAGE_2_BF16),
    "engines resume": partial(resumes, "deepspeed", "int2", 2, **STAGE_2_BF16),
}
SLOW: dict[str, Callable[[], None]] = {"fsdp2 conserves": partial(conserves, "fsdp2", (("ternary", 0), ("budget", 0)))}
SLOW_ENGINES: dict[str, Callable[[], None]] = {
    "engines average, stage 1": partial(equals_averaging, "deepspeed", stage=1),
    "engines resume, BF16_Optimizer": partial(resumes, "deepspeed", "ternary", **ENGINES["BF16_Optimizer"]),
    **{f"engines conserve, {name}": partial(conserves, "deepspeed", CODED, **how) for name, how in ENGINES.items()},
}


def called(_worker: int, _world_size: int, body: Callable[[], None]) -> None:
    body()


def of(cases: dict[str, Callable[[], None]], how: Callable[..., None] = ready) -> Callable[..., None]:
    return make_test({name: partial(how, body=body) for name, body in cases.items()}, WORKERS)


needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is missing")
test_local_steps = of(QUICK, called)
test_more = pytest.mark.slow(of(SLOW, called))
test_engines = needs_deepspeed(of(QUICK_ENGINES))
test_more_engines = pytest.mark.slow(needs_deepspeed(of(SLOW_ENGINES)))
