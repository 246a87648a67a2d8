"""Two workers train, and one dies or says no more in the middle of a step: what the other one finds.

All of it but ``watch`` runs inside a worker.
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import faulthandler
import functools
import gc
import itertools
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor
from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.support.checks import SHAPES, everything, gradients
from tests.support.distributed import HUNG, Failure, environment, forkserver
from tests.support.exchanges import bytes_decide
from tests.support.small import MANY, ONE, RANK_2, WIDTH, stack
from tests.support.training import batch, digest, gradients_of, local_gradients, patched, relative, squared_error

TOGETHER, ALONE = 5, 4
"""Steps with the peer before the one in which it dies, and steps without it."""
DEATH, SILENCE = 200.0, 8.0
"""Seconds until the process group gives up, where the peer dies and where it says no more."""
SURVIVOR, PEER = 0, 1
Way = Callable[[], "Training"]


class Training(abc.ABC):
    """A way of training that can lose its peer, and then go on by itself."""

    @abc.abstractmethod
    def step(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        """Train; this worker's gradient and what became of it, flat. (Where it is interrupted: see ``given``.)"""

    @abc.abstractmethod
    def given(self) -> Tensor:
        """This worker's gradient of the last step, zero where the backward pass did not come."""

    @abc.abstractmethod
    def owed(self) -> Tensor:
        """This worker's error, laid out as the gradients are."""

    @abc.abstractmethod
    def save(self) -> dict[str, Any]:
        """A checkpoint. Collective."""

    @abc.abstractmethod
    def load(self, saved: dict[str, Any]) -> None: ...

    def leave(self) -> None:  # noqa: B027
        """Let go of what belongs to the process group."""

    def join(self) -> None:  # noqa: B027
        """Take up what belongs to the process group."""


