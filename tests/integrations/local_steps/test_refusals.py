"""What local steps refuse, and exchanges that fail: all workers hear of it, nothing is lost, and all can go on."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from powersgd_triton import PowerSGDConfig
from powersgd_triton.core import schedule
from powersgd_triton.integrations.local_steps import LocalSteps, pending_exchange
from powersgd_triton.integrations.local_steps.exact import ExactAverages
from powersgd_triton.integrations.local_steps.local_tensors import LocalTensors
from powersgd_triton.integrations.local_steps.outer_state import OuterState
from powersgd_triton.integrations.local_steps.rounds import Rounds
from powersgd_triton.schemes.quantized import QuantizedAverage
from tests.support.distributed import make_test, named, on_workers
from tests.support.local_steps import LOST, TERNARY, InFSDP2, Net, Training, flat, mean, model, owed, same_bits, theta
from tests.support.training import at_call, complaint, without_memory

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
    (lambda first: {"outer": 3 if first else None}, "outer must be a function that returns an optimizer; got .* int"),
    (
        lambda first: {"outer": (lambda _: torch.optim.SGD(nn.Linear(2, 2).parameters())) if first else None},
        "optimizer of all parameters that it is given, and of no others",
    ),
    (lambda first: {"outer": lambda p: torch.optim.SGD(p[:3] if first else p, lr=1.0)}, "optimizer of all parameters"),
    (lambda first: {"manager": object() if first else None}, "manager= is for a plain module of this process alone"),
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


def refuses_later(worker: int, _world_size: int, delay: int) -> None:
    """What was equal at the start is compared before each exchange. Nothing has changed, and all can go on.

    With a delay, all hear of it one step later. Until then no worker waits for one that is late.
    """
    training = Training(worker, "ternary", EVERY, optimizer=torch.optim.Adam, share=True, delay=delay)
    training.train(EVERY + delay)
    for index in range(8):
        training.train(EVERY - 1 - delay)
        pattern, change = list(changes_of(training).items())[index]
        before = theta(training.sync), owed(training.sync)
        said = complaint(training.train, 1, change if worker == index % 2 else None)
        if delay:
            assert said == "nothing"
            said = complaint(training.train, 1)
        assert re.search(pattern, said), (pattern, said)
        assert (training.sync.since, training.sync.every) == (EVERY + delay, EVERY)
        assert all(map(torch.equal, before, (theta(training.sync), owed(training.sync))))
        training.sync._rounds.exchange()
        training.train(delay)
        training.check()
    training.finish()
    assert same_bits(flat(training.net))


def refuses_between_fragments(worker: int, _world_size: int) -> None:
    """Rounds would have different lengths, so that workers would start different fragments before they hear of it."""
    training = Training(worker, "rank", EVERY, delay=3)
    training.train(2 * EVERY - 1)
    differs = mock.patch.object(training.sync._rounds, "_every", 1)
    training.train(1, differs if worker == 0 else None)
    assert "every: 4 instead of 1" in complaint(training.train, 1)
    training.train(EVERY)
    training.finish()


def fails_alone(worker: int, _world_size: int) -> None:
    """One worker cannot begin an exchange with a delay, and the other one has: both hear of it in the next step."""
    training = Training(worker, every=EVERY, delay=1, group=dist.new_group())
    training.train(2 * EVERY - 1)
    before = theta(training.sync)
    lacks = mock.patch.object(OuterState, "begin", side_effect=MemoryError("injected"))
    assert ("injected" in complaint(training.train, 1, None if worker else lacks)) == (worker == 0)
    assert "worker 1 is in a step that waits for the others and worker 0 in an exchange" in complaint(training.train, 1)
    assert torch.equal(theta(training.sync), before)


def fails_when_it_counts(worker: int, _world_size: int) -> None:
    """One worker has an average, but not that of the buffers, for which the other one waits: both hear of it."""
    net = model(worker)
    net.register_buffer("average", torch.zeros(3))
    training = Training(worker, every=EVERY, delay=1, net=net, group=dist.new_group())
    training.train(2 * EVERY)
    net.get_buffer("average").add_(worker)
    lacks = mock.patch.object(ExactAverages, "mean", side_effect=MemoryError("injected"))
    said = complaint(training.train, 1, None if worker else lacks)
    if worker == 0:
        assert "injected" in said
        said = complaint(training.train, EVERY)
    assert "worker 1 is in a step that waits for the others and worker 0 in an exchange" in said, said


def takes_in_later(worker: int, _world_size: int) -> None:
    """A parameter is unfrozen, and taken in once while an exchange is under way. Its changes stay if that fails."""
    for delay in (1, 2):
        net = Net(0)
        training = Training(worker, "exact", EVERY, net=net, delay=delay)
        training.train(EVERY + delay)
        net.frozen.requires_grad_(True)
        training.unfreeze(net.frozen.parameters())
        with mock.patch.object(ExactAverages, "mean", side_effect=MemoryError("injected")):
            assert "injected" in complaint(training.sync.load_state_dict, {})
        training.train(EVERY - delay)
        assert "expected a saved state" in complaint(training.sync.load_state_dict, {"injected": 0})
        with mock.patch.object(training.sync.outer, "step", side_effect=ValueError("injected")):
            said = [complaint(training.train, 1) for _ in range(delay)]
        assert "injected" in said[-1], said
        training.train(1)
        training.finish()
        assert len(training.sync.outer.param_groups[0]["params"]) == len(training.sync.shared())


def goes_on_without_memory(worker: int, _world_size: int) -> None:
    """One worker has no memory to use what has arrived, or to leave θ. The next step tries again; nothing is lost."""
    cases: list[tuple[type, str, int, dict[str, Any]]] = [
        # The second of the fragments, of which each is added to θ; all means; the errors that stay in the parameters.
        (QuantizedAverage, "add_to", 1, {"delay": 3}),
        (LocalTensors, "memory", 2, {"outer": lambda p: torch.optim.SGD(p, lr=torch.tensor(1.0))}),
        (Rounds, "errors", 0, {"config": "rank", "keep": 1.0}),
    ]
    for owner, name, call, options in cases:
        training = Training(worker, every=EVERY, **options)
        training.train(EVERY - 1 + options.get("delay", 0))
        said = complaint(training.train, 1, None if worker else without_memory(owner, name, call))
        assert ("no memory" in said) == (worker == 0), (name, said)
        training.train(EVERY)
        training.finish()
    training = Training(worker, net=model(worker).bfloat16())
    training.train(1)
    own = training.flat()
    with contextlib.ExitStack() as left_last, training.sync.shared_parameters():
        # Numbers of 16 bits and their rounding errors: nothing of this may be computed when the block is left.
        left_last.enter_context(without_memory(OuterState, "write", 0))
    assert torch.equal(training.flat(), own)


def one_is_alone(worker: int, _world_size: int) -> None:
    """One worker saves while the other one's exchange is under way: both hear of it, and of what to do."""
    training = Training(worker, every=EVERY, delay=1, group=dist.new_group())
    training.train(2 * EVERY - 1)
    said = complaint(training.sync.state_dict if worker else functools.partial(training.train, 2))
    assert "worker 1 is in state_dict and worker 0 in an exchange that is under way: all workers must call it" in said
    assert "make a new group" in complaint(training.sync._engine.communicator.all_reduce, torch.ones(1))


