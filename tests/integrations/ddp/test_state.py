"""PowerSGDState has torch's interface, statistics and messages."""

import copy
import gc
import inspect
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations import ddp
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.distributed import make_test
from tests.support.training import (
    LIMIT,
    ONE,
    RANK_2,
    WIDTH,
    Messages,
    complaint,
    hooked,
    linear_stack,
    logged,
    relative,
    training,
)


def test_torchs_interface() -> None:
    """Arguments, attributes and what is logged about them. ``iter`` alone can be assigned."""
    theirs, ours = (list(inspect.signature(s).parameters.values()) for s in (torchs.PowerSGDState, PowerSGDState))
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert {p.kind for p in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    hooks = [inspect.signature(hook).parameters for hook in (powerSGD_hook, torchs.powerSGD_hook)]
    # What FSDP1 gives in addition is taken, to be refused.
    assert [*hooks[0]] == [*hooks[1], "others"]
    assert hooks[0]["others"].kind is inspect.Parameter.VAR_POSITIONAL
    arguments: dict[str, Any] = {
        "matrix_approximation_rank": 3,
        "start_powerSGD_iter": 7,
        "min_compression_rate": 1.5,
        "use_error_feedback": False,
        "warm_start": False,
        "orthogonalization_epsilon": 1e-8,
        "random_seed": 4,
        "compression_stats_logging_frequency": 0,
        "batch_tensors_with_same_shape": True,
    }
    memory = {"rng", "error_dict", "p_memory_dict", "q_memory_dict"}
    for given in ({}, arguments):
        states, said = [], []
        for module in (ddp, torchs):
            with logged(torchs.__name__) as messages:
                states.append(module.PowerSGDState(None, **given))
            said.append(messages)
        for name in set(torchs.PowerSGDState.__slots__) - memory:
            assert getattr(states[0], name) == getattr(states[1], name), name
        assert states[0].compression_stats() == states[1].compression_stats()
        assert said[0] == said[1]
        assert len(said[0]) == 1
    state = PowerSGDState(None)
    with pytest.raises(AttributeError):
        state.matrix_approximation_rank = 2
    for value in (-5, 2.0, "3", True):
        assert re.match(r"(Value|Type)Error: .*iter must be", complaint(setattr, state, "iter", value)), value
    assert (state.matrix_approximation_rank, state.iter) == (1, 0)
    state.iter = 5
    assert state.iter == 5


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


TORCHS = inspect.signature(torchs.PowerSGDState).parameters.values()
NO_HYPERPARAMETERS = ("process_group", "compression_stats_logging_frequency")
BESIDE: dict[str, Any] = {p.name: p.default for p in TORCHS if p.name not in NO_HYPERPARAMETERS}
BESIDE |= {"wire_dtype": None, "bakend": "torch"}
MODEL: dict[str, Any] = {"module": nn.Linear(WIDTH, WIDTH)}
GROUPS = (4, "gloo", CONFIG)
NO_GROUP = "TypeError: a group must be a torch.distributed.ProcessGroup or None; got "
TWICE = "one of rank, compression and bytes_per_step; got "
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((None,), {"compression": 3}, "give PowerSGDState the model as module="),
    ((PowerSGDConfig(compression=20),), {}, "module="),
    ((None,), {**MODEL, "matrix_approximation_rank": 4, "compression": 3}, f"{TWICE}rank=4"),
    # torch's default, but given.
    ((None,), {**MODEL, "matrix_approximation_rank": 1, "compression": 3}, f"{TWICE}rank=1"),
    ((None,), {**MODEL, "compression": 3, "bytes_per_step": 100}, "got compression=3, bytes_per_step=100"),
    ((None,), {**MODEL, "bytes_per_step": 10}, "at rank 1 this model sends"),
    # Hyperparameters beside a configuration, also those that are equal to torch's defaults, or to its own.
    *(((CONFIG,), {name: value}, f"TypeError.*{name}") for name, value in BESIDE.items()),
    *(((None, CONFIG), {name: BESIDE[name]}, f"TypeError.*PowerSGDConfig.*{name}") for name in list(BESIDE)[1:]),
    ((CONFIG, 3), {}, "TypeError.*names.*got 3"),
    ((None,), {"use_error_feedback": True, "error_feedback": False}, "TypeError.*use_error_feedback and error_feedb"),
    ((None,), {"bakend": "torch"}, "ValueError.*bakend.*backend"),
    *(((), {"process_group": group}, NO_GROUP + type(group).__name__) for group in GROUPS),
    ((CONFIG,), {"module": "net"}, "TypeError: module must be a torch.nn.Module; got str"),
    ((nn.Linear(2, 2), CONFIG), {}, "TypeError: process_group must.*got a Linear: give it as module="),
]


