"""The size of DDP's buckets, ``bucket_cap_mb``: which tensors share a bucket, and which size suits a link."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.matrices import Tensors
from powersgd_triton.planning.cost import TOLERANCE, Job, Network, step_seconds

DEFAULT_CAP = 25
"""MB of DDP's buckets without ``bucket_cap_mb``. The first one then has 1 MB."""
CAPS = (5, 10, DEFAULT_CAP, 50, 100, 200)
"""Tried for ``bucket_cap_mb``."""
LINKS, WORKERS = (0.1, 1.0, 10.0, 25.0, 100.0), (2, 8, 64, 256)
"""Gbit/s and numbers of workers of the table of ``bucket_cap_mb``."""


def ddp_buckets(tensors: Tensors, cap: int = DEFAULT_CAP) -> list[dict[str, tuple[int, ...]]]:
    """Return DDP's buckets of fp32 gradients {name: shape}, last layer first. ``cap`` is ``bucket_cap_mb``."""
    buckets: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in tensors.items():
        if size >= (1 if cap == DEFAULT_CAP and len(buckets) == 1 else cap) << 20:
            buckets.append({})
            size = 0
        buckets[-1][name] = tuple(shape)
        size += 4 * math.prod(shape)
    return buckets


def cap_seconds(job: Job, config: PowerSGDConfig) -> dict[int, float]:
    """Return {``bucket_cap_mb``: seconds of a step}, without what compression computes.

    A bucket's messages wait until it is full. With larger buckets that is later, but there are fewer messages.
    """
    found = {}
    for cap in CAPS:
        tried = dataclasses.replace(job, buckets=ddp_buckets(job.tensors, cap))
        layouts = tried.joined_buckets(tried.layouts(config), config)
        numels = list(itertools.accumulate(layout.numel for layout in layouts))
        filled = [numel / numels[-1] for numel in numels]
        # Joining them once more changes nothing.
        found[cap] = step_seconds(job.compute, 0.0, job.messages(layouts, config), filled)
    return found


def best_cap(seconds: Mapping[int, float]) -> int:
    """Return DDP's default, or the nearest to it, of those that take about as long as the fastest."""
    good = [cap for cap in seconds if seconds[cap] <= (1 + TOLERANCE) * min(seconds.values())]
    return min(good, key=lambda cap: abs(math.log(cap / DEFAULT_CAP)))


def cap_table(job: Job, config: PowerSGDConfig) -> str:
    """Return a Markdown table of ``bucket_cap_mb`` for several links and numbers of GPUs, each in a node of its own.

    In brackets: the slowest of ``CAPS``, and how much longer a step takes with it than with the fastest.
    """
    lines = [["link", *(f"{workers} workers" for workers in WORKERS)], ["---"] * (1 + len(WORKERS))]
    for link in LINKS:
        lines.append([f"{link:g} Gbit/s"])
        for workers in WORKERS:
            network = Network(workers, card=link * 1e9 / 8, latency=job.network.latency)
            seconds = cap_seconds(dataclasses.replace(job, network=network, two_levels=False, late=False), config)
            slowest = max(seconds, key=lambda cap: seconds[cap])
            loss = seconds[slowest] / min(seconds.values()) - 1
            lines[-1].append(f"{best_cap(seconds)} ({slowest}: +{loss:.1%})" if loss >= 0.001 else "any")
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
