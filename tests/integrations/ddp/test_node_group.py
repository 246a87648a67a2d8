"""Two levels: workers of a node share the compression of their sum. Four processes as two nodes of two, with DDP."""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.distributed import PROCESS_GROUP_TIMEOUT, environment, outcome, run, run_cases
from tests.support.small import MANY, RANK_2, WIDTH, Messages, complaint, logged, stack, training
from tests.support.training import (
    LIMIT,
    WithUnused,
    batch,
    check,
    digest,
    gradients_of,
    local_gradients,
    relative,
    squared_error,
    step_differences,
    summary,
    total,
)

SAME = 1e-3
"""Relative difference at rank 2 between one level and two. It grows from step to step."""
Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]


@contextlib.contextmanager
def nodes_of(size: int, worker: int) -> Iterator[None]:
    """What torchrun sets on nodes of this size."""
    with environment(LOCAL_WORLD_SIZE=str(size), LOCAL_RANK=str(worker % size)):
        yield


def pair(worker: int, world_size: int, size: int) -> Groups:
    inside = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
    across = [dist.new_group(list(range(index, world_size, size))) for index in range(size)]
    return inside[worker // size], across[worker % size]


def state_for(model: nn.Module, node_group: Any = "auto", **settings: Any) -> PowerSGDState:
    return PowerSGDState(None, module=model, node_group=node_group, **{**RANK_2, **settings})


def owed(state: PowerSGDState) -> dict[str, Tensor]:
    """The sum of all workers' errors."""
    return {name: total(error) for name, error in state.error().items()}


def missing(
    state: PowerSGDState, given: dict[str, Tensor], averages: dict[str, Tensor], before: dict[str, Tensor]
) -> float:
    """Σ E + W·Ĝ − Σ G − Σ E before, relative to what was given."""
    after, worst = owed(state), 0.0
    for name, gradient in given.items():
        expected = total(gradient)
        found = averages[name].double() * dist.get_world_size()
        if name in after:
            found = found + after[name].view_as(found)
            expected = expected + (before[name].view_as(expected) if name in before else 0)
        worst = max(worst, relative(found, expected))
    return worst


# As with one level ---------------------------------------------------------------------------------------------------


def full_rank(worker: int, world_size: int) -> dict[str, Any]:
    with nodes_of(2, worker):
        expected = training(stack(), worker, None, range(5))
        model = stack()
        got = training(model, worker, state_for(model, matrix_approximation_rank=WIDTH), range(5))
    return summary(got, expected)


def uneven(worker: int, world_size: int) -> dict[str, Any]:
    """Each worker takes another number of steps."""
    with nodes_of(2, worker):
        runs = []
        for node_group in (None, "auto"):
            model = stack()
            state = state_for(model, node_group, matrix_approximation_rank=WIDTH)
            runs.append(training(model, worker, state, range(3 + worker), uneven=True))
            runs[-1].digests = [digest(model.parameters())]
        return summary(runs[1], runs[0])


def unused(worker: int, world_size: int) -> dict[str, Any]:
    """A frozen layer, one that nobody uses, and one that two workers use in some steps; and what their errors keep."""
    with nodes_of(2, worker):
        runs, errors = [], []
        for node_group in (None, "auto"):
            model = WithUnused(WIDTH)
            model.second.requires_grad_(False)
            state = state_for(model, node_group)

            def use(step: int, model: WithUnused = model) -> None:
                model.use = step % 2 == 1 and worker in (1, 2)

            options: dict[str, Any] = {"before_step": use, "find_unused_parameters": True}
            runs.append(training(model, worker, state, range(5), **options))
            errors.append(owed(state))
        worst = max(relative(errors[1][name], error) for name, error in errors[0].items())
        return {**summary(runs[1], runs[0]), "errors": worst}


# Compressed ----------------------------------------------------------------------------------------------------------


def narrow(worker: int, world_size: int) -> dict[str, Any]:
    """4 bits in several buckets: nothing is lost, and each worker holds and multiplies its share."""
    with nodes_of(2, worker):
        model = stack()
        own = local_gradients(model)
        state = state_for(model, wire_dtype="int4")
        replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
        replica.register_comm_hook(state, powerSGD_hook)
        losses, digests = [], []
        for step in range(4):
            before = owed(state)
            model.zero_grad()
            inputs, targets = batch(worker, step, width=WIDTH)
            squared_error(replica(inputs), targets).backward()
            averages = gradients_of(model)
            losses.append(missing(state, own, averages, before))
            digests.append(digest(averages.values()))
        memory = state._engine.memory
        buckets = memory.buckets()
        return {
            "missing": max(losses),
            "digests": digests,
            "buckets": len(buckets),
            "held": sum(m.error.numel() for m in memory.matrices.values() if m.error is not None),
            "multiplied": sum(piece.numel for bucket in buckets for group in bucket.own for piece in group.segments),
            "elements": sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1),
        }


