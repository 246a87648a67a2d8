"""FSDP1 around the model of ``sharded_training``, with the hook."""

from __future__ import annotations

from typing import Any

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.fsdp1 import PowerSGDState
from tests.support.sharded_training import Net
from tests.support.wrappers import FSDP1


def compressed(model: Net, config: PowerSGDConfig) -> tuple[Any, PowerSGDState]:
    """The wrapped model, and the compression's state."""
    made = FSDP1(model, config)
    return made.module, made.state
