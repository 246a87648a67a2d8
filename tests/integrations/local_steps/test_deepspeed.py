"""Local steps across nodes of DeepSpeed engines with ZeRO inside a node, with four processes as two nodes of two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import torch
import torch.distributed as dist

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.deepspeed_cases import BF16
from tests.support.deepspeed_jobs import Job, named, parametrized
from tests.support.local_steps import TERNARY, batch, same_bits, theta
from tests.support.local_wrappers import (
    EVERY,
    RATE,
    WORKERS,
    Net,
    Watch,
    across,
    conserves,
    equals_averaging,
    in_deepspeed,
    inside,
    refused,
    resumes,
)

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
        with Watch() as watch:
            losses.append(float(setup.advance(*batch(dist.get_rank(), step % 6))))
        assert inside(watch.groups)
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

    for make, pattern in (
        (lambda: in_deepspeed(Net(), stage=0).model, "need DeepSpeed's ZeRO stage 1 or 2.*got stage 0"),
        (lambda: in_deepspeed(Net(), stage=3).model, "need DeepSpeed's ZeRO stage 1 or 2.*got stage 3"),
        (everywhere, r"averages gradients over the workers \[0, 1, 2, 3\].*mpu=node_mpu\(node, across\)"),
        (compressed, "compresses gradients within its node.*take the section out"),
    ):
        deepspeed.utils.groups.mpu = None
        refused(make, pattern, across())
    low_rank = PowerSGDConfig(rank=2)
    refused(lambda: in_deepspeed(Net()).model, "no matrices of low rank: give codes", across(), low_rank)


STAGE_2_BF16 = KINDS["stage 2, bf16"]
QUICK: dict[str, Callable[[], None]] = {
    "refuses": refuses,
    "averages and clips": partial(equals_averaging, "deepspeed", clip=0.1, stage=2, gradient_clipping=0.1),
    "conserves": partial(conserves, "deepspeed", CODED, **STAGE_2_BF16),
    "resumes": partial(resumes, "deepspeed", "int2, delay", **STAGE_2_BF16),
}
SLOW: dict[str, Callable[[], None]] = {}
for name, kind in KINDS.items():
    SLOW[f"trains, {name}"] = partial(trains, **kind)
    SLOW[f"conserves, {name}"] = partial(conserves, "deepspeed", CODED, **kind)
for name in ("stage 1", "stage 2"):
    SLOW[f"averages, {name}"] = partial(equals_averaging, "deepspeed", **KINDS[name])
for name in ("stage 2, bf16", "stage 2", "BF16_Optimizer"):
    SLOW[f"resumes, {name}"] = partial(resumes, "deepspeed", "ternary", **KINDS[name])


@parametrized([*named(QUICK, WORKERS, engine=True), *named(SLOW, WORKERS, slow=True, engine=True)])
def test_local_steps(job: Job, finish: Callable[[Job], None]) -> None:
    """See the functions above and in ``local_wrappers.py``."""
    finish(job)
