"""Pickles of DDP's state. A pickle holds one worker's own error, so prefer ``state_dict``."""

from __future__ import annotations

import logging
from typing import Any

from powersgd_triton.core.engine import Engine
from powersgd_triton.core.loading import adopt, checked
from powersgd_triton.integrations.ddp.names import Record

logger = logging.getLogger("powersgd_triton.integrations.ddp")
torchs_logger = logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
"""Logger of torch's class and hooks. What they log is logged there too, so that a program's filters still apply."""


def saved(engine: Engine, buckets: Record) -> dict[str, Any]:
    """Return everything but the process group and the source of the loss scale."""
    before, after = engine.numel
    # The error is not averaged, because a worker that pickles alone must not wait for others.
    state = engine.residuals.save(engine.step, lambda error: error)
    return {
        "config": engine.plan.given,
        "core": state.to_dict(engine.config),
        "buckets": buckets,
        "worker": state.owner or (engine.communicator.index, engine.communicator.world_size),
        "total_numel_before_compression": before,
        "total_numel_after_compression": after,
    }


def restore(engine: Engine, saved: dict[str, Any]) -> None:
    """Load the result of ``saved`` into an engine that was made with its configuration and buckets.

    Not collective. The workers compare what they have loaded before their next step.
    """
    adopt(engine, *checked(engine, saved["core"], None, owner=saved["worker"]))
    engine.numel[:] = saved["total_numel_before_compression"], saved["total_numel_after_compression"]


def check_owner(engine: Engine) -> None:
    """Drop a pickle's error unless this is the worker that pickled it. Call it before the error is used."""

    def worker() -> tuple[int, int]:
        return engine.communicator.index, engine.communicator.world_size

    owner = engine.residuals.claim(worker)
    if owner is not None:
        logger.warning(
            "This PowerSGDState was pickled by worker %s of %s and is used by worker %s of %s. The pickle holds only "
            "the error of the worker that wrote it, so its error is dropped. Save state_dict() instead, which holds "
            "the mean error.",
            *owner,
            *worker(),
        )
