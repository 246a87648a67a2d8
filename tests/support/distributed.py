"""Run functions on several gloo workers and collect what each returns."""

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import inspect
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.exchanges import bytes_decide

Worker = Callable[..., Any]
Cases = Mapping[str, Worker]
# A machine may be busy with other work for a long time. These limits only end what hangs.
HUNG = 1500.0
"""Seconds after which what is not done counts as hung. Less than pytest's own limit in the Makefile."""
PROCESS_GROUP_TIMEOUT = datetime.timedelta(seconds=300)


class Failure(str):
    """Traceback of a case that failed on a worker."""


NOT_RUN = Failure("not run, since a case before it failed")


def run(
    fn: Worker, world_size: int, *args: Any, timeout: float = HUNG, casualties: Collection[int] = ()
) -> list[Any]:  # fmt: skip
    """Call ``fn(worker, world_size, *args)`` in ``world_size`` processes; the results in the workers' order.

    A worker's failure is a RuntimeError with its traceback; of ``casualties``, which are meant to die, the result is
    None. All must be done after ``timeout`` seconds.
    """
    name = fn.__name__
    return outcome(run_cases({name: fn}, world_size, *args, timeout=timeout, casualties=casualties), name)


def run_cases(
    cases: Cases, world_size: int, *args: Any, timeout: float = HUNG, casualties: Collection[int] = ()
) -> dict[str, list[Any]]:
    """Call cases one after the other in the same processes, until one fails: {name: results}.

    They share a group: torch remembers the groups of a mesh, also when the processes have left them.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = forkserver()
        processes = [
            context.Process(target=_work, args=(worker, world_size, cases, folder, args, casualties), daemon=True)
            for worker in range(world_size)
        ]
        try:
            with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
                for process in processes:
                    process.start()
            deadline = time.monotonic() + timeout
            for worker, process in enumerate(processes):
                process.join(max(0.0, deadline - time.monotonic()))
                if process.exitcode is None:
                    where = _stacks(folder, processes)
                    raise TimeoutError(
                        f"{world_size} workers were not done after {timeout} s; worker {worker} is not{where}"
                    )
                if process.exitcode != 0 and worker not in casualties:
                    raise RuntimeError(f"worker {worker} of {world_size} ended with exit code {process.exitcode}")
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        paths = [Path(folder, f"results.{worker}") for worker in range(world_size)]
        found = [pickle.loads(path.read_bytes()) if path.exists() else dict.fromkeys(cases) for path in paths]
        return {name: [results.get(name, NOT_RUN) for results in found] for name in cases}


def _stacks(folder: str, processes: Sequence[Any]) -> str:
    """Where the processes are that have not ended."""
    alive = [worker for worker, process in enumerate(processes) if process.is_alive()]
    for worker in alive:
        os.kill(processes[worker].pid, signal.SIGUSR1)
    time.sleep(1)
    return "".join(f"\nworker {worker} is here:\n{_stack(folder, worker).read_text()}" for worker in alive)


def _stack(folder: str, worker: int) -> Path:
    path = Path(folder) / f"stack.{worker}"
    path.touch()
    return path


def outcome(results: Mapping[str, list[Any]], name: str) -> list[Any]:
    """Results of one case. If it failed on a worker, a RuntimeError holds the tracebacks."""
    failures = [(worker, result) for worker, result in enumerate(results[name]) if isinstance(result, Failure)]
    if failures:
        # All of them, since a worker that fails makes the others' collectives fail.
        raise RuntimeError("\n".join(f"{name} failed on worker {worker}:\n{text}" for worker, text in failures))
    return results[name]


def named(cases: Cases | Sequence[Worker]) -> Cases:
    return cases if isinstance(cases, Mapping) else {case.__name__: case for case in cases}


def make_test(cases: Cases | Sequence[Worker], world_size: int) -> Callable[..., None]:
    """A test of each case. Those that are selected run in the same processes, when the first one is asked for."""
    bodies = named(cases)

    @functools.cache
    def results(*chosen: str) -> dict[str, list[Any]]:
        return run_cases({name: bodies[name] for name in chosen}, world_size)

    @pytest.mark.parametrize("name", bodies)
    def test(name: str, request: pytest.FixtureRequest) -> None:
        """See the cases' docstrings."""
        items: list[Any] = [item for item in request.session.items if getattr(item, "function", None) is test]
        outcome(results(*(item.callspec.params["name"] for item in items)), name)

    return test


def on_workers(*world_sizes: Any, **options: Any) -> Callable[[Worker], Worker]:
    """Make a test of a function that all workers run, ``test(worker, world_size, …)``. Further arguments are pytest's.

    There is a test for each number of processes. Options are those of ``run``.
    """

    def decorate(body: Worker) -> Worker:
        signature = inspect.signature(body)
        _, size, *others = signature.parameters.values()

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            world_size = arguments.pop(size.name)
            run(_run_test, world_size, body.__module__, body.__name__, arguments, **options)

        test.__signature__ = signature.replace(parameters=[size, *others])  # type: ignore[attr-defined]
        marked: Worker = pytest.mark.parametrize(size.name, world_sizes)(test)
        return marked

    return decorate


def _run_test(worker: int, world_size: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    """Run the body of a test of ``on_workers``, found by the test's name."""
    getattr(importlib.import_module(module), name).__wrapped__(worker, world_size, **arguments)


def _work(
    worker: int,
    world_size: int,
    cases: Cases,
    folder: str,
    args: tuple[Any, ...],
    casualties: Collection[int],
) -> None:
    torch.set_num_threads(1)
    bytes_decide()
    faulthandler.register(signal.SIGUSR1, _stack(folder, worker).open("w"))
    # What is imported stays; looking through it in each collection takes longer than many a case.
    gc.freeze()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=worker,
        world_size=world_size,
        timeout=PROCESS_GROUP_TIMEOUT,
    )
    results: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            results[name] = case(worker, world_size, *args)
        # Those of DCP and of pytest.raises are not derived from Exception.
        except BaseException:
            results[name] = Failure(traceback.format_exc())
            # Whoever failed leaves at once: then the others' collectives fail instead of waiting for it.
            break
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        # What refers to a group in a cycle must not outlive it.
        gc.collect()
    Path(folder, f"results.{worker}").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()
    if worker in casualties:
        sys.exit("this worker was meant to die")
    # Gloo's threads now and then abort Python's shutdown, with plain DDP too. All results are written.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def forkserver() -> Any:
    """Makes processes as copies of one that has imported what workers need: milliseconds in place of seconds."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


def regroup(store: Path, rank: int, world_size: int, seconds: float) -> None:
    """Make a default group in place of the one that there is, which may be broken."""
    with contextlib.suppress(RuntimeError, AssertionError):
        dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)


def vanish(done: Path | None = None, seconds: float = 0.0) -> None:
    """End this process as if its power had failed. With ``done``, first say no more until that file is there."""
    deadline = time.monotonic() + seconds
    while done is not None and not done.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def folder(worker: int) -> Iterator[str]:
    """An empty one, the same on all workers."""
    with tempfile.TemporaryDirectory() if worker == 0 else contextlib.nullcontext("") as own:
        name = [own]
        dist.broadcast_object_list(name, 0)
        yield name[0]
        dist.barrier()
