"""PowerSGDState has torch's interface, statistics and messages."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations import ddp
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.distributed import outcome, run_cases
from tests.support.small import ONE, RANK_2, WIDTH, Messages, complaint, logged, stack, training

# Torch's interface --------------------------------------------------------------------------------------------------


def test_constructor_takes_torchs_arguments() -> None:
    theirs = list(inspect.signature(torchs.PowerSGDState).parameters.values())
    ours = list(inspect.signature(PowerSGDState).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert {p.kind for p in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


def test_hook_takes_torchs_arguments() -> None:
    theirs, ours = inspect.signature(torchs.powerSGD_hook), inspect.signature(powerSGD_hook)
    assert list(ours.parameters) == list(theirs.parameters)


def test_torchs_attributes_can_be_read() -> None:
    arguments: dict[str, Any] = {
        "matrix_approximation_rank": 3,
        "start_powerSGD_iter": 7,
        "min_compression_rate": 1.5,
        "use_error_feedback": False,
        "warm_start": False,
        "orthogonalization_epsilon": 1e-8,
        "compression_stats_logging_frequency": 0,
        "batch_tensors_with_same_shape": True,
    }
    memory = {"rng", "error_dict", "p_memory_dict", "q_memory_dict"}
    for given in ({}, arguments):
        ours, theirs = PowerSGDState(None, **given), torchs.PowerSGDState(None, **given)
        for name in set(theirs.__slots__) - memory:
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.compression_stats() == theirs.compression_stats()


def test_hyperparameters_cannot_be_assigned() -> None:
    state = PowerSGDState(None)
    with pytest.raises(AttributeError):
        state.matrix_approximation_rank = 2
    assert state.matrix_approximation_rank == 1


def test_iter_can_be_assigned_a_number_of_steps() -> None:
    state = PowerSGDState(None)
    for value, error in ((-5, ValueError), (2.0, TypeError), ("3", TypeError), (True, TypeError)):
        with pytest.raises(error, match="iter must be"):
            state.iter = value  # type: ignore[assignment]
    assert state.iter == 0
    state.iter = 5
    assert state.iter == 5


def test_unknown_option_is_named() -> None:
    with pytest.raises(ValueError, match=r"bakend.*backend"):
        PowerSGDState(None, bakend="torch")


def test_configuration_is_logged_as_by_torch() -> None:
    arguments: dict[str, Any] = {"matrix_approximation_rank": 3, "random_seed": 4, "warm_start": False}
    with logged(torchs.__name__) as ours:
        PowerSGDState(None, **arguments)
    with logged(torchs.__name__) as theirs:
        torchs.PowerSGDState(None, **arguments)
    assert ours == theirs
    assert len(ours) == 1


# A configuration in place of torch's hyperparameters -----------------------------------------------------------------


CONFIG = PowerSGDConfig(rank=3, min_compression_rate=1.5, seed=7, error_dtype="bf16")
FORMS: dict[str, Callable[..., PowerSGDState]] = {
    "first": lambda **others: PowerSGDState(CONFIG, **others),
    "second": lambda **others: PowerSGDState(None, CONFIG, **others),
    "by name": lambda **others: PowerSGDState(config=CONFIG, **others),
    "with a group": lambda **others: PowerSGDState(CONFIG, process_group=None, **others),
    "as rank": lambda **others: PowerSGDState(process_group=None, matrix_approximation_rank=CONFIG, **others),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_configuration_is_used_as_it_is(form: str) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    state = FORMS[form](module=model, compression_stats_logging_frequency=3)
    for seen in (state, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert seen.config == CONFIG
        assert seen.process_group is None
        assert seen.compression_stats_logging_frequency == 3
        assert (seen.matrix_approximation_rank, seen.start_powerSGD_iter, seen.min_compression_rate) == (3, 0, 1.5)
        assert seen.batch_tensors_with_same_shape
    assert [tensor.name for tensor in state.report().tensors] == ["weight", "bias"]


def test_a_configuration_may_have_a_budget() -> None:
    config = PowerSGDConfig(compression=20)
    assert PowerSGDState(config, module=nn.Linear(WIDTH, WIDTH)).config == config
    with pytest.raises(ValueError, match="module="):
        PowerSGDState(config)


BUDGETS: list[tuple[dict[str, Any], str]] = [
    ({"compression": 3, "module": None}, "give PowerSGDState the model as module="),
    ({"matrix_approximation_rank": 4, "compression": 3}, "one of rank, compression and bytes_per_step; got rank=4"),
    # torch's default, but given.
    ({"matrix_approximation_rank": 1, "compression": 3}, "one of rank, compression and bytes_per_step; got rank=1"),
    ({"compression": 3, "bytes_per_step": 100}, "got compression=3, bytes_per_step=100"),
    ({"bytes_per_step": 10}, "at rank 1 this model sends"),
]


@pytest.mark.parametrize(("fields", "said"), BUDGETS)
def test_budgets_are_explained(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        PowerSGDState(None, **{"module": nn.Linear(WIDTH, WIDTH), **fields})
    assert PowerSGDState(None, module=nn.Linear(2, 2), compression=None).matrix_approximation_rank == 1


BESIDE: dict[str, Any] = {
    "matrix_approximation_rank": 1,
    "start_powerSGD_iter": 1_000,
    "min_compression_rate": 2,
    "use_error_feedback": True,
    "warm_start": True,
    "orthogonalization_epsilon": 0,
    "random_seed": 0,
    "batch_tensors_with_same_shape": False,
    "wire_dtype": None,
    "bakend": "torch",
}


@pytest.mark.parametrize("name", BESIDE)
def test_hyperparameters_beside_a_configuration_are_refused(name: str) -> None:
    """Also those that are equal to torch's defaults, or to the configuration's."""
    with pytest.raises(TypeError, match=name):
        PowerSGDState(CONFIG, **{name: BESIDE[name]})
    if name != "matrix_approximation_rank":
        with pytest.raises(TypeError, match=f"PowerSGDConfig.*{name}"):
            PowerSGDState(None, CONFIG, **{name: BESIDE[name]})


def test_further_positional_arguments_after_a_configuration_are_refused() -> None:
    given: Any = (CONFIG, 3)
    with pytest.raises(TypeError, match=r"names.*got 3"):
        PowerSGDState(*given)


def test_a_hyperparameter_is_given_once() -> None:
    with pytest.raises(TypeError, match="use_error_feedback and error_feedback"):
        PowerSGDState(None, use_error_feedback=True, error_feedback=False)


@pytest.mark.parametrize("group", [4, "gloo", nn.Linear(2, 2), CONFIG], ids=["int", "str", "model", "configuration"])
def test_a_process_group_of_another_type_is_refused(group: Any) -> None:
    said = rf"process_group must be a torch.distributed.ProcessGroup or None; got {re.escape(repr(group))}"
    with pytest.raises(TypeError, match=said):
        PowerSGDState(process_group=group)
    state = PowerSGDState(None)
    with pytest.raises(TypeError, match=said):
        state.process_group = group
    assert state.process_group is None


# Statistics and messages --------------------------------------------------------------------------------------------


RANKS_AND_RATES = ((1, 2), (4, 1), (8, 1.5))


def varied() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 96),
        nn.Tanh(),
        nn.Unflatten(1, (12, 8)),
        nn.Conv1d(12, 10, 3),
        nn.Flatten(),
        nn.Linear(60, 5),
        nn.Linear(5, WIDTH),
    )


def masked(messages: Messages) -> Messages:
    """Without the length of the error: torch's covers the whole bucket, ours what is compressed."""
    return [(level, re.sub(r"^(A zero tensor of length) \d+ ", r"\1 … ", text)) for level, text in messages]


