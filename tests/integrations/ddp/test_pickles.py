"""Pickles of PowerSGDState: a run goes on from them, and a worker's error stays with that worker."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from powersgd_triton.integrations import ddp
from powersgd_triton.integrations.ddp import PowerSGDState
from tests.support.distributed import outcome, run, run_cases
from tests.support.small import (
    AT_ONCE,
    Results,
    Saved,
    complaint,
    logged,
    stack,
    state_for,
    training,
    uninterrupted,
    warnings,
)
from tests.support.training import LIMIT, local_gradients, relative, step_differences, total


def pickled(worker: int, world_size: int) -> dict[str, Any]:
    """A state with a group of its own is pickled after four steps, and the run goes on from the pickle."""
    group = dist.new_group(range(world_size))
    found: dict[str, Any] = {}
    for kind in ("named", "numbered"):
        expected = uninterrupted(worker, kind).gradients
        model = stack()
        state = state_for(model, kind, group)
        training(model, worker, state, range(4))
        with logged(torchs.__name__) as saving:
            blob = pickle.dumps(state)
        with logged(torchs.__name__) as loading:
            resumed = pickle.loads(blob)
        theirs = torchs.PowerSGDState(group)
        with logged(torchs.__name__) as their_saving:
            their_blob = pickle.dumps(theirs)
        with logged(torchs.__name__) as their_loading:
            their_group = pickle.loads(their_blob).process_group
        with logged(ddp.__name__) as using:
            got = training(model, worker, resumed, range(4, 8))
        found[kind] = {
            "steps": step_differences(got.gradients, expected[4:]),
            "messages": ((saving, their_saving), (loading, their_loading)),
            "warnings": warnings(using),
            "group": (pickle.loads(blob).process_group is their_group, their_group is dist.group.WORLD),
            "read": [
                (s.iter, s.compression_stats(), s.config, s.compression_stats_logging_frequency, s.next_stats_report)
                for s in (state, pickle.loads(blob))
            ],
            "blob": blob,
            "errors": state.error(),
        }
    return found


def owed_after(blob: bytes, worker: int, owed: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> Saved:
    """One step from a pickle: how far it is from losing nothing if the workers had owed ``owed`` together before."""
    with logged(ddp.__name__) as messages:
        state = pickle.loads(blob)
        state.process_group = group
        return {**step_from(state, worker, owed, group), "warnings": warnings(messages)}


def step_from(
    state: PowerSGDState, worker: int, owed: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> Saved:
    model = stack()
    own = local_gradients(model)
    run = training(model, worker, state, range(4, 5), group=group)
    world_size = dist.get_world_size(group)
    differences = []
    for name, left in state.error().items():
        before, after = own[name].double(), left.double()
        if world_size > 1:
            before, after = total(before), total(after)
        after = after + world_size * run.gradients[0][name].double()
        differences.append(relative(after, before + owed[name].double()))
    assert differences
    return {"difference": max(differences)}


def pickled_by_the_first_worker(worker: int, world_size: int) -> dict[str, Any]:
    """Worker 0's pickle on both workers, in groups of one, and copied before it is used."""
    model = stack()
    state = state_for(model)
    training(model, worker, state, range(4))
    blobs: list[Any] = [pickle.dumps(state)]
    dist.broadcast_object_list(blobs)
    errors = [state.error()]
    dist.broadcast_object_list(errors)
    nothing = {name: torch.zeros_like(error) for name, error in errors[0].items()}
    groups = [dist.new_group([member]) for member in range(world_size)]
    return {
        "both": owed_after(blobs[0], worker, errors[0]),
        "alone": owed_after(blobs[0], worker, nothing, groups[worker]),
        "copied": step_from(copy.deepcopy(pickle.loads(blobs[0])), worker, errors[0]),
    }