def test_what_is_wrong_or_given_twice_is_refused() -> None:
    for args, fields, pattern in REFUSED:
        assert re.search(pattern, complaint(PowerSGDState, *args, **fields)), (args, fields)
    state = PowerSGDState(None, **MODEL, compression=None)
    assert state.matrix_approximation_rank == 1
    assert complaint(setattr, state, "process_group", "gloo").startswith(NO_GROUP)
    assert state.process_group is None


def varied() -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Unflatten(1, (12, 8)), nn.Conv1d(12, 10, 3), nn.Flatten()
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), *convolution, nn.Linear(60, 5), nn.Linear(5, WIDTH))


def masked(messages: Messages) -> Messages:
    """Without the length of the error: torch's covers the whole bucket, ours what is compressed."""
    return [(level, re.sub(r"^(A zero tensor of length) \d+ ", r"\1 … ", text)) for level, text in messages]


def as_torchs(worker: int, world_size: int) -> None:
    """Statistics, steps and messages are those of torch's hook, in one bucket, since torch's may hang with several."""
    states, said = [], []
    for module in (ddp, torchs):
        states.append(module.PowerSGDState(None, 4, 2, min_compression_rate=1, compression_stats_logging_frequency=2))
        with logged(torchs.__name__) as messages:
            training(varied(), worker, states[-1], range(7), cap=ONE, hook=module.powerSGD_hook)
        said.append(masked(messages))
    ours, theirs = states
    assert ours.compression_stats() == theirs.compression_stats()
    assert ours.iter == theirs.iter == 7
    assert said[0] == said[1]
    assert [text.split(":")[0] for _, text in said[0] if text.startswith(("Start", "Compression"))] == [
        "Start to apply PowerSGD after 2 iterations.",
        *["Compression stats"] * 3,
    ]
    for beginning in ("A zero tensor of length … ", "Allocating contiguous memory of length "):
        assert sum(text.startswith(beginning) for _, text in said[0]) == 1


def starts(worker: int, world_size: int) -> None:
    """The start is logged once, with several buckets. The batched hook's messages are those of torch's, which fails."""
    for start in (0, 3):
        with logged(torchs.__name__) as messages:
            training(linear_stack(), worker, PowerSGDState(None, **{**RANK_2, "start_powerSGD_iter": start}), range(5))
        found = [text for _, text in messages if text.startswith("Start to apply")]
        assert found == [f"Start to apply PowerSGD after {start} iterations."]
    said = []
    for module in (ddp, torchs):
        state = module.PowerSGDState(None, 2, start_powerSGD_iter=2, compression_stats_logging_frequency=2)
        with logged(torchs.__name__) as messages:
            complaint(training, varied(), worker, state, range(5), cap=ONE, hook=module.batched_powerSGD_hook)
        said.append(sorted(m for m in masked(messages) if not m[1].startswith("Compression stats")))
    assert said[0] == said[1]
    assert any(text.startswith("Initializing low-rank tensors P and Q") for _, text in said[0])


def is_freed(worker: int, world_size: int) -> None:
    """A wrapper that is given up after a backward pass was interrupted, and its state. A new one trains on."""
    model, inputs = linear_stack(), torch.randn(4, WIDTH)
    for _ in range(2):
        replica = DistributedDataParallel(model, find_unused_parameters=True)
        state = PowerSGDState(PowerSGDConfig(rank=1), module=replica)
        replica.register_comm_hook(state, ddp.powerSGD_hook)
        replica(inputs).sum().backward()
        handle = next(model.parameters()).register_hook(lambda _: 1 / 0)
        said = complaint(lambda replica=replica: replica(inputs).sum().backward())
        assert said.startswith("ZeroDivisionError"), said
        handle.remove()
        freed = weakref.ref(state), weakref.ref(replica)
        del state, replica
        gc.collect()
        assert [weak() for weak in freed] == [None, None]


def keeps_all_or_nothing(worker: int, world_size: int) -> None:
    """Of gradients whose first step is interrupted. DDP begins with a bucket for each dtype, of which one is done."""
    model: Any = nn.ModuleList([nn.Linear(128, 128, bias=False).double(), nn.Linear(128, 128, bias=False)])
    model.forward = lambda x: model[1](model[0](x).float()).square().sum()
    inputs = torch.randn(8, 128, dtype=torch.double)
    model(inputs).backward()
    given = {name: p.grad.clone() for name, p in model.named_parameters()}
    state = PowerSGDState(PowerSGDConfig(rank=4), module=model)
    replica = hooked(model, state)
    model.zero_grad()
    model[0].weight.register_hook(lambda _: 1 / 0)
    assert "ZeroDivisionError" in complaint(lambda: replica(inputs).backward())
    for name, error in state.error().items():
        assert not error.any() or relative(error, given[name]) <= LIMIT, name


test_on_two_workers = make_test([as_torchs, starts, is_freed, keeps_all_or_nothing], 2)