def overflow(worker: int, world_size: int) -> dict[str, Any]:
    """One worker's gradient is infinite in the third step, with a loss scale that halves then."""
    with nodes_of(2, worker):
        model = stack()
        own = local_gradients(model)
        state = state_for(model)
        scale = 8.0
        state.attach(lambda: scale)
        replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
        replica.register_comm_hook(state, powerSGD_hook)
        losses, digests, finite = [], [], []
        for step in range(5):
            before = owed(state)
            model.zero_grad()
            inputs, targets = batch(worker, step, width=WIDTH)
            if step == 2 and worker == 3:
                inputs[0, 0] = torch.inf
            (scale * squared_error(replica(inputs), targets)).backward()
            averages = {name: gradient / scale for name, gradient in gradients_of(model).items()}
            given = {name: gradient / scale for name, gradient in own.items()}
            finite.append(all(bool(average.isfinite().all()) for average in averages.values()))
            if finite[-1]:
                losses.append(missing(state, given, averages, before))
            else:
                after = owed(state)
                losses += [0.0 if error.isfinite().all() else torch.inf for error in after.values()]
                scale /= 2
            digests.append(digest(gradients_of(model).values()))
        return {"missing": max(losses), "digests": digests, "finite": finite}


# Interrupted ---------------------------------------------------------------------------------------------------------


def carried(before: dict[str, Tensor], after: dict[str, Tensor], given: dict[str, Tensor]) -> tuple[float, int]:
    """After a step that was not finished, each error is what it was, or has the gradients that were given, and nothing
    else. The largest relative difference from that, and how many errors have the gradients."""
    found = []
    for name, error in before.items():
        added = given[name].double().view_as(error) if name in given else torch.zeros_like(error)
        kept, more = relative(after[name], error), relative(after[name], error + added)
        found.append((min(kept, more), more < kept))
    return max(difference for difference, _ in found), sum(has for _, has in found)


def interrupted(worker: int, world_size: int) -> dict[str, Any]:
    """An exception in the backward pass of all workers, and the state is saved and loaded right after it."""
    with nodes_of(2, worker):
        model = stack()
        own = local_gradients(model)
        state = state_for(model)
        before: dict[str, Tensor] = {}
        hooks = []

        def stop(_: Tensor) -> None:
            raise KeyError("stop")

        def begin(step: int) -> None:
            # By now DDP has built its buckets, and errors are where their rows are.
            if step == 3:
                before.update(owed(state))
                own.clear()
                hooks.append(model[0].weight.register_hook(stop))  # type: ignore[operator]

        failed = complaint(training, model, worker, state, range(4), before_step=begin)
        hooks[0].remove()
        state.load_state_dict(state.state_dict())
        after = owed(state)
        difference, count = carried(before, after, {name: total(gradient) for name, gradient in own.items()})
        replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
        replica.register_comm_hook(state, powerSGD_hook)
        model.zero_grad()
        inputs, targets = batch(worker, 7, width=WIDTH)
        squared_error(replica(inputs), targets).backward()
        return {
            "failed": failed,
            "difference": difference,
            "carried": count,
            "missing": missing(state, own, gradients_of(model), after),
        }