def as_torchs(worker: int, world_size: int) -> None:
    """Statistics, steps and messages are those of torch's hook, in one bucket, since torch's may hang with several."""
    rates = set()
    for rank, rate in RANKS_AND_RATES:
        states, said = [], []
        for module in (ddp, torchs):
            state = module.PowerSGDState(
                None, rank, 2, min_compression_rate=rate, compression_stats_logging_frequency=2
            )
            with logged(torchs.__name__) as messages:
                training(varied(), worker, state, range(7), cap=ONE, hook=module.powerSGD_hook)
            states.append(state)
            said.append(masked(messages))
        ours, theirs = states
        assert ours.compression_stats() == theirs.compression_stats()
        assert ours.iter == theirs.iter == 7
        rates.add(ours.compression_stats()[0])
        assert said[0] == said[1]
        assert [text.split(":")[0] for _, text in said[0] if text.startswith(("Start", "Compression"))] == [
            "Start to apply PowerSGD after 2 iterations.",
            *["Compression stats"] * 3,
        ]
        for beginning in ("A zero tensor of length … ", "Allocating contiguous memory of length "):
            assert sum(text.startswith(beginning) for _, text in said[0]) == 1
    assert len(rates) == len(RANKS_AND_RATES), "the cases do not differ in what they compress"


def batched_as_torchs(worker: int, world_size: int) -> None:
    """The batched hook's messages. torch's fails in its first compressed step, after it has logged them."""
    found = []
    for module in (ddp, torchs):
        state = module.PowerSGDState(None, 2, start_powerSGD_iter=2, compression_stats_logging_frequency=2)
        with logged(torchs.__name__) as messages:
            complaint(training, varied(), worker, state, range(5), cap=ONE, hook=module.batched_powerSGD_hook)
        found.append(sorted(m for m in masked(messages) if not m[1].startswith("Compression stats")))
    assert found[0] == found[1]
    assert any(text.startswith("Initializing low-rank tensors P and Q") for _, text in found[0])


def starts(worker: int, world_size: int) -> None:
    """The start is logged once, with several buckets."""
    for start in (0, 1, 3):
        with logged(torchs.__name__) as messages:
            training(stack(), worker, PowerSGDState(None, **{**RANK_2, "start_powerSGD_iter": start}), range(5))
        found = [text for _, text in messages if text.startswith("Start to apply")]
        assert found == [f"Start to apply PowerSGD after {start} iterations."]


CASES = [as_torchs, batched_as_torchs, starts]


@pytest.mark.parametrize("workers", [1, 2])
def test_statistics_and_messages_are_torchs(workers: int) -> None:
    results = run_cases(CASES, workers)
    for case in CASES:
        outcome(results, case)
