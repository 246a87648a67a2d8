"""Run a function on several gloo workers and collect what each returns."""

from __future__ import annotations

import datetime
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

Worker = Callable[..., Any]


def run(fn: Worker, world_size: int, *args: Any, timeout: float = 150) -> list[Any]:
    """Call ``fn(worker, world_size, *args)`` in ``world_size`` processes; the results in the workers' order.

    Raises:
        TimeoutError: they were not done in time; they are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = start_processes(
            _enter, (fn, world_size, folder, args), nprocs=world_size, join=False, start_method="spawn"
        )
        assert context is not None
        deadline = time.monotonic() + timeout
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{world_size} workers of {fn.__name__} were not done after {timeout} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [pickle.loads((Path(folder) / f"result{worker}").read_bytes()) for worker in range(world_size)]


def _enter(worker: int, fn: Worker, world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=worker,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    result = fn(worker, world_size, *args)
    (Path(folder) / f"result{worker}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
