"""Pickles of DDP's state. A pickle holds one worker's own error, so prefer ``state_dict``."""

from __future__ import annotations

import logging
from typing import Any

from powersgd_triton.core.engine import Engine
from powersgd_triton.integrations.ddp.names import Record

logger = logging.getLogger("powersgd_triton.integrations.ddp")


def saved(engine: Engine, buckets: Record) -> dict[str, Any]:
    """Return the content of a pickle: everything but the process group.

    Raises:
        ValueError: The state has a budget and does not know its buckets yet.
    """
    if engine.config.planned and not buckets:
        raise ValueError("a PowerSGDState with a budget can be pickled after its first step, when it has buckets")
    logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
    before, after = engine.numel
    # The error is not averaged, because a worker that pickles alone must not wait for others.
    state = engine.memory.save(engine.step, lambda error: error)
    return {
        "config": engine.config,
        "core": state.to_dict(engine.config),
        "buckets": buckets,
        "worker": state.owner or (engine.communicator.index, engine.communicator.world_size),
        "total_numel_before_compression": before,
        "total_numel_after_compression": after,
    }


def restore(engine: Engine, saved: dict[str, Any]) -> None:
    """Load a pickle's content into an engine that was made with the pickle's configuration and buckets.

    Not collective. The workers compare what they have loaded before their next step.
    """
    logger.warning(
        "NOTE: Process group will be set to a default group (i.e. the world size). "
        "If a different group is desired, please set `self.process_group` after PowerSGD state is loaded."
    )
    engine.adopt(*engine.peers.parsed(saved["core"], None, owner=saved["worker"]))
    engine.numel[:] = saved["total_numel_before_compression"], saved["total_numel_after_compression"]


def check_owner(engine: Engine) -> None:
    """Drop a pickle's error unless this is the worker that pickled it. Call it before the error is used."""

    def worker() -> tuple[int, int]:
        return engine.communicator.index, engine.communicator.world_size

    owner = engine.memory.claim(worker)
    if owner is not None:
        logger.warning(
            "This PowerSGDState was pickled by worker %s of %s and is used by worker %s of %s. The pickle holds only "
            "the error of the worker that wrote it, so its error is dropped. Save state_dict() instead, which holds "
            "the mean error.",
            *owner,
            *worker(),
        )
