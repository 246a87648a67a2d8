"""Tests treat their models' messages as large. Else all buckets would be joined, and exchanges be all-reduces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# The planner takes its copy of the constants before they change.
import powersgd_triton.ranks.planner  # noqa: F401
from powersgd_triton.comm import exchange

DEFAULTS = exchange.SMALL, exchange.SMALL_PART


def bytes_decide() -> None:
    """From now on no message is small."""
    exchange.SMALL = exchange.SMALL_PART = 0


@contextlib.contextmanager
def latency_decides() -> Iterator[None]:
    """Messages are small as they are for users."""
    before = exchange.SMALL, exchange.SMALL_PART
    exchange.SMALL, exchange.SMALL_PART = DEFAULTS
    try:
        yield
    finally:
        exchange.SMALL, exchange.SMALL_PART = before
