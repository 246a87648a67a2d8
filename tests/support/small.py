"""Short runs of a small model at rank 2, what they log and how they fail."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.training import Run, batch, linear_stack, squared_error, train

WIDTH = 64
RANK_2: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0, "min_compression_rate": 0}
# Bucket sizes in MB, named after how many buckets they make.
MANY, FEW, ONE = 0.02, 0.05, 100.0
# DDP's first backward pass has one bucket whatever their size, but for this option, with which it has several at once.
AT_ONCE = {"find_unused_parameters": True}
Messages = list[tuple[int, str]]
Saved = dict[str, Any]


def stack() -> nn.Sequential:
    return linear_stack(6, WIDTH)


def training(model: nn.Module, worker: int, state: Any, steps: range, cap: float = MANY, **options: Any) -> Run:
    return train(model, worker, state, steps=steps, bucket_cap_mb=cap, width=WIDTH, **options)


def state_for(model: nn.Module, kind: str = "named", group: dist.ProcessGroup | None = None) -> PowerSGDState:
    return PowerSGDState(group, module=model if kind == "named" else None, **RANK_2)


def backward(model: nn.Module, state: PowerSGDState, **options: Any) -> Callable[..., None]:
    """A backward pass with DDP and the hook."""
    replica = DistributedDataParallel(model, bucket_cap_mb=MANY, **options)
    replica.register_comm_hook(state, powerSGD_hook)

    def step(number: int = 0) -> None:
        model.zero_grad()
        inputs, targets = batch(dist.get_rank(), number, width=WIDTH)
        squared_error(replica(inputs), targets).backward()

    return step


def uninterrupted(worker: int, kind: str) -> Run:
    model = stack()
    return training(model, worker, state_for(model, kind), range(8))


@contextlib.contextmanager
def logged(name: str) -> Iterator[Messages]:
    """Levels and texts of what is logged under a name."""
    messages: Messages = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append((record.levelno, record.getMessage()))

    logger, handler = logging.getLogger(name), Collector()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def warnings(messages: Messages) -> list[str]:
    return [text for level, text in messages if level == logging.WARNING]


def complaint(attempt: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Kind and text of the exception that a call ends with."""
    try:
        attempt(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
