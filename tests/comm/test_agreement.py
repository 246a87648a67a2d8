"""Workers that do not do the same are told so, all of them, instead of hanging or training on garbage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, DisagreementError, PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from powersgd_triton.ops import torch_backend
from tests.support.distributed import Worker, outcome, run, run_cases
from tests.support.sharded_training import RANK_2 as SHARDED_RANK_2
from tests.support.sharded_training import Net, hybrid, hybrid_mesh, sharded
from tests.support.sharded_training import train as train_sharded
from tests.support.small import MANY, RANK_2, WIDTH, stack
from tests.support.training import batch, squared_error

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


def another_rank(worker: int, world_size: int) -> str:
    config = PowerSGDConfig(**{**CONFIG, "rank": 3 if worker == 1 else 2})
    return disagreement(lambda: compress(Compressor(config, SHAPES)))


def another_start(worker: int, world_size: int) -> str:
    """One worker averages exactly, in one message, where the others send two."""
    config = PowerSGDConfig(**CONFIG, start_iter=int(worker == 1))
    return disagreement(lambda: compress(Compressor(config, SHAPES)))


def another_shape(worker: int, world_size: int) -> str:
    shapes = {**SHAPES, "c": (8, 9)} if worker == 1 else SHAPES
    return disagreement(lambda: compress(Compressor(PowerSGDConfig(**CONFIG), shapes), shapes))


def another_tensor(worker: int, world_size: int) -> str:
    shapes: dict[str, Any] = {**SHAPES, "more": (3,)} if worker == 1 else SHAPES
    return disagreement(lambda: compress(Compressor(PowerSGDConfig(**CONFIG), shapes), shapes))


def nothing_to_compress(worker: int, world_size: int) -> str:
    shapes: dict[str, Any] = {} if worker == 1 else SHAPES
    return disagreement(lambda: compress(Compressor(PowerSGDConfig(**CONFIG), shapes), shapes))


def another_checkpoint(worker: int, world_size: int) -> str:
    saved = Compressor(PowerSGDConfig(**CONFIG), SHAPES)
    compress(saved)
    state = saved.state_dict()
    resumed = Compressor(PowerSGDConfig(**CONFIG), SHAPES)
    return disagreement(lambda: resumed.load_state_dict(state) if worker != 1 else compress(resumed))


def ddp(worker: int, world_size: int) -> str:
    model = stack()
    state = PowerSGDState(None, module=model, **{**RANK_2, "random_seed": 5 if worker == 1 else 0})
    replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
    replica.register_comm_hook(state, powerSGD_hook)
    inputs, targets = batch(worker, 0, width=WIDTH)
    return disagreement(lambda: squared_error(replica(inputs), targets).backward())


AT_THE_START: dict[Worker, str] = {
    another_rank: "config.rank: 3 instead of 2",
    another_start: "config.start_iter: 1 instead of 0",
    another_shape: "shape of 'c': [8, 9] instead of [8, 8]",
    another_tensor: "shape of 'more': [3] instead of none",
    nothing_to_compress: "shape of 'a': none instead of [16, 12]",
    another_checkpoint: "call: a step instead of load_state_dict",
    ddp: "config.seed: 5 instead of 0",
}

# Every so many steps ------------------------------------------------------------------------------------------------


def in_agreement(worker: int, world_size: int) -> str:
    """Overflows, exact first steps and a loss scale are no disagreement."""
    compressor = Compressor(PowerSGDConfig(**CONFIG, check_every=1, start_iter=2), SHAPES)
    compressor.attach(lambda: 8.0)

    def steps() -> None:
        for step in range(6):
            given = gradients(SHAPES)
            if step == 4 and worker == 0:
                given["a"][2, 2] = float("nan")
            compressor.decompress(compressor.compress(given))

    return disagreement(steps)


exact = torch_backend._orthogonalize


def inexact(*args: Any, out: list[Tensor], **options: Any) -> None:
    exact(*args, out=out, **options)
    for basis in out:
        basis.mul_(1 + 2.0**-20)


def other_factors(worker: int, world_size: int) -> tuple[int, str]:
    compressor = Compressor(PowerSGDConfig(**CONFIG, check_every=3), SHAPES)
    for _ in range(3):
        compress(compressor)
    with mock.patch.object(torch_backend, "_orthogonalize", inexact if worker == 1 else exact):
        for step in range(3, 7):
            said = disagreement(lambda: compress(compressor))
            if said:
                return step, said
    return -1, ""


def other_iteration(worker: int, world_size: int) -> tuple[int, str]:
    model = stack()
    state = PowerSGDState(None, module=model, **RANK_2, check_every=2)
    replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
    replica.register_comm_hook(state, powerSGD_hook)
    for step in range(6):
        if step == 2 and worker == 1:
            state.iter += 1
        inputs, targets = batch(worker, step, width=WIDTH)
        said = disagreement(lambda: squared_error(replica(inputs), targets).backward())  # noqa: B023
        if said:
            return step, said
    return -1, ""


RESULTS: dict[int, dict[str, list[Any]]] = {}
EVERY_SO_MANY: list[Worker] = [in_agreement, other_factors, other_iteration]


def found(case: Worker, world_size: int) -> list[Any]:
    if world_size not in RESULTS:
        RESULTS[world_size] = run_cases([*AT_THE_START, *EVERY_SO_MANY], world_size)
    return outcome(RESULTS[world_size], case)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", AT_THE_START, ids=lambda case: case.__name__)
def test_every_worker_is_told_at_the_start(case: Worker, world_size: int):
    expected = f"workers do not agree: worker 1 differs from worker 0 in {AT_THE_START[case]}"
    assert [said[: len(expected)] for said in found(case, world_size)] == [expected] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_workers_that_agree(world_size: int):
    assert found(in_agreement, world_size) == [""] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_factors_are_compared(world_size: int):
    seen = found(other_factors, world_size)
    assert {step for step, _ in seen} == {5}
    assert len(set(seen)) == 1
    assert "worker 1 differs from worker 0 in " in seen[0][1]
    assert "P̂ of the bucket of 'a' and 2 more" in seen[0][1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_iteration_is_compared(world_size: int):
    for step, said in found(other_iteration, world_size):
        assert step == 3
        assert "iteration: 5 instead of 4" in said


# Sharded ------------------------------------------------------------------------------------------------------------


def between_shards(worker: int, world_size: int) -> str:
    """Each pair of replicas agrees; the two shards do not."""
    mesh = hybrid_mesh(2, 2)
    config = PowerSGDConfig(rank=2 + mesh["shard"].get_local_rank(), min_compression_rate=1)
    module, _ = hybrid(Net(), mesh, config)
    return disagreement(lambda: train_sharded(module, worker, steps=range(1)))


def one_replica_drifts(worker: int, world_size: int) -> tuple[list[str], str]:
    """Shards have factors and plans of their own, which only their replicas share."""
    mesh = hybrid_mesh(2, 2)
    config = PowerSGDConfig(compression=3, min_compression_rate=1, replan_every=1, check_every=1)
    module, state = hybrid(Net(), mesh, config)
    said = [disagreement(lambda: train_sharded(module, worker, steps=range(4)))]
    # Tells the shards' plans apart.
    said.append(str(state.report()))
    if worker == 3:
        next(iter(state._engine.memory.buckets())).basis.add_(1.0)
    return said, disagreement(lambda: train_sharded(module, worker, steps=range(4, 6)))


def in_one_shard(worker: int, world_size: int) -> list[tuple[str, float]]:
    """One element of shard 0 overflows, which only its replicas see. No shard may spend what is owed.

    Returns:
        How far the mean error over replicas is from what it must be, relative to the step's gradient.
    """
    mesh = hybrid_mesh(2, 2)
    group, shard = mesh["replicate"].get_group(), mesh["shard"].get_local_rank()
    module, state = hybrid(Net(), mesh, SHARDED_RANK_2)
    native = train_sharded(sharded(Net(), mesh), worker, steps=range(2, 3), lr=0.0).gradients[0]
    train_sharded(module, worker, steps=range(2), lr=0.0)
    before, average = mean_error(state, group), state._average

    def overflowing(unit: Any, buffer: Tensor) -> None:
        if "tokens.weight" in unit.parameters and shard == 0 and dist.get_rank(group) == 1:
            buffer[0] = float("inf")
        average(unit, buffer)

    state._average = overflowing
    got = train_sharded(module, worker, steps=range(2, 3), lr=0.0).gradients[0]
    after = mean_error(state, group)
    spoiled = {name for name, gradient in got.items() if not gradient.isfinite().all()}
    found = [("spoiled", float(spoiled == {"tokens.weight", "sometimes.weight", "head.weight"}))]
    for name, error in after.items():
        rows = -(-native[name].shape[0] // 2)
        given = native[name].view(native[name].shape[0], -1)[shard * rows : (shard + 1) * rows]
        expected = before[name].clone()
        if shard == 1 or name not in spoiled:
            expected[: len(given)] += given
        found.append((name, float((error - expected).norm() / native[name].norm())))
    return found


def mean_error(state: Any, group: dist.ProcessGroup) -> dict[str, Tensor]:
    errors: dict[str, Tensor] = state.error()
    for error in errors.values():
        dist.all_reduce(error, op=dist.ReduceOp.SUM, group=group)
        error.div_(2)
    return errors


def test_shards_are_compared():
    for said in run(between_shards, 4):
        assert said.startswith("workers do not agree: worker 1 differs from worker 0 in config.rank: 3 instead of 2")
        assert "worker 3 differs" in said


def test_replicas_of_a_shard_are_compared_with_each_other():
    results = run(one_replica_drifts, 4)
    plans = [plan for (_, plan), _ in results]
    assert plans[0] == plans[2] != plans[1] == plans[3]
    for (at_first, _), later in results:
        assert not at_first
        assert "workers do not agree" in later
        assert "of the bucket of" in later


def test_an_overflow_in_one_shard_spends_no_error_in_the_others():
    for (_, spoiled), *differences in run(in_one_shard, 4):
        assert spoiled, "the compressed matrices of the root module, and no others, must be NaN"
        assert len(differences) > 5
        # Sums of three fp32 gradients and errors of their size, rounded a few times.
        assert max(difference for _, difference in differences) < 1e-6, differences