def pickled_then_saved(worker: int, world_size: int) -> float:
    """How far state_dict() of a state that was just unpickled is from that of the original."""
    model = stack()
    state = state_for(model)
    training(model, worker, state, range(4))
    expected, got = state.state_dict(), pickle.loads(pickle.dumps(state)).state_dict()
    return max(relative(got["matrices"][name]["error"], parts["error"]) for name, parts in expected["matrices"].items())


def unpickled_with_other_buckets(worker: int, world_size: int) -> str:
    model = stack()
    state = state_for(model)
    training(model, worker, state, range(2))
    resumed = pickle.loads(pickle.dumps(state))
    return complaint(training, model, worker, resumed, range(2, 3), **AT_ONCE)


def pickled_by_fewer_workers(worker: int, world_size: int, blob: bytes) -> dict[str, Any]:
    nothing = {name: torch.zeros_like(parameter) for name, parameter in stack().named_parameters()}
    return owed_after(blob, worker, nothing)


# On two and three workers -------------------------------------------------------------------------------------------


TWO = [pickled, pickled_by_the_first_worker, pickled_then_saved, unpickled_with_other_buckets]


@pytest.fixture(scope="module")
def two() -> Results:
    return run_cases(TWO, 2)


@pytest.mark.parametrize("kind", ["named", "numbered"])
def test_run_goes_on_from_a_pickle(two: Results, kind: str) -> None:
    for seen in outcome(two, pickled):
        assert len(seen[kind]["steps"]) == 4
        assert max(seen[kind]["steps"]) <= LIMIT
        before, after = seen[kind]["read"]
        assert before == after
        assert before[0] == 4


def test_pickling_logs_what_torch_logs(two: Results) -> None:
    for seen in outcome(two, pickled):
        for ours, theirs in seen["named"]["messages"]:
            assert ours == theirs
            assert len(ours) == 1
        assert seen["named"]["warnings"] == []


def test_unpickled_state_has_the_default_group_as_torchs(two: Results) -> None:
    for seen in outcome(two, pickled):
        assert seen["named"]["group"] == (True, True)


def test_pickle_without_a_process_group() -> None:
    state = pickle.loads(pickle.dumps(PowerSGDState(None, 3)))
    assert state.matrix_approximation_rank == 3
    assert state.process_group is None


def test_pickles_hold_each_workers_own_error(two: Results) -> None:
    first, second = (seen["named"]["errors"] for seen in outcome(two, pickled))
    assert all(relative(first[name], second[name]) > 0.1 for name in first)


def test_pickled_error_is_dropped_on_another_worker(two: Results) -> None:
    owner, other = (seen["both"] for seen in outcome(two, pickled_by_the_first_worker))
    assert max(owner["difference"], other["difference"]) <= LIMIT
    assert not any("its error is dropped" in text for text in owner["warnings"])
    assert any("its error is dropped" in text for text in other["warnings"])


def test_pickled_error_is_dropped_in_a_smaller_group(two: Results) -> None:
    for seen in outcome(two, pickled_by_the_first_worker):
        assert seen["alone"]["difference"] <= LIMIT
        assert any("its error is dropped" in text for text in seen["alone"]["warnings"])


def test_pickled_error_is_dropped_in_a_larger_world(two: Results) -> None:
    blob = outcome(two, pickled)[0]["named"]["blob"]
    for seen in run(pickled_by_fewer_workers, 3, blob):
        assert seen["difference"] <= LIMIT
        assert any("its error is dropped" in text for text in seen["warnings"])


def test_copy_of_an_unpickled_state_is_treated_like_it(two: Results) -> None:
    for seen in outcome(two, pickled_by_the_first_worker):
        assert seen["copied"]["difference"] <= LIMIT


def test_state_dict_of_an_unpickled_state_holds_the_mean_error(two: Results) -> None:
    assert max(outcome(two, pickled_then_saved)) <= LIMIT


def test_pickle_in_other_buckets_is_refused(two: Results) -> None:
    for said in outcome(two, unpickled_with_other_buckets):
        assert said.startswith("RuntimeError")
        assert "module=" in said
