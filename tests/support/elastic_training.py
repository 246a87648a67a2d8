"""A training program for torchrun that goes on from its last checkpoint on however many workers there are.

    torchrun --nnodes=2:3 … -m tests.support.elastic_training FOLDER

It begins with three workers. One of them dies in the middle of a step, with SIGKILL and together with its agent, as if
its machine had failed; the others are started again by their agents, as two workers.
"""

from __future__ import annotations

import datetime
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.small import MANY, RANK_2, WIDTH, stack

WORKERS, STEPS = 3, 12
EVERY = 3
"""Steps between two checkpoints."""
DEATH = 7
"""The step in which a worker dies: the last checkpoint is one whole step old by then."""
VICTIM = 0
"""The worker that writes the checkpoints, and at whose store the others have met."""
BATCH = 48
"""Samples in a step, whatever the number of workers."""
SECONDS = 1000
"""After which a process that hangs is ended."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"checkpoint.{step}.pt"


def last_checkpoint(folder: Path) -> int:
    """Steps done before the last one, 0 where there is none."""
    return max((int(path.name.split(".")[1]) for path in folder.glob("checkpoint.*.pt")), default=0)


def save(value: Any, path: Path) -> None:
    """Whole or not at all: no one ever sees a file that is not complete."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.save(value, unfinished)
    os.replace(unfinished, path)


def train(folder: Path, worker: int, world_size: int, dies: bool = False) -> dict[str, Any]:
    """Train from the folder's last checkpoint to the end, and write checkpoints into it.

    Returns:
        The losses, and what there is at the end.
    """
    first = last_checkpoint(folder)
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    state = PowerSGDState(None, module=model, **RANK_2)
    if first:
        saved = torch.load(checkpoint_path(folder, first), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["powersgd"])
    loaded = state.error()

    def hook(state, bucket):
        """In which the process and its agent end once the exchange of the step's first bucket has begun."""
        future = powerSGD_hook(state, bucket)
        if dies and state.iter == DEATH and bucket.index() == 0:
            assert not bucket.is_last()
            assert not future.done()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return future

    replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
    replica.register_comm_hook(state, hook)
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(10_000)) / WIDTH**0.5
    losses = []
    for step in range(first, STEPS):
        # A worker has every so many of the step's samples.
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))[worker::world_size]
        optimizer.zero_grad()
        loss = (replica(inputs) - inputs @ teacher).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % EVERY == 0:
            save(state.error(), folder / f"error.{step + 1}.{worker}")
            # All workers have a part in the mean error; one of them writes it.
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "powersgd": state.state_dict()}
            if worker == 0:
                save({**parts, "workers": world_size}, checkpoint_path(folder, step + 1))
    found = {"first": first, "workers": world_size, "losses": losses}
    return {**found, "loaded": loaded, "error": state.error(), "parameters": model.state_dict()}


def end_with_agent() -> None:
    """Leave no process behind whose agent is gone, or that takes too long."""
    agent = os.getppid()
    signal.alarm(SECONDS)

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path) -> None:
    end_with_agent()
    torch.set_num_threads(1)
    worker, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    beginning = last_checkpoint(folder) == 0
    while beginning and world_size < WORKERS:
        # The agent restarts this process once the other machines are there.
        time.sleep(0.1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    save(train(folder, worker, world_size, dies=beginning and worker == VICTIM), folder / f"result.{worker}")
    gc.collect()
    dist.destroy_process_group()
    # Gloo's threads now and then abort Python's shutdown, with plain DDP too, which the agent would take for a failure.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
