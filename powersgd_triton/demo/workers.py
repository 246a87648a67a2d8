"""Processes that train together."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)

T = TypeVar("T")


def run_workers(task: Callable[..., T], workers: int, timeout: float) -> list[T]:
    """Call ``task(worker, store_path=…)`` in fresh processes.

    Args:
        task: can be pickled, and so can what it returns. ``store_path`` is for ``process_group``.
        workers: number of processes.
        timeout: seconds until all must be done.

    Returns:
        What the task returned, in the workers' order.

    Raises:
        TimeoutError: the workers were not done in time; they are ended.
        torch.multiprocessing.ProcessException: a worker failed.
    """
    # Read when a process loads torch: more threads than cores only get in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(  # type: ignore[attr-defined]
            _work, args=(task, folder), nprocs=workers, join=False, daemon=True
        )
        deadline = time.monotonic() + timeout
        while not context.join(timeout=5):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{workers} workers were not done after {timeout:g} s")
        return [pickle.loads(_result_file(folder, worker).read_bytes()) for worker in range(workers)]


def _work(worker: int, task: Callable[..., Any], folder: str) -> None:
    result = task(worker, store_path=str(Path(folder) / "store"))
    _result_file(folder, worker).write_bytes(pickle.dumps(result))


def _result_file(folder: str, worker: int) -> Path:
    return Path(folder) / f"result-{worker}"


@contextlib.contextmanager
def process_group(worker: int, workers: int, device: torch.device, store_path: str) -> Iterator[None]:
    """The default group of ``workers`` processes inside this block; on a CPU with one thread in each.

    Args:
        worker: number of this process.
        workers: number of all.
        device: this worker's.
        store_path: a file that does not exist yet, through which the workers find each other.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store_path, workers),  # type: ignore[attr-defined]
        rank=worker,
        world_size=workers,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        yield
    finally:
        # What refers to the group in a cycle must not outlive it.
        gc.collect()
        dist.destroy_process_group()
