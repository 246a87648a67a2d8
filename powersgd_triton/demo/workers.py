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
    """Call ``task(worker, store_path=…)`` in new processes, and return the results, ordered by worker.

    Args:
        task: Function that can be pickled, as its result must be. ``store_path`` is for ``process_group``.
        workers: Number of processes.
        timeout: Seconds until all must be done.

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
        return [pickle.loads(Path(folder, f"result-{worker}").read_bytes()) for worker in range(workers)]


def _work(worker: int, task: Callable[..., Any], folder: str) -> None:
    result = task(worker, store_path=str(Path(folder, "store")))
    Path(folder, f"result-{worker}").write_bytes(pickle.dumps(result))


@contextlib.contextmanager
def process_group(worker: int, workers: int, device: torch.device, store_path: str) -> Iterator[None]:
    """Set up the default process group inside this block. On the CPU, each process uses one thread.

    ``store_path`` is a file that does not exist yet, through which the processes find each other.
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
