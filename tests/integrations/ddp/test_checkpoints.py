"""Checkpoints of PowerSGDState: a run goes on from them, on other workers too, and corrupted ones are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powersgd_triton.integrations.ddp import PowerSGDState
from tests.support.distributed import outcome, run, run_cases
from tests.support.small import (
    AT_ONCE,
    FEW,
    MANY,
    ONE,
    WIDTH,
    Results,
    Saved,
    complaint,
    stack,
    state_for,
    training,
    uninterrupted,
)
from tests.support.training import LIMIT, digest, linear_stack, local_gradients, relative, step_differences, total


def to_bytes(state: Saved) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(saved: bytes) -> Saved:
    loaded: Saved = torch.load(io.BytesIO(saved), weights_only=True)
    return loaded


def same_state(one: Any, other: Any) -> bool:
    """Whether all values are equal, tensors in all bits; a tuple may have become a list."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and digest([one]) == digest([other])
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same_state(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def checkpointed(worker: int, world_size: int) -> dict[str, Any]:
    """Saved after four steps, and resumed in a new model with the same and with other bucket sizes."""
    found: dict[str, Any] = {}
    for kind, cap in (("named", MANY), ("named", FEW), ("named", ONE), ("numbered", MANY)):
        expected = uninterrupted(worker, kind).gradients
        model = stack()
        state = state_for(model, kind)
        training(model, worker, state, range(4))
        saved = state.state_dict()
        stored = to_bytes(saved)
        resumed_model = stack()
        resumed_model.load_state_dict(model.state_dict())
        resumed = state_for(resumed_model, kind)
        resumed.load_state_dict(from_bytes(stored))
        loaded, owed = resumed.state_dict(), resumed.error()
        got = training(resumed_model, worker, resumed, range(4, 8), cap=cap)
        errors = state.error()
        found[f"{kind}, {cap}"] = {
            "steps": step_differences(got.gradients, expected[4:]),
            "iter": resumed.iter,
            "round trip": same_state(saved, from_bytes(stored)) and same_state(saved, loaded),
            "mean": max(
                relative(parts["error"], total(errors[name]) / world_size) for name, parts in saved["matrices"].items()
            ),
            "owed": same_state(owed, {name: parts["error"] for name, parts in saved["matrices"].items()}),
            "names": sorted(saved["matrices"]),
            "buckets": len(got.buckets[-1]),
            "stored": stored,
        }
    return found


def other_boundaries(worker: int, world_size: int) -> dict[str, str]:
    """What is said where a state that knows parameters by numbers meets other bucket boundaries."""
    model = stack()
    numbered = state_for(model, "numbered")
    training(model, worker, numbered, range(3), cap=FEW, **AT_ONCE)
    saved = numbered.state_dict()
    found = {}
    for cap in (MANY, ONE):
        fresh, running = state_for(model, "numbered"), state_for(model, "numbered")
        fresh.load_state_dict(saved)
        training(model, worker, running, range(1), cap=cap, **AT_ONCE)
        found[f"first step, {cap}"] = complaint(training, model, worker, fresh, range(3, 4), cap, **AT_ONCE)
        found[f"running, {cap}"] = complaint(running.load_state_dict, saved)
    found["named"] = complaint(state_for(model).load_state_dict, saved)
    return found


def resumed_on_more_workers(worker: int, world_size: int, stored: bytes) -> dict[str, Any]:
    """A step from two workers' checkpoint, compared with Ĝ = P̂ P̂ᵀ M, P̂ = orth(M Q), M = mean of G + saved E."""
    saved = from_bytes(stored)["matrices"]
    model = stack()
    state = state_for(model)
    state.load_state_dict(from_bytes(stored))
    loaded = state.state_dict()
    own = local_gradients(model)
    run = training(model, worker, state, range(4, 5), cap=FEW, **AT_ONCE)
    reconstructed, conserved = [], []
    for name, parts in saved.items():
        M = total(own[name]) / world_size + parts["error"].double()
        P_hat, _ = torch.linalg.qr(M @ parts["basis"].double())
        reconstructed.append(relative(run.gradients[0][name], P_hat @ (P_hat.mT @ M)))
        left = total(state.error()[name]) / world_size
        conserved.append(relative(left + run.gradients[0][name].double(), M))
    return {
        "taken over": same_state(from_bytes(stored), loaded),
        "reconstructed": max(reconstructed),
        "conserved": max(conserved),
        "buckets": len(run.buckets[0]),
        "digest": run.digests,
    }


# Corrupted checkpoints ----------------------------------------------------------------------------------------------


def replaced(key: str, value: Any) -> Callable[[Saved], Any]:
    return lambda state: state.__setitem__(key, value)


def first_part(key: str, value: Any) -> Callable[[Saved], Any]:
    return lambda state: next(iter(state["matrices"].values())).__setitem__(key, value)


STRUCTURE: dict[str, Callable[[Saved], Any]] = {
    "empty": lambda state: state.clear(),
    "no buckets": lambda state: state.pop("buckets"),
    "no matrices": lambda state: state.pop("matrices"),
    "no iteration": lambda state: state.pop("iteration"),
    "another version": replaced("format_version", 99),
    "iteration is negative": replaced("iteration", -1),
    "matrices is a list": replaced("matrices", [1]),
    "buckets is None": replaced("buckets", None),
    "buckets is a number": replaced("buckets", 3),
    "buckets is text": replaced("buckets", "bucket"),
    "bucket is None": lambda state: state["buckets"].__setitem__(0, None),
    "parameter without a shape": lambda state: state["buckets"][0].__setitem__(0, ("0.weight",)),
    "parameter's shape is None": lambda state: state["buckets"][0].__setitem__(
        0, (state["buckets"][0][0][0], None)
    ),
    "error is not finite": first_part("error", torch.full((WIDTH, WIDTH), float("nan"))),
    "error is of one dimension": first_part("error", torch.zeros(WIDTH)),
    "basis has other rows": first_part("basis", torch.zeros(WIDTH - 1, 2)),
}  # fmt: skip
OF_THE_MODEL: dict[str, Callable[[Saved], Any]] = {
    "a matrix is missing": lambda state: state["matrices"].popitem(),
    "a matrix is renamed": lambda state: state["matrices"].__setitem__("other", state["matrices"].popitem()[1]),
    "error has other rows": first_part("error", torch.zeros(WIDTH - 1, WIDTH)),
}
SITUATIONS = [(kind, steps) for kind in ("named", "numbered") for steps in (0, 2)]


def refusals(worker: int, world_size: int) -> dict[str, str]:
    """For each corrupted state and each state it is loaded into: the exception's kind, and whether it did harm."""

    def prepared(kind: str, steps: int) -> tuple[nn.Module, PowerSGDState]:
        model = linear_stack(2, WIDTH)
        state = state_for(model, kind)
        training(model, worker, state, range(steps))
        return model, state

    found = {}
    for kind, steps in SITUATIONS:
        good = prepared(kind, 3)[1].state_dict()
        untouched_model, untouched = prepared(kind, steps)
        expected_state = untouched.state_dict()
        expected = training(untouched_model, worker, untouched, range(steps, steps + 2)).digests
        # Before the first step a state without module= does not know the model.
        for name, corrupt in {**STRUCTURE, **({} if (kind, steps) == ("numbered", 0) else OF_THE_MODEL)}.items():
            model, state = prepared(kind, steps)
            bad = copy.deepcopy(good)
            corrupt(bad)
            said = complaint(state.load_state_dict, bad).split(":")[0]
            try:
                harmless = same_state(state.state_dict(), expected_state)
                harmless &= training(model, worker, state, range(steps, steps + 2)).digests == expected
            except Exception:
                harmless = False
            found[f"{name} into {kind} after {steps} steps"] = said if harmless else f"{said}, and the state changed"
    return found


# On one, two and three workers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Results:
    return run_cases([checkpointed, other_boundaries, refusals], 2)


@pytest.fixture(scope="module")
def one() -> Results:
    return run_cases([checkpointed], 1)


@pytest.fixture(params=["one", "two"])
def one_or_two(request: pytest.FixtureRequest) -> Results:
    results: Results = request.getfixturevalue(request.param)
    return results


@pytest.mark.parametrize("kind", ["named, 0.02", "named, 0.05", "named, 100.0", "numbered, 0.02"])
def test_run_goes_on_from_a_checkpoint(one_or_two: Results, kind: str) -> None:
    for seen in outcome(one_or_two, checkpointed):
        assert len(seen[kind]["steps"]) == 4
        assert max(seen[kind]["steps"]) <= LIMIT
        assert seen[kind]["iter"] == 8


def test_checkpoint_survives_the_safe_loader_and_loading(one_or_two: Results) -> None:
    for seen in outcome(one_or_two, checkpointed):
        assert all(case["round trip"] for case in seen.values())


def test_loaded_error_can_be_read_before_the_first_step(two: Results) -> None:
    for seen in outcome(two, checkpointed):
        assert [kind for kind, case in seen.items() if not case["owed"]] == []


def test_checkpoint_is_the_same_on_all_workers(two: Results) -> None:
    first, second = outcome(two, checkpointed)
    for kind, case in first.items():
        assert same_state(from_bytes(case["stored"]), from_bytes(second[kind]["stored"]))


def test_checkpoint_holds_the_mean_error(two: Results) -> None:
    for seen in outcome(two, checkpointed):
        assert max(case["mean"] for case in seen.values()) <= LIMIT


def test_checkpoint_knows_matrices_by_name_or_number(two: Results) -> None:
    for seen in outcome(two, checkpointed):
        assert seen["named, 0.02"]["names"] == [f"{layer}.weight" for layer in range(6)]
        assert len(seen["numbered, 0.02"]["names"]) == 6
        assert all(name.isdecimal() for name in seen["numbered, 0.02"]["names"])


def test_checkpoint_was_tried_with_other_buckets(two: Results) -> None:
    for seen in outcome(two, checkpointed):
        counts = [seen[f"named, {cap}"]["buckets"] for cap in (MANY, FEW, ONE)]
        assert counts[0] > counts[1] > counts[2] == 1


def test_three_workers_take_over_two_workers_error_and_bases(two: Results) -> None:
    found = run(resumed_on_more_workers, 3, outcome(two, checkpointed)[0]["named, 0.02"]["stored"])
    for seen in found:
        assert seen["taken over"]
        assert seen["reconstructed"] <= LIMIT
        assert seen["conserved"] <= LIMIT
        assert seen["buckets"] > 1
        assert seen["digest"] == found[0]["digest"]


def test_other_boundaries_without_names_are_refused(two: Results) -> None:
    for seen in outcome(two, other_boundaries):
        assert {name: said.split(":")[0] for name, said in seen.items()} == {
            f"first step, {MANY}": "RuntimeError",
            f"first step, {ONE}": "RuntimeError",
            f"running, {MANY}": "ValueError",
            f"running, {ONE}": "ValueError",
            "named": "ValueError",
        }
        assert all("module=" in said for said in seen.values())


def test_corrupted_checkpoint_is_refused_and_changes_nothing(two: Results) -> None:
    for seen in outcome(two, refusals):
        assert len(seen) == len(SITUATIONS) * len(STRUCTURE) + (len(SITUATIONS) - 1) * len(OF_THE_MODEL)
        wrong = [f"{name}: {said}" for name, said in seen.items() if said != "ValueError"]
        assert not wrong, "\n".join(wrong)