VICTIM = 3


PATIENCE = datetime.timedelta(seconds=10)


def lost(worker: int, world_size: int, store: str = "") -> dict[str, Any]:
    """A worker ends, or stops if there is a store for a group with less patience, in the backward pass.

    The others are told, and owe what they did, with gradients of their node or without.
    """
    if store:
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=4, timeout=PATIENCE)
    with nodes_of(2, worker):
        model = stack()
        state = state_for(model)
        training(model, worker, state, range(2))
        before = {name: error.double() for name, error in state.error().items()}
        given: dict[str, Tensor] = {}
        for member in (worker, worker ^ 1):
            twin = copy.deepcopy(model)
            twin.zero_grad()
            inputs, targets = batch(member, 2, width=WIDTH)
            squared_error(twin(inputs), targets).backward()
            for name, gradient in gradients_of(twin).items():
                given[name] = given.get(name, 0) + gradient.double()
        if worker == VICTIM:

            def end(_: Tensor) -> None:
                if store:
                    # The others are done with it by then.
                    time.sleep(4 * PATIENCE.total_seconds())
                os._exit(17)

            model[2].weight.register_hook(end)  # type: ignore[operator]
        start = time.monotonic()
        failed = complaint(training, model, worker, state, range(2, 3), find_unused_parameters=True)
        seconds = time.monotonic() - start
        after = {name: error.double() for name, error in state.error().items()}
        # This worker's rows.
        for matrices in (before, after, given):
            for name, matrix in state._engine.memory.matrices.items():
                rows = matrices[name].view(before[name].shape)
                behind = matrix.first_row + (0 if matrix.error is None else len(matrix.error))
                rows[: matrix.first_row] = rows[behind:] = 0
        difference, _ = carried(before, after, given)
        return {"failed": failed, "seconds": seconds, "difference": difference}


# Saved and copied ----------------------------------------------------------------------------------------------------


def resumed(worker: int, world_size: int) -> dict[str, Any]:
    """Saved with two nodes of two workers; continued by every layout, by copies and by pickles."""
    mesh = init_device_mesh("cpu", (2, 2))
    one_node, two_nodes = pair(worker, world_size, 4), pair(worker, world_size, 2)
    three = dist.new_group([0, 1, 2])
    with nodes_of(2, worker):
        model = stack()
        state = state_for(model)
        training(model, worker, state, range(3))
        weights, saved = copy.deepcopy(model.state_dict()), state.state_dict()
        errors = {name: error / world_size for name, error in owed(state).items()}
        found: dict[str, Any] = {
            "mean": max(relative(saved["matrices"][name]["error"], error) for name, error in errors.items())
        }
        copies = {"copy": copy.deepcopy(state), "pickle": pickle.loads(pickle.dumps(state))}
        expected = training(model, worker, state, range(3, 6)).gradients

        def differences(into: PowerSGDState | None, **options: Any) -> float:
            # A copy knows the parameters of the model itself.
            continued = stack() if into is None else model
            continued.load_state_dict(weights)
            if into is None:
                into = state_for(continued, **options)
                into.load_state_dict(saved)
            return max(step_differences(training(continued, worker, into, range(3, 6)).gradients, expected))

        for name, node_group in (("flat", None), ("one node", one_node), ("pair", two_nodes), ("mesh", mesh)):
            found[name] = differences(None, node_group=node_group)
        found |= {name: differences(into) for name, into in copies.items()}
        if worker < 3:
            smaller = PowerSGDState(three, module=model, **RANK_2)
            smaller.load_state_dict(saved)
            found["fewer"] = max(relative(smaller.error()[name], error) for name, error in errors.items())
    return found


