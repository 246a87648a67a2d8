"""One line that says what an adapter does."""

from __future__ import annotations

import logging

import torch.distributed as dist

from powersgd_triton.config import PowerSGDConfig

logger = logging.getLogger("powersgd_triton")


def announce(line: str) -> None:
    """Log a line, and print it on worker 0, since INFO messages are hidden by default."""
    logger.info(line)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def describe_ranks(config: PowerSGDConfig) -> str:
    """Return how ranks are chosen, and from which step on."""
    start = f", from step {config.start_iter} on" if config.start_iter else ""
    if config.planned:
        return f"planned ranks{start}"
    return f"ranks by a function{start}" if callable(config.rank) else f"rank {config.rank}{start}"


def describe_bytes(count: float) -> str:
    """Return a number of bytes in a unit that suits it."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"
