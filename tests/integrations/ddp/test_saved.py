"""States of DDP's hook that are saved, pickled and copied: names and numbers, buckets, damaged states, own errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, checkpoint
from powersgd_triton.integrations import ddp
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.checks import assert_equal_states, same_bits
from tests.support.distributed import outcome, run, run_cases
from tests.support.small import (
    AT_ONCE,
    FEW,
    MANY,
    ONE,
    WIDTH,
    Saved,
    complaint,
    logged,
    stack,
    state_for,
    training,
    uninterrupted,
    warnings,
)
from tests.support.training import LIMIT, check_training, digest, linear_stack, relative, step_differences, total

# On two workers -------------------------------------------------------------------------------------------------------


def resumed(worker: int, world_size: int, folder: str) -> None:
    """A run goes on in other buckets if the state has the model, and else in the same ones."""
    for kind, cap in (("named", FEW), ("named", ONE), ("numbered", MANY)):
        expected = uninterrupted(worker, kind).gradients
        model, other = stack(), stack()
        state, fresh = state_for(model, kind), state_for(other, kind)
        training(model, worker, state, range(4))
        saved, errors = state.state_dict(), state.error()
        path = Path(folder) / f"{kind} {worker}.pt"
        checkpoint.save(saved, path)
        other.load_state_dict(model.state_dict())
        fresh.load_state_dict(path)
        assert_equal_states(fresh.state_dict(), saved)
        assert same_bits(fresh.error(), {name: parts["error"] for name, parts in saved["matrices"].items()})
        for name, parts in saved["matrices"].items():
            assert relative(parts["error"], total(errors[name]) / world_size) <= LIMIT
            assert name.isdecimal() == (kind == "numbered")
        got = training(other, worker, fresh, range(4, 8), cap=cap)
        assert max(step_differences(got.gradients, expected[4:])) <= LIMIT
        assert fresh.iter == 8
        digests: list[Any] = [None] * world_size
        dist.all_gather_object(digests, digest(part for parts in saved["matrices"].values() for part in parts.values()))
        assert len(set(digests)) == 1, "workers save different states"


def other_boundaries(worker: int, world_size: int, folder: str) -> None:
    """A state that knows parameters by numbers refuses other bucket boundaries, and names module=."""
    model = stack()
    numbered = state_for(model, "numbered")
    training(model, worker, numbered, range(3), cap=FEW, **AT_ONCE)
    saved = numbered.state_dict()
    for cap in (MANY, ONE):
        fresh, running = state_for(model, "numbered"), state_for(model, "numbered")
        fresh.load_state_dict(saved)
        training(model, worker, running, range(1), cap=cap, **AT_ONCE)
        check_said(complaint(training, model, worker, fresh, range(3, 4), cap, **AT_ONCE), "RuntimeError", "module=")
        check_said(complaint(running.load_state_dict, saved), "ValueError", "module=")
    check_said(complaint(state_for(model).load_state_dict, saved), "ValueError", "module=")
    pickled = pickle.loads(pickle.dumps(numbered))
    check_said(complaint(training, model, worker, pickled, range(3, 4), MANY, **AT_ONCE), "RuntimeError", "module=")


def check_said(said: str, *parts: str) -> None:
    assert said.startswith(parts[0]), said
    assert all(part in said for part in parts), said


def pickled(worker: int, world_size: int, folder: str) -> None:
    """A run goes on from a pickle, which has the worker's own error, and logs what torch's does."""
    group = dist.new_group(range(world_size))
    expected = uninterrupted(worker, "named").gradients
    model = stack()
    state = state_for(model, "named", group)
    training(model, worker, state, range(4))
    with logged(torchs.__name__) as ours:
        blob = pickle.dumps(state)
        found = pickle.loads(blob)
    torchs_state = torchs.PowerSGDState(group)
    with logged(torchs.__name__) as theirs:
        their_group = pickle.loads(pickle.dumps(torchs_state)).process_group
    assert ours == theirs
    assert len(ours) == 2
    assert found.process_group is their_group is dist.group.WORLD
    for name in ("iter", "config", "compression_stats_logging_frequency", "next_stats_report"):
        assert getattr(found, name) == getattr(state, name), name
    assert found.compression_stats() == state.compression_stats()
    saved, again = state.state_dict(), pickle.loads(blob).state_dict()
    for name, parts in saved["matrices"].items():
        assert relative(again["matrices"][name]["error"], parts["error"]) <= LIMIT, "not the mean error"
    with logged(ddp.__name__) as using:
        got = training(model, worker, found, range(4, 8))
    assert max(step_differences(got.gradients, expected[4:])) <= LIMIT
    assert warnings(using) == []
    if worker == 0:
        Path(folder, "pickle").write_bytes(blob)


def of_another_worker(worker: int, world_size: int, folder: str) -> None:
    """The error in a pickle is used by the worker that has made it, in a group of that size, and dropped elsewhere."""
    model = stack()
    state = state_for(model)
    training(model, worker, state, range(4))
    sent: list[Any] = [pickle.dumps(state), state.error()]
    dist.broadcast_object_list(sent)
    blob, errors = sent
    nothing = {name: torch.zeros_like(error) for name, error in errors.items()}
    groups = [dist.new_group([member]) for member in range(world_size)]
    assert check_owed(pickle.loads(blob), worker, errors) == (worker != 0)
    assert check_owed(pickle.loads(blob), worker, nothing, groups[worker])
    check_owed(copy.deepcopy(pickle.loads(blob)), worker, errors)


def in_a_larger_world(worker: int, world_size: int, folder: str) -> None:
    """Three workers drop the error of a pickle of two."""
    nothing = {name: torch.zeros_like(parameter) for name, parameter in stack().named_parameters()}
    assert check_owed(pickle.loads(Path(folder, "pickle").read_bytes()), worker, nothing)


def check_owed(state: Any, worker: int, owed: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> bool:
    """That a step loses nothing if the workers owed ``owed`` together. Whether it was said that an error is dropped."""
    state.process_group = group
    with logged(ddp.__name__) as messages:
        check_training(stack(), worker, state, [4], owed, group, bucket_cap_mb=MANY, width=WIDTH)
    return any("its error is dropped" in text for text in warnings(messages))


TWO: list[Callable[..., None]] = [resumed, other_boundaries, pickled, of_another_worker]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, list[Any]]]:
    """A folder, and the results of the cases, which save there."""
    folder = str(tmp_path_factory.mktemp("states"))
    return folder, run_cases(TWO, 2, folder)


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.__name__)
def test_on_two_workers(case: Callable[..., None], two: tuple[str, dict[str, list[Any]]]) -> None:
    """See the cases' docstrings."""
    outcome(two[1], case)


