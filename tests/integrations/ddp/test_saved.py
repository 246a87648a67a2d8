"""States of DDP's hook that are saved, pickled and copied: names and numbers, buckets, damaged states, own errors."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from powersgd_triton import PowerSGDConfig, checkpoint
from powersgd_triton.integrations import ddp
from powersgd_triton.integrations.ddp import PowerSGDState
from tests.support.balance import check_same
from tests.support.checks import GONE, assert_equal_states, put, same_bits
from tests.support.distributed import folder, make_test
from tests.support.sharded_training import check_said
from tests.support.training import (
    AT_ONCE,
    FEW,
    LIMIT,
    MANY,
    ONE,
    RANK_2,
    WIDTH,
    Gradients,
    complaint,
    linear_stack,
    local_gradients,
    logged,
    relative,
    state_for,
    step_differences,
    total,
    training,
    warnings,
)


def uninterrupted(worker: int, named: bool = True) -> list[Gradients]:
    """The gradients of eight steps."""
    model = linear_stack()
    return training(model, worker, state_for(model if named else None), range(8))


def resumed(worker: int, world_size: int) -> None:
    """A run goes on in other buckets if the state has the model, and else in the same ones."""
    for named, cap in ((True, FEW), (True, ONE), (False, MANY)):
        expected = uninterrupted(worker, named)
        model, other = linear_stack(), linear_stack()
        state, fresh = (state_for(one if named else None) for one in (model, other))
        training(model, worker, state, range(4))
        saved = state.state_dict()
        other.load_state_dict(model.state_dict())
        with folder(worker) as path:
            file = Path(path) / f"{worker}.pt"
            checkpoint.save(saved, file)
            fresh.load_state_dict(file)
        assert_equal_states(fresh.state_dict(), saved)
        for name in saved["matrices"]:
            assert name.isdecimal() != named
        got = training(other, worker, fresh, range(4, 8), cap=cap)
        assert max(step_differences(got, expected[4:])) <= LIMIT
        assert fresh.iter == 8
        check_same([part for parts in saved["matrices"].values() for part in parts.values()])


def other_boundaries(worker: int, world_size: int) -> None:
    """A state that knows parameters by numbers refuses other bucket boundaries, and names module=."""
    model = linear_stack()
    numbered = state_for(None)
    training(model, worker, numbered, range(3), cap=FEW, **AT_ONCE)
    saved = numbered.state_dict()
    fresh, running = state_for(None), state_for(None)
    fresh.load_state_dict(saved)
    training(model, worker, running, range(1), cap=MANY, **AT_ONCE)
    for other in (fresh, pickle.loads(pickle.dumps(numbered))):
        check_said((complaint(training, model, worker, other, range(3, 4), MANY, **AT_ONCE), "^RuntimeError.*module="))
    for other in (running, state_for(model)):
        check_said((complaint(other.load_state_dict, saved), "^ValueError.*module="))


def pickled(worker: int, world_size: int) -> None:
    """A run goes on from a pickle, which has the worker's own error, and logs what torch's does."""
    group = dist.new_group(range(world_size))
    model = linear_stack()
    state = state_for(model, group=group)
    training(model, worker, state, range(4))
    said, found = [], []
    for one in (state, torchs.PowerSGDState(group)):
        with logged(torchs.__name__) as messages:
            found.append(pickle.loads(pickle.dumps(one)))
        said.append(messages)
    assert said[0] == said[1]
    assert len(said[0]) == 2
    ours, theirs = found
    assert ours.process_group is theirs.process_group is dist.group.WORLD
    for name in ("iter", "config", "compression_stats_logging_frequency", "next_stats_report"):
        assert getattr(ours, name) == getattr(state, name), name
    assert ours.compression_stats() == state.compression_stats()
    again = pickle.loads(pickle.dumps(state)).state_dict()
    for name, parts in state.state_dict()["matrices"].items():
        assert relative(again["matrices"][name]["error"], parts["error"]) <= LIMIT, "not the mean error"
    with logged(ddp.__name__) as using:
        got = training(model, worker, ours, range(4, 8))
    assert max(step_differences(got, uninterrupted(worker)[4:])) <= LIMIT
    assert warnings(using) == []


def interrupted(worker: int, world_size: int) -> None:
    """A run goes on from what is saved when its first compressed step is interrupted, before that has all buckets."""
    for start, named in ((0, True), (2, True), (2, False)):
        model = linear_stack()
        state = state_for(model if named else None, start_powerSGD_iter=start)
        training(model, worker, state, range(start), **AT_ONCE)
        handle = next(model.parameters()).register_hook(lambda _: 1 / 0)
        assert "ZeroDivisionError" in complaint(training, model, worker, state, [start], **AT_ONCE)
        handle.remove()
        weights, fresh = copy.deepcopy(model.state_dict()), state_for(model if named else None)
        fresh.load_state_dict(state.state_dict())
        # Without exact steps before, a pickle does not know how the other parameters are numbered.
        states = [state, fresh, copy.deepcopy(state), *([pickle.loads(pickle.dumps(state))] if start else [])]
        runs = []
        for one in states:
            model.load_state_dict(weights)
            runs.append(training(model, worker, one, range(start, start + 2), **AT_ONCE))
        for run in runs[1:]:
            assert max(step_differences(run, runs[0])) <= LIMIT


def of_another_worker(worker: int, world_size: int) -> None:
    """The error in a pickle is used by the worker that has made it, in a group of that size, and dropped elsewhere."""
    model = linear_stack()
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


def check_owed(state: Any, worker: int, owed: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> bool:
    """That a step loses nothing if the workers owed ``owed`` together. Whether it was said that an error is dropped."""
    state.process_group = group
    model = linear_stack()
    own = local_gradients(model)
    with logged(ddp.__name__) as messages:
        (averages,) = training(model, worker, state, [4], group=group)
    summed = total if group is None else Tensor.double
    errors, nothing = state.error(), torch.zeros(())
    for name, average in averages.items():
        left = summed(average + errors.get(name, nothing))
        assert relative(left, summed(own[name]) + owed.get(name, nothing)) <= LIMIT, name
    return any("its error is dropped" in text for text in warnings(messages))


def regrouped(worker: int, world_size: int) -> None:
    """Workers that have trained apart are refused with the alternating algorithm, whose bases they would not share."""
    own = [dist.new_group([index]) for index in range(world_size)][worker]
    for algorithm in ("standard", "alternating"):
        model = linear_stack()
        state = state_for(model, group=own, algorithm=algorithm)
        training(model, worker, state, range(3), group=own)
        state.process_group = None
        said = complaint(training, model, worker, state, range(3, 4))
        assert ("bases of" in said) == (algorithm == "alternating"), said


CASES = [resumed, other_boundaries, pickled, interrupted, of_another_worker, regrouped]
test_on_two_workers = make_test(CASES, 2)
alone = pytest.mark.usefixtures("one_worker")


# (place in a saved state, what it must not be), where "*" is the first matrix. What is not of DDP's hook is damaged in
# the tests of the compressor's states.
DAMAGE: list[tuple[str, Any]] = [
    ("buckets", GONE),
    ("iteration", -1),
    ("buckets", 3),
    ("buckets", "bucket"),
    ("buckets/0", None),
    ("buckets/0/0/1", GONE),
    ("buckets/0/0/1", None),
    ("matrices/*/basis", torch.zeros(WIDTH - 1, 2)),
]
# Before the first step a state without module= does not know these.
OF_THE_MODEL: list[tuple[str, Any]] = [
    ("buckets/0/0/1", (5, 12)),
    ("matrices/*", GONE),
    ("matrices/x", {"basis": torch.ones(WIDTH, 2), "error": torch.zeros(WIDTH, WIDTH)}),
    ("matrices/*/error", torch.zeros(WIDTH - 1, WIDTH)),
]


@alone
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_damaged_state_is_refused_and_changes_nothing(named: bool, steps: int) -> None:
    def prepared(steps: int) -> tuple[nn.Module, PowerSGDState]:
        model = linear_stack(2)
        state = state_for(model if named else None)
        training(model, 0, state, range(steps))
        return model, state

    good = prepared(3)[1].state_dict()
    (model, state), (untouched_model, untouched) = prepared(steps), prepared(steps)
    for place, junk in DAMAGE + OF_THE_MODEL * (named or steps > 0):
        bad = put(good, place.replace("*", next(iter(good["matrices"]))), junk)
        assert complaint(state.load_state_dict, bad).startswith("ValueError"), (place, junk)
        assert_equal_states(state.state_dict(), untouched.state_dict())
    expected = training(untouched_model, 0, untouched, range(steps, steps + 2))
    assert all(map(same_bits, training(model, 0, state, range(steps, steps + 2)), expected))
    state.load_state_dict(good)


@alone
def test_another_module_is_blamed_and_a_layer_that_was_added_later_is_named() -> None:
    check_said((complaint(training, linear_stack(), 0, state_for(linear_stack()), range(1)), "module="))
    model = linear_stack()
    state = state_for(model)
    model.append(nn.Linear(WIDTH, 4))
    said = complaint(training, model, 0, state, range(1))
    check_said((said, "^RuntimeError.*'6..*was added to the model after PowerSGDState was created"))
    assert "module=" not in said


def test_ranks_of_numpy() -> None:
    config = PowerSGDConfig(rank=np.int32(3), start_iter=np.int64(1), seed=np.uint8(2))
    assert config == PowerSGDConfig(rank=3, start_iter=1, seed=2)
    assert [type(value) for value in (config.rank, config.start_iter, config.seed)] == [int] * 3
    assert type(PowerSGDConfig(bytes_per_step=np.int64(1000)).bytes_per_step) is int
    state = PowerSGDState(None, lambda *_: np.int64(2), module=nn.Linear(WIDTH, WIDTH), check_every=1)
    assert state.report().tensors[0].rank == 2
    for rank in (np.bool_(True), torch.tensor(True), np.float64(2.0), torch.tensor(2.5)):
        with pytest.raises(TypeError, match="rank must be an int or a function"):
            PowerSGDConfig(rank=rank)  # type: ignore[arg-type]


@alone
@pytest.mark.parametrize("options", [{}, {"module": None}, {"compression": 1.1}], ids=["named", "numbered", "budget"])
def test_a_deep_copy_goes_on_by_itself(options: dict[str, Any]) -> None:
    model, scale = linear_stack(), torch.ones(())
    settings = {"start_powerSGD_iter": 0, "min_compression_rate": 0} if "compression" in options else RANK_2
    state = PowerSGDState(None, **{**settings, "module": model, **options})
    state.attach(lambda: scale)
    state.process_group = dist.new_group([0])
    for steps in (range(0), range(3)):
        training(model, 0, state, steps)
        copied = copy.deepcopy(state)
        before = {name: error.clone() for name, error in state.error().items()}
        for attribute in ("config", "iter", "process_group"):
            assert getattr(copied, attribute) == getattr(state, attribute), attribute
        assert copied.compression_stats() == state.compression_stats()
        one, two = (made._engine.step.loss_scale for made in (copied, state))
        assert one is not two
        assert one is not None
        assert two is not None
        assert one.source is two.source
        weights = copy.deepcopy(model.state_dict())
        ours = training(model, 0, copied, range(8, 10))
        assert same_bits(state.error(), before)
        model.load_state_dict(weights)
        assert all(map(same_bits, training(model, 0, state, range(8, 10)), ours))


@alone
def test_pickles_with_a_budget() -> None:
    """Ranks that were planned are pickled, and the names that they belong to."""
    model = linear_stack()
    state = PowerSGDState(None, module=model, compression=1.1, replan_every=2)
    with pytest.raises(ValueError, match="can be pickled after its first step"):
        pickle.dumps(state)
    training(model, 0, state, range(5))
    other = pickle.loads(pickle.dumps(state))
    # Parameters are numbered without module=, in the order in which they were seen first.
    training(model, 0, other, range(5, 6))
    assert [tensor.rank for tensor in other.report().tensors] == [tensor.rank for tensor in state.report().tensors]
