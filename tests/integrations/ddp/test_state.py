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
from tests.support.distributed import make_test
from tests.support.small import ONE, RANK_2, WIDTH, Messages, complaint, logged, stack, training

# Torch's interface --------------------------------------------------------------------------------------------------


def test_torchs_arguments_are_taken() -> None:
    theirs, ours = (list(inspect.signature(s).parameters.values()) for s in (torchs.PowerSGDState, PowerSGDState))
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert {p.kind for p in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    hooks = powerSGD_hook, torchs.powerSGD_hook
    assert len({tuple(inspect.signature(hook).parameters) for hook in hooks}) == 1


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


def test_iter_alone_can_be_assigned() -> None:
    state = PowerSGDState(None)
    with pytest.raises(AttributeError):
        state.matrix_approximation_rank = 2
    assert state.matrix_approximation_rank == 1
    for value, error in ((-5, ValueError), (2.0, TypeError), ("3", TypeError), (True, TypeError)):
        with pytest.raises(error, match="iter must be"):
            state.iter = value  # type: ignore[assignment]
    assert state.iter == 0
    state.iter = 5
    assert state.iter == 5


def test_configuration_is_logged_as_by_torch() -> None:
    said = []
    for module in (ddp, torchs):
        with logged(torchs.__name__) as messages:
            module.PowerSGDState(None, matrix_approximation_rank=3, random_seed=4, warm_start=False)
        said.append(messages)
    assert said[0] == said[1]
    assert len(said[0]) == 1


# A configuration in place of torch's hyperparameters -----------------------------------------------------------------


CONFIG = PowerSGDConfig(rank=3, min_compression_rate=1.5, seed=7, error_dtype="bf16")
FORMS: dict[str, Callable[..., PowerSGDState]] = {
    "first": lambda **others: PowerSGDState(CONFIG, **others),
    "second": lambda **others: PowerSGDState(None, CONFIG, **others),
    "by name": lambda **others: PowerSGDState(config=CONFIG, **others),
    "with a group": lambda **others: PowerSGDState(CONFIG, process_group=None, **others),
    "as rank": lambda **others: PowerSGDState(process_group=None, matrix_approximation_rank=CONFIG, **others),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_configuration_is_used_as_it_is(form: Callable[..., PowerSGDState]) -> None:
    state = form(module=nn.Linear(WIDTH, WIDTH), compression_stats_logging_frequency=3)
    for seen in (state, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert seen.config == CONFIG
        assert seen.process_group is None
        assert seen.compression_stats_logging_frequency == 3
        assert (seen.matrix_approximation_rank, seen.start_powerSGD_iter, seen.min_compression_rate) == (3, 0, 1.5)
        assert seen.batch_tensors_with_same_shape
    assert [tensor.name for tensor in state.report().tensors] == ["weight", "bias"]


BUDGETS: list[tuple[dict[str, Any], str]] = [
    ({"compression": 3, "module": None}, "give PowerSGDState the model as module="),
    ({"matrix_approximation_rank": 4, "compression": 3}, "one of rank, compression and bytes_per_step; got rank=4"),
    # torch's default, but given.
    ({"matrix_approximation_rank": 1, "compression": 3}, "one of rank, compression and bytes_per_step; got rank=1"),
    ({"compression": 3, "bytes_per_step": 100}, "got compression=3, bytes_per_step=100"),
    ({"bytes_per_step": 10}, "at rank 1 this model sends"),
]


def test_budgets_are_explained() -> None:
    for fields, said in BUDGETS:
        assert said in complaint(PowerSGDState, None, **{"module": nn.Linear(WIDTH, WIDTH), **fields})
    assert PowerSGDState(None, module=nn.Linear(2, 2), compression=None).matrix_approximation_rank == 1
    config = PowerSGDConfig(compression=20)
    assert PowerSGDState(config, module=nn.Linear(WIDTH, WIDTH)).config == config
    assert "module=" in complaint(PowerSGDState, config)


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


def test_what_is_given_twice_is_refused() -> None:
    """Hyperparameters beside a configuration, also those that are equal to torch's defaults, or to its own."""
    for name, value in BESIDE.items():
        assert re.match(f"TypeError.*{name}", complaint(PowerSGDState, CONFIG, **{name: value})), name
        if name != "matrix_approximation_rank":
            said = complaint(PowerSGDState, None, CONFIG, **{name: value})
            assert re.match(f"TypeError.*PowerSGDConfig.*{name}", said), said
    twice = complaint(PowerSGDState, None, use_error_feedback=True, error_feedback=False)
    for said, pattern in (
        (complaint(PowerSGDState, CONFIG, 3), "TypeError.*names.*got 3"),
        (twice, "TypeError.*use_error_feedback and error_feedback"),
        (complaint(PowerSGDState, None, bakend="torch"), "ValueError.*bakend.*backend"),
    ):
        assert re.match(pattern, said), said


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
    for rank, rate in ((1, 2), (4, 1), (8, 1.5)):
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
    assert len(rates) == 3, "the cases do not differ in what they compress"


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
test_on_one_worker = make_test(CASES, 1)
test_on_two_workers = make_test(CASES, 2)
