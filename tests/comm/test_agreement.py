"""Workers that do not do the same are told so, all of them, instead of hanging or training on garbage."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.comm.agreement import DIFFERENT_BITS
from powersgd_triton.config import logger
from powersgd_triton.core import buckets, facts
from powersgd_triton.ops import torch_backend
from tests.support.checks import gradients
from tests.support.distributed import on_workers
from tests.support.sharded_training import Net, hybrid, hybrid_mesh, train
from tests.support.training import complaint

SHAPES = {"a": (16, 12), "b": (5,), "c": (8, 8)}
CONFIG: dict[str, Any] = {"rank": 2, "min_compression_rate": 0}
TOLD = "DisagreementError: workers do not agree:"


exact = torch_backend._orthogonalize


def compress(compressor: Compressor, shapes: dict[str, Any] = SHAPES, spoil: bool = False) -> None:
    given = gradients(dist.get_rank(), shapes)
    if spoil:
        given["a"][2, 2] = float("nan")
    compressor.decompress(compressor.compress(given))


@on_workers(2, 3)
def test_every_worker_is_told_at_the_start(worker: int, world_size: int) -> None:
    for differs, difference in (
        ({"rank": 3}, "config.rank: 3 instead of 2"),
        # One worker averages exactly, in one message, where the others send two.
        ({"start_iter": 1}, "config.start_iter: 1 instead of 0"),
        ({"shapes": {**SHAPES, "c": (8, 9)}}, "shape of 'c': [8, 9] instead of [8, 8]"),
        ({"shapes": {**SHAPES, "more": (3,)}}, "shape of 'more': [3] instead of none"),
        ({"shapes": {}}, "shape of 'a': none instead of [16, 12]"),
    ):
        fields: dict[str, Any] = {"shapes": SHAPES, **CONFIG, **(differs if worker == 1 else {})}
        shapes = fields.pop("shapes")
        said = complaint(compress, Compressor(PowerSGDConfig(**fields), shapes), shapes)
        assert said.startswith(f"{TOLD} worker 1 differs from worker 0 in {difference}"), said
        dist.barrier()
    # Another version of the package.
    with mock.patch.object(facts, "PROTOCOL", facts.PROTOCOL + (worker == 1)):
        said = complaint(compress, Compressor(PowerSGDConfig(**CONFIG), SHAPES))
    assert f"the package's protocol: {facts.PROTOCOL + 1} instead of {facts.PROTOCOL}" in said, said
    dist.barrier()


@on_workers(2, 3)
def test_workers_that_agree_until_an_iteration_or_a_factor_differs(worker: int, world_size: int) -> None:
    """Overflows, exact first steps and a loss scale are no disagreement."""
    compressor = Compressor(PowerSGDConfig(**CONFIG, check_every=1, start_iter=2), SHAPES)
    compressor.attach(lambda: 8.0)
    for number in range(6):
        compress(compressor, spoil=number == 4 and worker == 0)
    compressor._engine.step.iteration += worker == 1
    assert complaint(compress, compressor).startswith(f"{TOLD} worker 1 differs from worker 0 in iteration: 8 instead")
    dist.barrier()

    # Factors are compared.
    def inexact(*args: Any, out: Tensor, **options: Any) -> None:
        exact(*args, out=out, **options)
        out.mul_(1 + 2.0**-20)

    compressor = Compressor(PowerSGDConfig(**CONFIG, check_every=3), SHAPES)
    for _ in range(3):
        compress(compressor)
    with mock.patch.object(torch_backend, "_orthogonalize", inexact if worker == 1 else exact):
        for _ in range(3, 5):
            compress(compressor)
        said = complaint(compress, compressor)
    assert "worker 1 differs from worker 0 in " in said
    assert "P̂ of the bucket of 'a' and 2 more" in said
    everyone = [""] * world_size
    dist.all_gather_object(everyone, said)
    assert {*everyone} == {said}


@on_workers(2)
def test_workers_that_compute_differently_are_warned(worker: int, world_size: int) -> None:
    """Once, on all workers, and they go on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    expected = f"{DIFFERENT_BITS}: triton 3.7.1 on sm_80 on workers 0; torch 2.13.0 on sm_90 on workers 1"
    kinds = ("triton 3.7.1 on sm_80", "torch 2.13.0 on sm_90")
    for kind, warnings in ((kinds[0], []), (kinds[worker], [expected])):
        with mock.patch.object(buckets, "computed_by", lambda *_, kind=kind: kind):
            compressor = Compressor(PowerSGDConfig(**CONFIG), SHAPES)
            for _ in range(2):
                compress(compressor)
        assert [text for text in messages if DIFFERENT_BITS in text] == warnings
    logger.removeHandler(handler)


@on_workers(4)
def test_shards_and_replicas_of_a_shard_are_compared(worker: int, world_size: int) -> None:
    """At first each pair of replicas agrees, and the two shards do not."""
    mesh = hybrid_mesh(2, 2)
    config = PowerSGDConfig(rank=2 + mesh["shard"].get_local_rank(), min_compression_rate=1)
    module, _ = hybrid(Net(), mesh, config)
    said = complaint(train, module, worker, steps=range(1))
    assert said.startswith(f"{TOLD} worker 1 differs from worker 0 in config.rank: 3 instead of 2")
    assert "worker 3 differs" in said
    # Shards have factors and plans of their own, which only their replicas share.
    dist.barrier()
    config = PowerSGDConfig(compression=3, min_compression_rate=1, replan_every=1, check_every=1)
    module, state = hybrid(Net(), hybrid_mesh(2, 2), config)
    train(module, worker, steps=range(4))
    plans = [""] * world_size
    dist.all_gather_object(plans, str(state.report()))
    assert plans[0] == plans[2] != plans[1] == plans[3]
    if worker == 3:
        next(iter(state._engine.buckets.in_use())).basis.add_(1.0)
    said = complaint(train, module, worker, steps=range(4, 6))
    assert "workers do not agree" in said
    assert "of the bucket of" in said
