"""What happens to local steps between others, for the table of faults and for random runs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from powersgd_triton.comm.control import DisagreementError
from powersgd_triton.core import schedule
from powersgd_triton.core.buckets import Buckets
from powersgd_triton.core.engine import Engine
from powersgd_triton.integrations.local_steps.exact import ExactAverages
from tests.support.checks import put
from tests.support.faults.local import Local
from tests.support.faults.trainer import InjectedError
from tests.support.local_steps import CONFIGS, mean
from tests.support.training import at_call

NOT_HERE = torch.ones(2, device="meta")
JUNK: list[Any] = [None, "x", [], {}, float("nan"), torch.tensor(torch.nan), torch.ones(3, 1, 2), NOT_HERE]
"""In place of a field of a saved state."""


def takes_steps(local: Local, _folder: Path) -> None:
    for _ in range(local.dice.randrange(1, 6)):
        local.step()


def freezes(local: Local, folder: Path) -> None:
    parameter = local.net[local.dice.choice(("w", "b", "z"))].requires_grad_(False)
    parameter.grad = None
    takes_steps(local, folder)
    parameter.requires_grad_(True)


def unfreezes(local: Local, folder: Path) -> None:
    local.net["c"].requires_grad_(True)
    takes_steps(local, folder)


def averages_buffers(local: Local, _folder: Path) -> None:
    """Exactly, without the workers that have a NaN there, and in new sizes."""
    local.act(local.state.finish)
    size = local.dice.randrange(1, 9)
    values = torch.tensor([[local.dice.gauss(0, 1) for _ in range(size)] for _ in range(local.workers)])
    first = int(local.workers > 1 and local.dice.random() < 0.3)
    values[:first, 0] = torch.nan
    average, count = values[local.worker].clone(), local.net.get_buffer("count")
    local.net.register_buffer("average", average)
    count.fill_(2 * local.worker)
    local.step()
    local.act(local.state.finish)
    if not torch.allclose(average, values[first:].mean(0)) or int(count) != first + local.workers - 1:
        local.lost.append(f"buffers are {average} and {count}, and were {values}")


def is_not_finite(local: Local, _folder: Path) -> None:
    victim, value = local.dice.randrange(local.workers), local.dice.choice((torch.inf, torch.nan))
    if local.worker == victim:
        local.net["w"].data[0, 0] = value
    local.step()
    local.act(local.state.finish)


POINTS = [(schedule, "wait", 12), (Buckets, "find", 4), (Engine, "end_step", 1), (ExactAverages, "average", 1)]
"""What fails in an exchange, and how many calls it has: messages, fragments, the end, and what comes after it."""


def fails(local: Local, folder: Path) -> None:
    owner, name, most = local.dice.choice(POINTS)
    fail = mock.Mock(side_effect=InjectedError)
    with at_call(owner, name, local.dice.randrange(most), fail, after=True):
        for _ in range(local.state.every + local.delay):
            theta, sent = local.seen()[1], local.sent.clone()
            try:
                local.step()
            except InjectedError:
                if not torch.equal(theta, local.seen()[1]) and torch.equal(sent, local.sent):
                    local.lost.append("an exchange that has failed has changed θ")
    takes_steps(local, folder)


def finishes_unevenly(local: Local, _folder: Path) -> None:
    # So that optimizers have states on all workers.
    local.step()
    local.act(local.state.finish)
    # Between two exchanges, or while one is under way.
    every = local.state.every
    first, more = local.dice.choice(((0, every), (every, local.delay + 1)))
    numbers = [first + local.dice.randrange(more) for _ in range(local.workers)]
    for _ in range(numbers[local.worker]):
        local.step()
    local.act(local.state.finish)
    theta = {name: shared.to(local.net[name].dtype.to_real()) for name, shared in local.state.shared().items()}
    if not torch.equal(local.local(), local.flat({**local.net, **theta})):
        local.lost.append("the parameters are not θ after the last exchange")


def resumes(local: Local, folder: Path) -> None:
    """From its own state or file, in place or anew, with the same bits; or from the mean, perhaps in other codes."""
    kind = local.dice.choice(("in place", "anew", "file", "mean", "other"))
    config = local.dice.choice(list(CONFIGS)) if kind == "other" else local.config
    found = [local.act(local.state.state_dict)]
    local.drop()
    if kind == "file":
        local.state.save(folder)
    if kind == "mean":
        dist.broadcast_object_list(found, 0)
        local.unsent = mean(local.unsent)
    before, number = local.seen(), (local.state.steps, local.state.since)
    if kind != "in place":
        local.renew(config)
    local.state.load(folder) if kind == "file" else local.state.load_state_dict(found[0])
    dist.barrier()
    if kind not in ("mean", "other") and (local.differs(before) or number != (local.state.steps, local.state.since)):
        local.lost.append(f"a state that was loaded {kind} differs")


def _fields(value: Any, at: str = "") -> Iterator[str]:
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for key, part in items:
        yield f"{at}{key}"
        yield from _fields(part, f"{at}{key}/")


def refuses(local: Local, _folder: Path) -> None:
    """A field of a state is junk, on one worker or on all. What is not refused was not needed."""
    state = local.act(local.state.state_dict)
    local.drop()
    bad = put(state, local.dice.choice([*_fields(state)]), local.dice.choice(JUNK))
    victims, before = local.dice.choice(([local.dice.randrange(local.workers)], range(local.workers))), local.seen()
    try:
        local.state.load_state_dict(bad if local.worker in victims else state)
    except (ValueError, DisagreementError):
        if local.differs(before):
            local.lost.append("a refused state has changed something")
    dist.barrier()
    local.state.load_state_dict(state)
    if local.differs(before):
        local.lost.append("a state that was loaded twice differs")


def forgets(local: Local, _folder: Path) -> None:
    local.act(local.state.forget)
    local.rebase()
    if local.unsent.any() or local.seen()[2].any() or local.state.outer.state or local.state.since:
        local.lost.append("something is not forgotten")


EVENTS = [
    unfreezes,
    takes_steps,
    freezes,
    averages_buffers,
    is_not_finite,
    fails,
    finishes_unevenly,
    resumes,
    refuses,
    forgets,
]