def regrouped(worker: int, world_size: int) -> dict[str, Any]:
    """Other groups between steps, in which each worker has the other index of its node: what is owed is owed still."""
    with nodes_of(2, worker):
        model = stack()
        state = state_for(model)
        training(model, worker, state, range(2))
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])], [dist.new_group([0, 1]), dist.new_group([2, 3])]
    inside, across = (next(g for g in made if dist.get_rank(g) >= 0) for made in groups)
    before = owed(state)
    state._engine.connect(Communicator(None, node_group=(inside, across)))
    found = {}
    for name in ("other nodes", "the same nodes"):
        own = local_gradients(model)
        replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
        replica.register_comm_hook(state, powerSGD_hook)
        model.zero_grad()
        inputs, targets = batch(worker, 7, width=WIDTH)
        squared_error(replica(inputs), targets).backward()
        found[name] = missing(state, own, gradients_of(model), before)
        before = owed(state)
    return found


# Wrong input ---------------------------------------------------------------------------------------------------------


def refused(worker: int, world_size: int) -> dict[str, Any]:
    everyone = dist.new_group(list(range(world_size)))
    inside, across = pair(worker, world_size, 2)
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    alone = [dist.new_group([index]) for index in range(world_size)][worker]
    some = dist.new_group([0, 1])

    def step(node_group: Any, group: dist.ProcessGroup | None = None) -> None:
        model = nn.Linear(8, 8)
        state = PowerSGDState(group, module=model, node_group=node_group, **RANK_2)
        replica = DistributedDataParallel(model, process_group=group)
        replica.register_comm_hook(state, powerSGD_hook)
        replica(torch.ones(2, 8)).sum().backward()

    found = {
        "type": complaint(state_for, stack(), "node"),
        "mesh": complaint(state_for, stack(), init_device_mesh("cpu", (4,))),
        "one group": complaint(state_for, stack(), (inside,)),
        "too small": complaint(step, (alone, across)),
        "the same": complaint(step, (everyone, everyone)),
        "one worker": complaint(step, (inside, across) if worker else (alone, across)),
        "crossed": complaint(step, (inside, crossed[worker in (1, 2)])),
        "only some": complaint(step, "auto" if worker == 1 else None),
    }
    if worker < 2:
        found["not all"] = complaint(step, "auto", some)
    return found


CASES: list[Callable[..., dict[str, Any]]] = [
    full_rank,
    uneven,
    unused,
    narrow,
    overflow,
    interrupted,
    resumed,
    regrouped,
    refused,
]


@pytest.fixture(scope="module")
def four() -> dict[str, list[Any]]:
    return run_cases(CASES, 4)


def test_full_rank_equals_ddp(four: dict[str, list[Any]]) -> None:
    check(outcome(four, full_rank), 5)


def test_uneven_last_steps_are_those_of_one_level(four: dict[str, list[Any]]) -> None:
    found = outcome(four, uneven)
    for seen in found:
        assert max(seen["steps"]) <= LIMIT
        assert seen["digests"] == found[0]["digests"]


def test_frozen_and_unused_parameters_are_those_of_one_level(four: dict[str, list[Any]]) -> None:
    found = outcome(four, unused)
    for seen in found:
        assert max(seen["steps"]) <= SAME
        assert seen["errors"] <= SAME
        assert seen["digests"] == found[0]["digests"]


def test_a_node_holds_and_multiplies_each_matrix_once(four: dict[str, list[Any]]) -> None:
    found = outcome(four, narrow)
    for first, second in (found[:2], found[2:]):
        assert first["buckets"] > 1
        for count in ("held", "multiplied"):
            assert first[count] + second[count] == first["elements"]
            assert max(first[count], second[count]) <= 1.25 / 2 * first["elements"]


def test_nothing_is_lost_in_4_bits(four: dict[str, list[Any]]) -> None:
    found = outcome(four, narrow)
    for seen in found:
        assert seen["missing"] <= LIMIT
        assert seen["digests"] == found[0]["digests"]


