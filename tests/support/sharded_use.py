"""Steps of sharded models with a learning rate of one half, and what was said."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor

from tests.support.sharded_training import (
    batch,
    whole,
)
from tests.support.wrappers import RATE, loss_of


def check_said(*found: tuple[str, str]) -> None:
    for said, pattern in found:
        assert re.search(pattern, said, re.DOTALL), (said, pattern)


def backward(module: Any, worker: int, step: int = 0) -> None:
    module.zero_grad()
    loss_of(module, batch(worker, step)).backward()


def parameters(module: Any) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def train(module: Any, worker: int, steps: int = 3) -> dict[str, Tensor]:
    """Whole parameters after some steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for step in range(steps):
        backward(module, worker, step)
        optimizer.step()
    return parameters(module)
