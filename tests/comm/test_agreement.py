"""Workers that do not do the same are told so, all of them, instead of hanging or training on garbage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import Compressor, DisagreementError, PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState
from powersgd_triton.ops import torch_backend
from tests.support.distributed import on_workers
from tests.support.sharded_training import Net, hybrid, hybrid_mesh
from tests.support.sharded_training import train as train_sharded
from tests.support.small import RANK_2, backward, stack

SHAPES = {"a": (16, 12), "b": (5,), "c": (8, 8)}
CONFIG: dict[str, Any] = {"rank": 2, "min_compression_rate": 0}


def disagreement(act: Callable[[], Any]) -> str:
    """What a DisagreementError says; "" where there is none."""
    try:
        act()
    except DisagreementError as error:
        return str(error)
    return ""


def gradients(shapes: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def compress(compressor: Compressor, shapes: dict[str, Any] = SHAPES) -> None:
    compressor.decompress(compressor.compress(gradients(shapes)))


# At the start -------------------------------------------------------------------------------------------------------


def compressed(worker: int, **of_worker_1: Any) -> None:
    """A step, with other fields or shapes on worker 1."""
    others = of_worker_1 if worker == 1 else {}
    shapes = others.pop("shapes", SHAPES)
    compress(Compressor(PowerSGDConfig(**{**CONFIG, **others}), shapes), shapes)


def with_ddp(**options: Any) -> tuple[PowerSGDState, Callable[..., None]]:
    """A state, and a backward pass of a step with it."""
    model = stack()
    state = PowerSGDState(None, module=model, **{**RANK_2, **options})
    return state, backward(model, state)


# {what is said: what differs on worker 1}
AT_THE_START: dict[str, Callable[[int], Any]] = {
    "config.rank: 3 instead of 2": lambda worker: compressed(worker, rank=3),
    # One worker averages exactly, in one message, where the others send two.
    "config.start_iter: 1 instead of 0": lambda worker: compressed(worker, start_iter=1),
    "shape of 'c': [8, 9] instead of [8, 8]": lambda worker: compressed(worker, shapes={**SHAPES, "c": (8, 9)}),
    "shape of 'more': [3] instead of none": lambda worker: compressed(worker, shapes={**SHAPES, "more": (3,)}),
    "shape of 'a': none instead of [16, 12]": lambda worker: compressed(worker, shapes={}),
    "config.seed: 5 instead of 0": lambda worker: with_ddp(random_seed=5 if worker == 1 else 0)[1](),
}


@on_workers(2, 3)
def test_every_worker_is_told_at_the_start(worker: int, world_size: int) -> None:
    for difference, act in AT_THE_START.items():
        said = disagreement(lambda: act(worker))  # noqa: B023
        assert said.startswith(f"workers do not agree: worker 1 differs from worker 0 in {difference}"), said
        dist.barrier()


# Every so many steps ------------------------------------------------------------------------------------------------


@on_workers(2, 3)
def test_workers_that_agree(worker: int, world_size: int) -> None:
    """Overflows, exact first steps and a loss scale are no disagreement."""
    compressor = Compressor(PowerSGDConfig(**CONFIG, check_every=1, start_iter=2), SHAPES)
    compressor.attach(lambda: 8.0)
    for step in range(6):
        given = gradients(SHAPES)
        if step == 4 and worker == 0:
            given["a"][2, 2] = float("nan")
        compressor.decompress(compressor.compress(given))


exact = torch_backend._orthogonalize


def inexact(*args: Any, out: list[Tensor], **options: Any) -> None:
    exact(*args, out=out, **options)
    for basis in out:
        basis.mul_(1 + 2.0**-20)


@on_workers(2, 3)
def test_factors_are_compared(worker: int, world_size: int) -> None:
    compressor = Compressor(PowerSGDConfig(**CONFIG, check_every=3), SHAPES)
    for _ in range(3):
        compress(compressor)
    with mock.patch.object(torch_backend, "_orthogonalize", inexact if worker == 1 else exact):
        for _ in range(3, 5):
            compress(compressor)
        said = disagreement(lambda: compress(compressor))
    assert "worker 1 differs from worker 0 in " in said
    assert "P̂ of the bucket of 'a' and 2 more" in said
    everyone = [""] * world_size
    dist.all_gather_object(everyone, said)
    assert {*everyone} == {said}


@on_workers(2, 3)
def test_iteration_is_compared(worker: int, world_size: int) -> None:
    state, step = with_ddp(check_every=2)
    for number in range(3):
        if number == 2 and worker == 1:
            state.iter += 1
        step(number)
    assert "iteration: 5 instead of 4" in disagreement(lambda: step(3))


# Sharded ------------------------------------------------------------------------------------------------------------


@on_workers(4)
def test_shards_are_compared(worker: int, world_size: int) -> None:
    """Each pair of replicas agrees; the two shards do not."""
    mesh = hybrid_mesh(2, 2)
    config = PowerSGDConfig(rank=2 + mesh["shard"].get_local_rank(), min_compression_rate=1)
    module, _ = hybrid(Net(), mesh, config)
    said = disagreement(lambda: train_sharded(module, worker, steps=range(1)))
    assert said.startswith("workers do not agree: worker 1 differs from worker 0 in config.rank: 3 instead of 2")
    assert "worker 3 differs" in said


@on_workers(4)
def test_replicas_of_a_shard_are_compared_with_each_other(worker: int, world_size: int) -> None:
    """Shards have factors and plans of their own, which only their replicas share."""
    config = PowerSGDConfig(compression=3, min_compression_rate=1, replan_every=1, check_every=1)
    module, state = hybrid(Net(), hybrid_mesh(2, 2), config)
    train_sharded(module, worker, steps=range(4))
    plans = [""] * world_size
    dist.all_gather_object(plans, str(state.report()))
    assert plans[0] == plans[2] != plans[1] == plans[3]
    if worker == 3:
        next(iter(state._engine.memory.buckets())).basis.add_(1.0)
    said = disagreement(lambda: train_sharded(module, worker, steps=range(4, 6)))
    assert "workers do not agree" in said
    assert "of the bucket of" in said
