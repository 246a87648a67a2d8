"""Local steps across nodes of DeepSpeed engines with ZeRO inside a node, with four processes as two nodes of two."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import torch
import torch.distributed as dist

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.deepspeed_jobs import Job
from tests.support.local_steps import TERNARY, same_bits, theta
from tests.support.local_wrappers import (
    EVERY,
    RATE,
    WORKERS,
    Net,
    across,
    batch,
    conserves,
    equals_averaging,
    in_deepspeed,
    inside,
    refused,
    resumes,
    watched,
)
from tests.support.sharded_training import in_one_group, outcome

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
KINDS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 1, bf16": {"stage": 1, **BF16},
    "stage 2, bf16": {"stage": 2, **BF16},
    "BF16_Optimizer": {"stage": 1, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    "stage 2, offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
}
CODED = ("exact", "ternary", "int2, delay")


def trains(steps: int = 60, **options: Any) -> None:
    """Nodes learn together in ternary codes, with clipping, and communicate in exchanges only."""
    setup = in_deepspeed(Net(), **options, gradient_clipping=1.0)
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across())
    losses = []
    for step in range(steps):
        with watched() as groups:
            losses.append(float(setup.advance(*batch(dist.get_rank(), step % 6))))
        assert inside(groups)
        sync.step()
    assert same_bits(setup.whole(), None)
    assert same_bits(theta(sync), across())
    assert torch.equal(setup.flat(), theta(sync))
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6]), losses


def refuses() -> None:
    import deepspeed

    from powersgd_triton.integrations import deepspeed as adapter

    def everywhere() -> Any:
        optimizer = torch.optim.SGD((net := Net().requires_grad_()).parameters(), lr=RATE)
        config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}}
        return deepspeed.initialize(
            model=net, config={**config, "zero_allow_untested_optimizer": True}, optimizer=optimizer
        )[0]  # fmt: skip

    def compressed() -> Any:
        engine = in_deepspeed(Net(), stage=2).model
        adapter.enable(engine, PowerSGDConfig(rank=2, min_compression_rate=0))
        return engine

    low_rank = PowerSGDConfig(rank=2)
    for make, pattern, config in (
        (lambda: in_deepspeed(Net(), stage=0).model, "need DeepSpeed's ZeRO stage 1 or 2.*got stage 0", TERNARY),
        (lambda: in_deepspeed(Net(), stage=3).model, "need DeepSpeed's ZeRO stage 1 or 2.*got stage 3", TERNARY),
        (
            everywhere,
            r"averages gradients over the workers \[0, 1, 2, 3\].*mpu=node_mpu\(node, across\)",
            TERNARY,
        ),
        (compressed, "compresses gradients within its node.*take the section out", TERNARY),
        (lambda: in_deepspeed(Net()).model, "no matrices of low rank: give codes", low_rank),
    ):
        deepspeed.utils.groups.mpu = None
        refused(make, pattern, across(), config)


QUICK: dict[str, Any] = {
    "refuses": refuses,
    "averages and clips": functools.partial(
        equals_averaging, "deepspeed", clip=0.1, gradient_clipping=0.1, **KINDS["stage 2"]
    ),
    "conserves, stage 2, bf16": functools.partial(conserves, "deepspeed", CODED, **KINDS["stage 2, bf16"]),
    "resumes, stage 2, bf16": functools.partial(resumes, "deepspeed", "int2, delay", **KINDS["stage 2, bf16"]),
}
SLOW: dict[str, Any] = {
    **{f"trains, {name}": functools.partial(trains, **kind) for name, kind in KINDS.items()},
    **{f"conserves, {name}": functools.partial(conserves, "deepspeed", CODED, **kind) for name, kind in KINDS.items()},
    **{
        f"averages, {name}": functools.partial(equals_averaging, "deepspeed", **KINDS[name])
        for name in ("stage 1", "stage 2")
    },
    **{
        f"resumes, {name}": functools.partial(resumes, "deepspeed", "ternary", **KINDS[name])
        for name in ("stage 2, bf16", "stage 2", "BF16_Optimizer")
    },
}


@functools.cache
def results(*, slow: bool) -> dict[str, list[Any]]:
    return in_one_group({name: Job(case) for name, case in (SLOW if slow else QUICK).items()}, WORKERS)


@pytest.mark.parametrize("name", QUICK)
def test_case(name: str) -> None:
    """See the functions above and in ``local_wrappers.py``."""
    outcome(results(slow=False), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more(name: str) -> None:
    outcome(results(slow=True), name)