class Replicated(Training):
    """DDP with a hook at rank 2."""

    def __init__(self, hook: Any = powerSGD_hook, cap: float = ONE, **settings: Any) -> None:
        self.model, self._hook, self._cap = stack(), hook, cap
        self.state = PowerSGDState(None, module=self.model, **{**RANK_2, **settings})
        self._own = local_gradients(self.model)
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}
        self._order = list(self._names.values())
        self._replica: DistributedDataParallel | None = None
        self.join()

    def leave(self) -> None:
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
        return self._flat(self._own)

    def owed(self) -> Tensor:
        errors = self.state.error()
        if self._hook is not batched_powerSGD_hook:
            return self._flat(errors)
        flat = self._flat({})
        for error in errors.values():
            flat[: error.numel()] = error.view(-1)
        return flat

    def save(self) -> dict[str, Any]:
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return {"model": model, "powersgd": self.state.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.state.load_state_dict(saved["powersgd"])


class Plain(Training):
    """A loop of one's own around ``Compressor``."""

    def __init__(self) -> None:
        self.compressor = Compressor(everything(), SHAPES)
        self._given = torch.zeros(())

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


# The interruption ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupted(worker: int, message: int, silent: bool) -> Iterator[None]:
    """The peer ends instead of taking part in an all-reduce, the ``message``-th from now on."""
    original, numbers = dist.all_reduce, itertools.count()

    def counting(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == message and worker == PEER:
            if silent:
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with patched(dist, "all_reduce", counting):
        yield


def interruption(attempt: Callable[[], Any], worker: int, message: int, silent: bool) -> dict[str, Any]:
    """Kind of the exception, None where there is none, its text, and the seconds until then."""
    found: dict[str, Any] = {"error": None}
    start = time.monotonic()
    try:
        with interrupted(worker, message, silent):
            attempt()
    except Exception as error:
        found.update(error=type(error).__name__, message=str(error))
    return {**found, "seconds": time.monotonic() - start}


def survive(
    worker: int, folder: str, way: Way, message: int, *, silent: bool = False, saving: bool = False
) -> dict[str, Any]:
    """Train with a peer until it is gone (in a step, or in ``save()``), then alone, in three manners.

    Returns:
        What ``interruption`` gives. left: shares of E's elements that are as before ("kept"), or that or E before + G
        ("either"). Then ``by_itself`` for "as it was" (the interrupted state goes on), "loaded" (after it loaded a
        checkpoint from before) and "new" (another object loaded it).
    """
    training = way()
    for step in range(TOGETHER):
        training.step(worker, step)
    saved = training.save()
    before = training.owed()
    attempt = training.save if saving else functools.partial(training.step, worker, TOGETHER)
    found = interruption(attempt, worker, message, silent)
    after = training.owed()
    G = torch.zeros_like(before) if saving else training.given()
    kept, carried = ((after - E).abs() <= 1e-6 * (before.abs().max() + G.abs().max()) for E in (before, before + G))
    found["left"] = {"kept": float(kept.double().mean()), "either": float((kept | carried).double().mean())}
    start = time.monotonic()
    # In this order: where the last owner of a broken gloo group is a DistributedDataParallel, with or without a hook,
    # its end often waits for ever for a thread of gloo's that waits for Python's lock (torch 2.13).
    training.leave()
    dist.destroy_process_group()
    found["seconds to leave"] = time.monotonic() - start
    start_group(folder, "alone", 0, 1, DEATH)
    training.join()
    found["as it was"] = by_itself(training)
    training.load(saved)
    training.leave()
    training.join()
    found["loaded"] = by_itself(training)
    new = way()
    new.load(saved)
    found["new"] = by_itself(new)
    return found


def by_itself(training: Training) -> dict[str, Any]:
    """Steps alone: whether all is finite, |Σ Ĝ + E − Σ G − E before| over the second sum, and the bits."""
    E = training.owed()
    pairs = [training.step(SURVIVOR, step) for step in range(TOGETHER, TOGETHER + ALONE)]
    expected = E + torch.stack([given for given, _ in pairs]).sum(0)
    got = training.owed() + torch.stack([got for _, got in pairs]).sum(0)
    return {
        "finite": bool(got.isfinite().all()),
        "conserved": relative(got, expected),
        "owed": float(training.owed().norm()),
        "digest": digest([*(got for _, got in pairs), training.owed()]),
    }


def start_group(folder: str, name: str, worker: int, world_size: int, seconds: float) -> None:
    bytes_decide()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}.store", rank=worker, world_size=world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )  # fmt: skip


def bare(worker: int, folder: str) -> dict[str, Any]:
    """The same with DDP alone, which shows no all-reduce to Python: the peer dies in the backward pass."""
    model = stack()
    replicas = [DistributedDataParallel(model, bucket_cap_mb=MANY)]

    def die(gradient: Tensor) -> None:
        if worker == PEER:
            os.kill(os.getpid(), signal.SIGKILL)

    def step(number: int) -> None:
        inputs, targets = batch(worker, number, width=WIDTH)
        squared_error(replicas[0](inputs), targets).backward()

    for number in range(TOGETHER):
        step(number)
    model[2].weight.register_hook(die)  # type: ignore[operator]
    found = interruption(lambda: step(TOGETHER), worker, 0, silent=False)
    replicas.clear()
    gc.collect()
    dist.destroy_process_group()
    return found


# From outside -------------------------------------------------------------------------------------------------------


def watch(
    case: Callable[[int, str], Any], *, silent: bool = False, seconds: float = HUNG, method: str = "forkserver"
) -> Any:
    """Call ``case(worker, folder)`` in two workers of one process group; what the survivor returned.

    Args:
        case: importable, or a ``functools.partial`` of something importable.
        silent: whether the peer is to say no more instead of dying.
        seconds: until the survivor must be done.
        method: "forkserver" for workers that are copies of one process which has imported everything, and that end
            without Python's shutdown; "spawn" for ordinary ones, which takes seconds longer.

    Raises:
        RuntimeError: it failed, or did not end normally; the message holds its traceback.
        TimeoutError: it was not done in time.
    """
    context: Any = forkserver() if method == "forkserver" else mp.get_context(method)
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_work, args=(case, worker, folder, silent, seconds), daemon=True)
            for worker in (SURVIVOR, PEER)
        ]
        try:
            with environment(OMP_NUM_THREADS="1"):
                for process in workers:
                    process.start()
            workers[SURVIVOR].join(seconds)
            if workers[SURVIVOR].exitcode is None:
                where = (Path(folder) / "where").read_text()
                raise TimeoutError(f"the survivor was not done after {seconds} s:\n{where}")
        finally:
            for process in workers:
                process.kill()
                process.join()
        path = Path(folder) / "found"
        found = pickle.loads(path.read_bytes()) if path.exists() else None
        if found is None or isinstance(found, Failure) or workers[SURVIVOR].exitcode != 0:
            raise RuntimeError(f"the survivor ended with exit code {workers[SURVIVOR].exitcode}:\n{found}")
        return found


def _work(case: Callable[[int, str], Any], worker: int, folder: str, silent: bool, seconds: float) -> None:
    if worker == SURVIVOR:
        faulthandler.dump_traceback_later(0.8 * seconds, file=(Path(folder) / "where").open("w"))
    torch.set_num_threads(1)
    try:
        start_group(folder, "both", worker, 2, SILENCE if silent else DEATH)
        found = case(worker, folder)
    except BaseException:
        found = Failure(traceback.format_exc())
    if worker == SURVIVOR:
        (Path(folder) / "found").write_bytes(pickle.dumps(found))
