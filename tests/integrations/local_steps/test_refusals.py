"""What local steps refuse, at the beginning and before an exchange: all workers hear of it, and can go on."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.distributed import make_test
from tests.support.local_steps import NESTEROV, TERNARY, Training, batch, flat, model, owed, same_bits, theta
from tests.support.training import complaint

EVERY = 4

REFUSED: list[tuple[Callable[[bool], dict[str, Any]], str]] = [
    (lambda first: {"every": 5 if first else 4}, "DisagreementError.*every: (5 instead of 4|4 instead of 5)"),
    (lambda _: {"delay": 4}, "ValueError.*delay must be below every=4"),
    (lambda first: {"keep": 1.5 if first else 1.0}, "keep is a share of the error above 0, at most 1; got 1.5"),
    (lambda first: {"keep": 0.5 if first else 1.0}, "DisagreementError.*keep: (0.5 instead of 1.0|1.0 instead of 0.5)"),
    (
        lambda _: {"keep": 1, "config": PowerSGDConfig(quantize="int8", error_feedback=False)},
        "keep=1 needs errors of each worker: give error_feedback=True",
    ),
    (lambda first: {"outer": (lambda _: 3) if first else None}, "must return a torch.optim.Optimizer; got int"),
    (
        lambda first: {"config": PowerSGDConfig(quantize="int4") if first else TERNARY},
        "DisagreementError.*config.quantize",
    ),
    (lambda _: {"config": PowerSGDConfig(compression="auto")}, "ValueError.*compression='auto' compares a step"),
    (lambda _: {"config": PowerSGDConfig(compression=20, max_overhead=0.1)}, "max_overhead is a share of a step"),
    (lambda first: {"model": nn.Linear(2, 3 if first else 4)}, "DisagreementError.*shape of 'bias'"),
    (lambda _: {"model": nn.ReLU()}, "ValueError.*no parameters that require gradients"),
    (
        lambda first: {"outer": functools.partial(torch.optim.Adam, betas=(0.5 * first, 0.9))},
        "'betas' of outer group 0",
    ),
    (
        lambda first: {"outer": functools.partial(torch.optim.Adam, lr=torch.tensor(0.1 * first))},
        "'lr' of outer group 0",
    ),
    (lambda _: {"outer": torch.optim.LBFGS}, "TypeError.*needs no closure; got LBFGS"),
    (
        lambda first: {"model": nn.Sequential(model(), nn.BatchNorm1d(2 + first, affine=False))},
        "buffer '1.running_mean'",
    ),
    (lambda first: {"model": nn.Linear(2, 3, device="meta" if first else None)}, "ValueError.*tensors on the meta"),
]
"""Arguments of the first worker (True) and of others, and what all hear."""


def refuses(worker: int, _world_size: int) -> None:
    for arguments, pattern in REFUSED:
        said = complaint(LocalSteps, **{"model": model(), "config": TERNARY, "every": 4, **arguments(worker == 0)})
        assert re.search(pattern, said, re.DOTALL), (pattern, said)
    # All can go on.
    Training(worker).train(3)


def changes_of(training: Training) -> dict[str, Any]:
    """{what all hear when one worker changes something before an exchange: a block in which it is changed}."""
    net: Any = training.net
    group, state = training.sync.outer.param_groups[0], training.optimizer.state
    every = functools.partial(mock.patch.object, training.sync._rounds, "_every")
    return {
        "'lr' of outer group 0: ": mock.patch.dict(group, lr=0.25),
        "every must be at least 1; got 0": every(lambda _: 0),
        "every: ": every(EVERY + 1),
        "KeyError: 'a mistake'": every(mock.Mock(side_effect=KeyError("a mistake"))),
        "buffer 'cache'": mock.patch.dict(net._buffers, cache=torch.ones(9)),
        "'0.bias' is exchanged as .*; got None": mock.patch.dict(net[0]._parameters, bias=None),
        "'exp_avg' of parameter 0: ": mock.patch.dict(state, clear=True),
        "unfrozen 'more'": mock.patch.dict(net._parameters, more=nn.Parameter(torch.ones(3))),
    }


def refuses_later(worker: int, _world_size: int) -> None:
    """What was equal at the start is compared before each exchange. Nothing has changed, and all can go on."""
    training = Training(worker, "ternary", EVERY, optimizer=torch.optim.Adam, outer=NESTEROV, share=True)
    for index in range(8):
        training.train(EVERY - 1)
        training.advance(*batch(worker, index))
        pattern, change = list(changes_of(training).items())[index]
        before = theta(training.sync), owed(training.sync)
        with change if worker == index % 2 else contextlib.nullcontext():
            said = complaint(training.sync.step)
        assert re.search(pattern, said), (pattern, said)
        assert training.sync.since == EVERY
        assert all(map(torch.equal, before, (theta(training.sync), owed(training.sync))))
        training.sync._rounds.exchange()
    assert same_bits(flat(training.net))


test_two_workers = make_test([refuses, refuses_later], 2)
test_three_workers = pytest.mark.slow(make_test([refuses], 3))
