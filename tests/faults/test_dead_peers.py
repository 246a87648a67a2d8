"""A peer dies, or says no more, in the middle of a step: the survivor is told in time, and loses nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from powersgd_triton.integrations.ddp import batched_powerSGD_hook
from tests.support.dead_peers import ALONE, DEATH, SILENCE, TOGETHER, Plain, Replicated, Way, bare, survive, watch
from tests.support.dead_peers_sharded import survive as survive_sharded
from tests.support.small import MANY
from tests.support.thinned import thinned
from tests.support.training import LIMIT

SLACK = 300.0
"""Seconds that a busy machine may take beyond the process group's timeout. Only what hangs takes longer."""

exact: Way = functools.partial(Replicated, start_powerSGD_iter=100)
several: Way = functools.partial(Replicated, cap=MANY)
left: Way = functools.partial(Replicated, algorithm="alternating")
right: Way = functools.partial(Replicated, algorithm="alternating", start_powerSGD_iter=1)
batched: Way = functools.partial(Replicated, hook=batched_powerSGD_hook, start_powerSGD_iter=2)
# {what is interrupted: (way of training, number of the step's all-reduce, further arguments)}
CASES: dict[str, tuple[Way, int, dict[str, Any]]] = {
    "exact averaging": (exact, 0, {}),
    "first message": (Replicated, 0, {}),
    "second message": (Replicated, 1, {}),
    "one of several buckets": (several, 3, {}),
    "the last message of several buckets": (several, 5, {}),
    "left product": (left, 0, {}),
    "right product": (right, 0, {}),
    "first message of batched_powerSGD_hook": (batched, 0, {}),
    "second message of batched_powerSGD_hook": (batched, 1, {}),
    "first message of Compressor": (Plain, 0, {}),
    "second message of Compressor": (Plain, 1, {}),
    "state_dict": (Replicated, 0, {"saving": True}),
    "state_dict of Compressor": (Plain, 2, {"saving": True}),
    "silence in exact averaging": (exact, 0, {"silent": True}),
    "silence in the second message": (Replicated, 1, {"silent": True}),
    "silence in state_dict": (Replicated, 3, {"saving": True, "silent": True}),
    "silence in Compressor": (Plain, 1, {"silent": True}),
}


# The others wait for the process group's timeout once more.
SLOW = ("silence in exact averaging", "silence in Compressor")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]


@functools.cache
def found(name: str) -> dict[str, Any]:
    way, message, options = CASES[name]
    seen: dict[str, Any] = watch(
        functools.partial(survive, way=way, message=message, **options), silent=options.get("silent", False)
    )
    return seen


def check_told(seen: dict[str, Any], silent: bool) -> None:
    """That there was an exception, as soon as the system knows of a death and when the timeout is over else."""
    assert seen["error"] == "RuntimeError", seen
    if silent:
        assert 0.9 * SILENCE <= seen["seconds"] <= SILENCE + SLACK
    else:
        assert seen["seconds"] <= DEATH


@pytest.mark.parametrize("name", NAMES)
def test_survivor_is_told_in_time(name: str) -> None:
    check_told(found(name), CASES[name][2].get("silent", False))
    assert found(name)["seconds to leave"] <= SLACK


@pytest.mark.parametrize("name", NAMES)
def test_error_is_as_before_or_has_the_gradient_too(name: str) -> None:
    """Element by element: the step's average never reached the optimizer, so no product may be subtracted."""
    assert found(name)["left"]["either"] == 1
    if "state_dict" in name:
        assert found(name)["left"]["kept"] == 1


@pytest.mark.parametrize("manner", ["as it was", "loaded", "new"])
@pytest.mark.parametrize("name", NAMES)
def test_survivor_goes_on_alone_and_loses_nothing(name: str, manner: str) -> None:
    seen = found(name)[manner]
    assert seen["finite"]
    assert seen["conserved"] <= LIMIT
    assert (seen["owed"] > 0) == ("exact" not in name)


@pytest.mark.parametrize("name", NAMES)
def test_interrupted_state_loads_as_a_new_one_does(name: str) -> None:
    """The same bits follow, so that nothing of the interrupted step is left behind."""
    assert found(name)["loaded"]["digest"] == found(name)["new"]["digest"]


@thinned("kind, message_silent", ("hsdp", "fsdp2", "fsdp1"), ((0, False), (1, False), (1, True)), together=1)
def test_sharded_training_goes_on_from_its_checkpoint(kind: str, message_silent: tuple[int, bool]) -> None:
    message, silent = message_silent
    seen = watch(functools.partial(survive_sharded, kind=kind, message=message, silent=silent), silent=silent)
    check_told(seen, silent)
    assert seen["same error"]
    assert seen["owed"] > 0
    assert seen["finite"]
    assert seen["conserved"] <= LIMIT
    # With one worker FSDP2 reduces nothing, hence asks for no compression: gradients are exact, the error waits.
    assert seen["steps"] == (TOGETHER if kind == "fsdp2" else TOGETHER + ALONE)


# New processes, which import everything.
@pytest.mark.slow
@pytest.mark.parametrize("case", [bare, functools.partial(survive, way=several, message=3)], ids=["DDP", "hook"])
def test_survivor_s_process_ends_normally(case: Any) -> None:
    """With Python's own shutdown, and exit code 0, which ``watch`` sees to; with DDP alone and with the hook."""
    check_told(watch(case, method="spawn"), silent=False)