def test_a_pickled_error_is_dropped_in_a_larger_world(two: tuple[str, dict[str, list[Any]]]) -> None:
    outcome(two[1], pickled)
    run(in_a_larger_world, 3, two[0])


# In a process group of one --------------------------------------------------------------------------------------------


alone = pytest.mark.usefixtures("one_worker")


def replaced(key: str, value: Any) -> Callable[[Saved], Any]:
    return lambda state: state.__setitem__(key, value)


def first_part(key: str, value: Any) -> Callable[[Saved], Any]:
    return lambda state: next(iter(state["matrices"].values())).__setitem__(key, value)


def first_of_bucket(make: Callable[[str], Any]) -> Callable[[Saved], Any]:
    return lambda state: state["buckets"][0].__setitem__(0, make(state["buckets"][0][0][0]))


# What is not of DDP's hook is damaged in the tests of the compressor's states.
DAMAGE: dict[str, Callable[[Saved], Any]] = {
    "empty": lambda state: state.clear(),
    "no buckets": lambda state: state.pop("buckets"),
    "iteration is negative": replaced("iteration", -1),
    "buckets is None": replaced("buckets", None),
    "buckets is a number": replaced("buckets", 3),
    "buckets is text": replaced("buckets", "bucket"),
    "bucket is None": lambda state: state["buckets"].__setitem__(0, None),
    "parameter without a shape": first_of_bucket(lambda name: (name,)),
    "parameter's shape is None": first_of_bucket(lambda name: (name, None)),
    "error is of one dimension": first_part("error", torch.zeros(WIDTH)),
    "basis has other rows": first_part("basis", torch.zeros(WIDTH - 1, 2)),
    "a matrix is missing": lambda state: state["matrices"].popitem(),
    "a matrix is renamed": lambda state: state["matrices"].__setitem__("other", state["matrices"].popitem()[1]),
    "error has other rows": first_part("error", torch.zeros(WIDTH - 1, WIDTH)),
}
# Before the first step a state without module= does not know the model.
OF_THE_MODEL = ("a matrix is missing", "a matrix is renamed", "error has other rows")


