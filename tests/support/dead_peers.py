"""Two workers train, and one dies or says no more in the middle of a step. All of it runs inside a worker."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor
from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.support.checks import SHAPES, everything, gradients
from tests.support.small import ONE, RANK_2, WIDTH, stack
from tests.support.training import batch, gradients_of, local_gradients, patched, squared_error

TOGETHER, ALONE = 5, 4
"""Steps with the peer before the one in which it dies, and steps without it."""
DEATH, SILENCE = 200.0, 8.0
"""Seconds until the process group gives up, where the peer dies and where it says no more."""
SLACK = 200.0
"""Seconds that a busy machine may take beyond the process group's timeout. Only what hangs takes longer."""
SURVIVOR, PEER = 0, 1


class Replicated:
    """DDP with a hook at rank 2, which can lose its peer and then go on by itself."""

    def __init__(self, hook: Any = powerSGD_hook, cap: float = ONE, **settings: Any) -> None:
        self.model, self._hook, self._cap = stack(), hook, cap
        self.state = PowerSGDState(None, module=self.model, **{**RANK_2, **settings})
        self._own = local_gradients(self.model)
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}
        self._order = list(self._names.values())
        self._replica: DistributedDataParallel | None = None
        self.join()

    def leave(self) -> None:
        """Let go of what belongs to the process group, which ``join`` takes up."""
        # What it has hung onto the parameters goes with it.
        self._replica = None
        gc.collect()

    def join(self) -> None:
        self._replica = DistributedDataParallel(self.model, bucket_cap_mb=self._cap)

        def hook(state, bucket):
            if self._hook is batched_powerSGD_hook:
                self._order = [self._names[parameter] for parameter in bucket.parameters()]
            return self._hook(state, bucket)

        self._replica.register_comm_hook(self.state, hook)

    def step(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        """Train; this worker's gradient and what became of it, flat. (Where it is interrupted: see ``given``.)"""
        assert self._replica is not None
        self._own.clear()
        self.model.zero_grad()
        inputs, targets = batch(worker, step, width=WIDTH)
        squared_error(self._replica(inputs), targets).backward()
        got = gradients_of(self.model)
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.05)
        return self.given(), self._flat(got)

    def _flat(self, tensors: dict[str, Tensor]) -> Tensor:
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        return torch.cat([tensors.get(n, torch.zeros(shapes[n])).reshape(-1) for n in self._order]).double()

    def given(self) -> Tensor:
        """This worker's gradient of the last step, zero where the backward pass did not come."""
        return self._flat(self._own)

    def owed(self) -> Tensor:
        """This worker's error, laid out as the gradients are."""
        errors = self.state.error()
        if self._hook is not batched_powerSGD_hook:
            return self._flat(errors)
        flat = self._flat({})
        for error in errors.values():
            flat[: error.numel()] = error.view(-1)
        return flat

    def save(self) -> dict[str, Any]:
        """A checkpoint. Collective."""
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return {"model": model, "powersgd": self.state.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.state.load_state_dict(saved["powersgd"])


class Plain:
    """The same with a loop of one's own around ``Compressor``."""

    def __init__(self) -> None:
        self.compressor = Compressor(everything(), SHAPES)
        self._given = torch.zeros(())

    def leave(self) -> None:
        pass

    join = leave

    def step(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        given = gradients(100 * step + worker)
        self._given = self._flat(given)
        got = self.compressor.decompress(self.compressor.compress(given))
        assert isinstance(got, dict)
        return self._given, self._flat(got)

    def _flat(self, tensors: dict[str, Tensor]) -> Tensor:
        return torch.cat([tensors.get(name, torch.zeros(shape)).reshape(-1) for name, shape in SHAPES.items()]).double()

    def given(self) -> Tensor:
        return self._given

    def owed(self) -> Tensor:
        return self._flat(self.compressor.error())

    def save(self) -> dict[str, Any]:
        return self.compressor.state_dict()

    def load(self, saved: dict[str, Any]) -> None:
        self.compressor.load_state_dict(saved)


Training = Replicated | Plain
Way = Callable[[], Training]


# The interruption ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupted(worker: int, message: int, done: Path, silent: bool) -> Iterator[None]:
    """The peer ends instead of taking part in an all-reduce, the ``message``-th from now on.

    If it is silent, it waits until the survivor is ``done``.
    """
    original, numbers = dist.all_reduce, itertools.count()

    def counting(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == message and worker == PEER:
            deadline = time.monotonic() + SILENCE + SLACK
            while silent and not done.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with patched(dist, "all_reduce", counting):
        yield


def interrupt(attempt: Callable[[], Any], worker: int, message: int, folder: Path, silent: bool) -> None:
    """Make an attempt, in which the peer is lost. The survivor is told.

    It is told as soon as the system knows of a death, and when the timeout is over else.
    """
    start = time.monotonic()
    with pytest.raises(RuntimeError), interrupted(worker, message, folder / "done", silent):
        attempt()
    seconds = time.monotonic() - start
    if silent:
        assert 0.9 * SILENCE <= seconds <= SILENCE + SLACK
    else:
        assert seconds <= DEATH


def start_group(folder: Path, name: str, worker: int, world_size: int, seconds: float) -> None:
    """Make a default group in place of the one that there is."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}.store", rank=worker, world_size=world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )  # fmt: skip


@contextlib.contextmanager
def two_workers(folder: Path, worker: int, silent: bool = False) -> Iterator[None]:
    """A group that gives up in time. At the end the peer need not be silent any longer."""
    start_group(folder, "both", worker, 2, SILENCE if silent else DEATH)
    try:
        yield
    finally:
        (folder / "done").touch()