LATER = {f"refuses_later-{delay}": functools.partial(refuses_later, delay=delay) for delay in (0, 1)}
ALONE = [fails_alone, fails_when_it_counts, one_is_alone]
CASES = [refuses, refuses_between_fragments, takes_in_later, goes_on_without_memory]
test_two_workers = make_test({**named(CASES + ALONE), **LATER}, 2)
test_three_workers = pytest.mark.slow(make_test([refuses], 3))


ROUND = 3


@contextlib.contextmanager
def failing(last: int, fragment: int) -> Iterator[list[str]]:
    """Let an exchange fail at a message, on this worker. What goes wrong in the block is in the list."""
    failures, fail = list[str](), mock.Mock(side_effect=RuntimeError("injected"))
    with (
        at_call(schedule, "wait", last - 1, fail, after=True),
        mock.patch.object(pending_exchange, "FRAGMENT", fragment),
    ):
        try:
            yield failures
        except RuntimeError as failure:
            failures.append(str(failure))
    assert failures in ([], ["injected"])


# The fragments' size goes by whether a message's number is odd.
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
@on_workers(4)
def test_two_levels_and_shards(worker: int, world_size: int, stride: int) -> None:
    """The errors of a node have the sum of its workers' pseudo-gradients."""
    mesh = init_device_mesh("cpu", (2, 2))
    training = Training(worker, "rank", ROUND, node_group=mesh)
    training.train(ROUND)
    assert training.sync._engine.communicator.inside is not None
    for last in itertools.count(1, stride):
        training.train(ROUND - 1)
        kept = owed(training.sync)
        # The smallest fragments have one tensor each. Those that were averaged and written already are taken back too.
        with failing(last, 50 if last % 2 else 200) as failures:
            training.train(1)
        training.check()
        if not failures:
            break
        assert training.sync.since >= ROUND
        # Rows of the errors may have moved to another worker of the node.
        assert float(mean(kept - owed(training.sync)).abs().max()) < LOST, last
        training.train(ROUND)
    assert last > 2, "no message has failed"
    training.finish()
    training = Training(worker, "ternary", ROUND, node_group=mesh)
    training.train(2 * ROUND)
    training.finish()
    # With a delay, a worker that refuses has rows of its node's sum, which has the changes of others.
    training = Training(worker, "rank", 2 * ROUND, node_group=mesh, delay=2)
    training.train(4 * ROUND - 1)
    kept = owed(training.sync)
    training.train(1, changes_of(training)["every must be at least 1; got 0"] if worker == 0 else None)
    assert "got 0" in complaint(training.train, 2)
    assert float(mean(kept - owed(training.sync)).abs().max()) < LOST
    training.finish()
    # The exchange of one FSDP2 shard fails. The other shard hears of it, and both send their changes again.
    for config in ("ternary", "rank"):
        training = InFSDP2(worker, config, 1)
        for step in range(4):
            with failing(step if worker % 2 == 0 else 0, 50) as failures:
                training.train(1)
            assert bool(failures) == (step > 0 and worker % 2 == 0)
            assert training.sync.since == step
            training.check()
        training.finish()
        assert theta(training.sync).isfinite().all()
    # With a delay, the second of several fragments fails on all workers.
    training = InFSDP2(worker, "ternary", 6, delay=5)
    training.train(6)
    with failing(3, 50) as failures:
        training.train(5)
    assert failures
    training.train(7)
    training.finish()
