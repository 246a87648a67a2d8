"""Start processes that train together."""

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

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=300)

T = TypeVar("T")


def run_workers(task: Callable[..., T], workers: int, timeout: float) -> list[T]:
    """Call ``task(worker, store_path=…)`` in new processes.

    Args:
        task: Function that can be pickled, as its result must be. ``store_path`` is for ``process_group``.
        workers: Number of processes.
        timeout: Seconds until all must be done.

    Returns:
        The results of the task, ordered by worker.

    Raises:
        TimeoutError: The workers were not done in time. They have been killed.
        torch.multiprocessing.ProcessException: A worker failed.
    """
    # A process reads this when it loads torch. More threads than cores slow each other down.
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
    """Set up the default process group inside this block. On the CPU, each process uses one thread.

    Args:
        worker: Index of this process.
        workers: Number of processes.
        device: Device of this worker.
        store_path: A file that does not exist yet. The workers find each other through it.
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
        # Objects in reference cycles may hold the group. They must not outlive it.
        gc.collect()
        dist.destroy_process_group()
