"""A training program for torchrun that goes on from its last checkpoint on however many workers there are.

    torchrun --nnodes=2:3 … -m tests.support.elastic_training FOLDER

It begins with three workers. One of them dies in the middle of a step, with SIGKILL and together with its agent, as if
its machine had failed; the others are started again by their agents, as two workers.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.exchanges import bytes_decide
from tests.support.properties import batches, build
from tests.support.training import patched
from tests.support.wrappers import RANK_2

WORKERS, STEPS = 3, 12
EVERY = 3
"""Steps between two checkpoints."""
DEATH = 7
"""The step in which a worker dies: the last checkpoint is one whole step old by then."""
VICTIM = 0
"""The worker that writes the checkpoints, and at whose store the others have met."""
SECONDS = 1000
"""After which a process that hangs is ended."""


def last_checkpoint(folder: Path) -> int:
    """Steps done before the last one, 0 where there is none. The model is saved after the compression's state."""
    return max((int(path.parent.name) for path in folder.glob("*/model")), default=0)


def train(folder: Path, worker: int, world_size: int, dies: bool = False) -> dict[str, Any]:
    """Train from the folder's last checkpoint to the end, and write checkpoints into it. What there is at the end."""
    first = last_checkpoint(folder)
    saved = torch.load(folder / str(first) / "model") if first else None
    model = build("DDP", RANK_2, saved)
    if first:
        model.load(str(folder / str(first)))
    loaded = model.mean_error()
    for step in range(first, STEPS):
        if dies and step == DEATH:
            with patched(dist, "all_reduce", die):
                model.step(batches(model, step))
        model.step(batches(model, step))
        if (step + 1) % EVERY == 0:
            path = folder / str(step + 1)
            path.mkdir(exist_ok=True)
            torch.save(model.state.error(), path / f"error.{worker}")
            model.save(str(path))
            if worker == 0:
                # Whole or not at all.
                torch.save(model.parameters(), path / "unfinished")
                os.replace(path / "unfinished", path / "model")
    return {"first": first, "loaded": loaded, "error": model.state.error(), "parameters": model.parameters()}


def die(*_arguments: Any, **_options: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


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
    bytes_decide()
    worker, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    beginning = last_checkpoint(folder) == 0
    while beginning and world_size < WORKERS:
        # The agent restarts this process once the other machines are there.
        time.sleep(0.1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    torch.save(train(folder, worker, world_size, beginning and worker == VICTIM), folder / f"result.{worker}")
    # Gloo's threads now and then abort Python's shutdown, with plain DDP too, which the agent would take for a failure.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