@alone
@pytest.mark.parametrize("kind", ["named", "numbered"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_damaged_state_is_refused_and_changes_nothing(kind: str, steps: int) -> None:
    def prepared(steps: int) -> tuple[nn.Module, PowerSGDState]:
        model = linear_stack(2, WIDTH)
        state = state_for(model, kind)
        training(model, 0, state, range(steps))
        return model, state

    good = prepared(3)[1].state_dict()
    (model, state), (untouched_model, untouched) = prepared(steps), prepared(steps)
    for name, damage in DAMAGE.items():
        if name not in OF_THE_MODEL or (kind, steps) != ("numbered", 0):
            bad = copy.deepcopy(good)
            damage(bad)
            assert complaint(state.load_state_dict, bad).startswith("ValueError"), name
            assert_equal_states(state.state_dict(), untouched.state_dict())
    expected = training(untouched_model, 0, untouched, range(steps, steps + 2))
    assert training(model, 0, state, range(steps, steps + 2)).digests == expected.digests
    state.load_state_dict(good)


def network(compiled: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    inner: Any = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
    if compiled:
        inner = torch.compile(inner, backend="eager")
    return nn.Sequential(inner, nn.Linear(10, 8))


def of_rank_2(model: nn.Module | None, rank: Any = 2, **options: Any) -> PowerSGDState:
    settings = {"start_powerSGD_iter": 0, "min_compression_rate": 0, "module": model, **options}
    if rank is not None:
        settings["matrix_approximation_rank"] = rank
    return PowerSGDState(None, **settings)


def train(model: nn.Module, state: PowerSGDState, steps: range = range(3)) -> list[Tensor]:
    """Averaged gradients of each step."""
    replica = DistributedDataParallel(model)
    replica.register_comm_hook(state, powerSGD_hook)
    found = []
    for step in steps:
        model.zero_grad()
        replica(torch.randn(7, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return found


@alone
def test_names_are_those_of_the_model_that_was_compiled() -> None:
    model, other = network(compiled=True), network()
    state, fresh = of_rank_2(model), of_rank_2(other)
    train(model, state)
    saved = state.state_dict()
    assert sorted(saved["matrices"]) == ["0.0.weight", "1.weight"]
    fresh.load_state_dict(saved)
    for ours, theirs in zip(train(other, fresh, range(3, 5)), train(model, state, range(3, 5)), strict=True):
        torch.testing.assert_close(ours, theirs)


@alone
def test_shapes_in_the_record_are_compared_with_the_model() -> None:
    model = network()
    state, fresh = of_rank_2(model), of_rank_2(network())
    train(model, state)
    saved = state.state_dict()
    for forged in ((10, 3, 2), (6, 10), (5, 12), (60,)):
        bad = copy.deepcopy(saved)
        bad["buckets"] = [[(n, forged if n == "0.0.weight" else s) for n, s in bucket] for bucket in bad["buckets"]]
        with pytest.raises(ValueError, match=r"'0\.0\.weight' has the shape \(10, 6\)"):
            fresh.load_state_dict(bad)
    assert fresh.iter == 0
    fresh.load_state_dict(saved)


@alone
def test_another_module_is_blamed_and_a_layer_that_was_added_later_is_named() -> None:
    check_said(complaint(train, network(), of_rank_2(network())), "", "module=")
    model = network()
    state = of_rank_2(model)
    model.append(nn.Linear(8, 4))
    said = complaint(train, model, state)
    check_said(said, "RuntimeError", "'2.", "was added to the model after PowerSGDState was created")
    assert "module=" not in said


@alone
def test_ranks_of_numpy() -> None:
    model, other = network(), network()
    ours = train(model, of_rank_2(model, lambda *_: np.int64(2), check_every=1))
    assert all(torch.equal(a, b) for a, b in zip(ours, train(other, of_rank_2(other)), strict=True))
    config = PowerSGDConfig(rank=np.int32(3), start_iter=np.int64(1), seed=np.uint8(2))
    assert config == PowerSGDConfig(rank=3, start_iter=1, seed=2)
    assert [type(value) for value in (config.rank, config.start_iter, config.seed)] == [int] * 3
    assert type(PowerSGDConfig(bytes_per_step=np.int64(1000)).bytes_per_step) is int
    for rank in (np.bool_(True), np.float64(2.0), torch.tensor(2.5)):
        with pytest.raises(TypeError, match="rank must be an int or a function"):
            PowerSGDConfig(rank=rank)  # type: ignore[arg-type]


@alone
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("named", "options"),
    [(True, {}), (False, {}), (True, {"rank": None, "compression": 1.1}), (True, {"rank": lambda *_: 2})],
    ids=["named", "numbered", "budget", "function"],
)
def test_a_deep_copy_goes_on_by_itself(named: bool, steps: int, options: dict[str, Any]) -> None:
    model = network()
    state = of_rank_2(model if named else None, **options)
    scale = torch.ones(())
    state.attach(lambda: scale)
    state.process_group = dist.new_group([0])
    train(model, state, range(steps))
    copied = copy.deepcopy(state)
    before = {name: error.clone() for name, error in state.error().items()}
    assert copied.config == state.config
    assert copied.iter == state.iter == steps
    assert copied.compression_stats() == state.compression_stats()
    assert copied.process_group is state.process_group
    scales = copied._engine.step.loss_scale, state._engine.step.loss_scale
    assert scales[0] is not scales[1]
    assert scales[0] is not None
    assert scales[1] is not None
    assert scales[0].source is scales[1].source
    ours = train(model, copied, range(steps, steps + 2))
    assert state.iter == steps
    assert all(torch.equal(error, before[name]) for name, error in state.error().items())
    for one, other in zip(ours, train(model, state, range(steps, steps + 2)), strict=True):
        torch.testing.assert_close(one, other)


@alone
def test_pickles_with_a_budget() -> None:
    """Ranks that were planned are pickled, and the names that they belong to."""
    model = network()
    state = of_rank_2(model, None, compression=1.1, replan_every=2)
    with pytest.raises(ValueError, match="can be pickled after its first step"):
        pickle.dumps(state)
    train(model, state, range(5))
    other = pickle.loads(pickle.dumps(state))
    # Parameters are numbered without module=, in the order in which they were seen first.
    train(model, other, range(5, 6))
    assert [tensor.rank for tensor in other.report().tensors] == [tensor.rank for tensor in state.report().tensors]


def test_a_pickle_without_a_process_group() -> None:
    state = pickle.loads(pickle.dumps(PowerSGDState(None, 3)))
    assert state.matrix_approximation_rank == 3
    assert state.process_group is None