def test_overflow_on_one_worker_skips_the_step_on_all(four: dict[str, list[Any]]) -> None:
    found = outcome(four, overflow)
    for seen in found:
        assert seen["finite"] == [True, True, False, True, True]
        assert seen["missing"] <= LIMIT
        assert seen["digests"] == found[0]["digests"]


def test_an_interrupted_step_leaves_whole_gradients_or_none(four: dict[str, list[Any]]) -> None:
    for seen in outcome(four, interrupted):
        assert "KeyError" in seen["failed"]
        assert seen["difference"] <= LIMIT
        assert seen["carried"] > 0
        assert seen["missing"] <= LIMIT


def check_lost(found: list[Any], patience: datetime.timedelta) -> None:
    assert found[VICTIM] is None
    for seen in found[:VICTIM]:
        assert seen["failed"] != "nothing"
        assert seen["seconds"] < patience.total_seconds()
        assert seen["difference"] <= LIMIT


def test_death_of_a_worker_is_an_exception_in_backward() -> None:
    check_lost(run(lost, 4, casualties=[VICTIM]), PROCESS_GROUP_TIMEOUT)


@pytest.mark.slow
def test_a_worker_that_stops_is_an_exception_after_the_timeout(tmp_path: Path) -> None:
    check_lost(run(lost, 4, str(tmp_path / "store"), casualties=[VICTIM]), 3 * PATIENCE)


def test_a_saved_run_goes_on_in_any_layout(four: dict[str, list[Any]]) -> None:
    for seen in outcome(four, resumed):
        assert all(difference <= SAME for difference in seen.values()), seen


def test_errors_follow_their_rows_when_groups_change(four: dict[str, list[Any]]) -> None:
    for seen in outcome(four, regrouped):
        assert all(difference <= LIMIT for difference in seen.values()), seen


def test_wrong_groups_are_refused_by_all(four: dict[str, list[Any]]) -> None:
    for worker, seen in enumerate(outcome(four, refused)):
        for case in ("type", "one group"):
            assert seen[case].startswith("TypeError: node_group must be"), seen
        assert "two dimensions" in seen["mesh"]
        for case in ("too small", "the same", "one worker", "crossed"):
            assert "ValueError" in seen[case], (case, seen)
            assert "groups of node_group must" in seen[case], (case, seen)
        assert seen["only some"].startswith("DisagreementError"), seen
        assert "node_group" in seen["only some"]
        if worker < 2:
            assert 'node_group="auto" needs the process group of all' in seen["not all"]


# Nodes that are not equal ---------------------------------------------------------------------------------------------


def one_level(worker: int, world_size: int) -> dict[str, Any]:
    """Nodes of 2 and 1 workers, of 3, and none that are known."""
    found: dict[str, tuple[list[str], float]] = {}
    expected = training(stack(), worker, None, range(2))
    for name, variables in {
        "unequal": {"LOCAL_WORLD_SIZE": "2" if worker < 2 else "1", "LOCAL_RANK": str(worker % 2)},
        "one node": {"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": str(worker)},
        "unknown": {"LOCAL_WORLD_SIZE": "", "LOCAL_RANK": ""},
    }.items():
        model = stack()
        messages: Messages
        with environment(**variables), logged("powersgd_triton") as messages:
            got = training(model, worker, state_for(model, matrix_approximation_rank=WIDTH), range(2))
        about = [text for _, text in messages if "node" in text]
        found[name] = about, max(step_differences(got.gradients, expected.gradients))
    return found


def test_unequal_nodes_use_one_level() -> None:
    for worker, seen in enumerate(outcome(run_cases([one_level], 3), one_level)):
        for name, (messages, difference) in seen.items():
            assert difference <= LIMIT
            assert len(messages) == (worker == 0), (name, messages)
        if worker == 0:
            assert "2, 1 workers" in seen["unequal"][0][0]
            assert "3 workers" in seen["one node"][0][0]
            assert "not set" in seen["unknown"][0][0]
