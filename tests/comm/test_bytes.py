"""Bytes of a step for any number of workers: they do not grow, and they stay within a budget. Nothing is allocated."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from powersgd_triton import PowerSGDConfig
from powersgd_triton.comm.exchange import ALL_REDUCE, exchange_of, waits
from powersgd_triton.demo.model import GPT
from powersgd_triton.layout.layout import Layout, products, wire_format
from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ranks.planner import Planner, budget
from tests.support.exchanges import latency_decides
from tests.support.thinned import thinned

Shapes = Mapping[str, tuple[int, ...]]
NARROW = ["bfloat16", "float16", "int8", "int4"]
BUDGETS = [("gpt2", 100.0), ("gpt2", 20.0), ("demo", 20.0), ("demo", 8.0)]
MIB = 1 << 20


@functools.cache
def shapes_of(model: str) -> Shapes:
    """Shapes of parameters in their order of registration."""
    if model == "demo":
        with torch.device("meta"):
            return {name: tuple(parameter.shape) for name, parameter in GPT().named_parameters()}
    layers, width, vocabulary, hidden = {"gpt2": (12, 768, 50257, 3072), "7b": (32, 4096, 32000, 11008)}[model]
    block = {
        "norm": (width,), "attention": (3 * width, width), "bias": (3 * width,), "projection": (width, width),
        "up": (hidden, width), "gate": (hidden, width) if model == "7b" else (width,), "down": (width, hidden),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {"tokens": (vocabulary, width), "positions": (1024, width)}
    return found | {f"{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}


def buckets(shapes: Shapes) -> list[Shapes]:
    """DDP's buckets after the first step, in the order of the backward pass."""
    names = list(shapes)[::-1]
    tensors = [torch.empty(shapes[name], device="meta") for name in names]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])  # type: ignore[attr-defined]
    return [{names[index]: shapes[names[index]] for index in bucket} for bucket in indices]


def joined(shapes: Shapes, config: PowerSGDConfig, workers: int, ranks: Mapping[str, int]) -> list[Layout]:
    """The layouts of a step, joined as an engine does it."""
    found: list[Layout] = []
    waiting: list[Layout] = []
    for bucket in buckets(shapes):
        waiting.append(Layout.build(bucket, config).with_ranks(lambda segment: ranks.get(segment.name, segment.rank)))
        layout = Layout.joined(waiting)
        if not waits(layout, config, workers):
            found.append(layout)
            waiting = []
    return [*found, Layout.joined(waiting)] if waiting else found


def sent(shapes: Shapes, config: PowerSGDConfig, workers: int, ranks: Mapping[str, int] | None = None) -> float:
    """Bytes that each worker sends in a step, and receives, divided by 2 (W − 1) / W."""
    total = 0.0
    for layout in joined(shapes, config, workers, ranks or {}):
        for left, sends in zip((True, False), products(config, config.start_iter, 0), strict=True):
            if not sends:
                continue
            factors = layout.factor_shapes(left=left)
            bypass = layout.bypass_numel if left or config.algorithm == "alternating" else 0
            numel = bypass + sum(math.prod(shape) for shape in factors)
            if exchange_of(4 * numel, config, workers) == ALL_REDUCE:
                total += 4 * numel
            else:
                # Two workers send their whole messages to each other.
                owners = 1 if workers == 2 else workers
                total += owners * WirePlan.build(wire_format(config), factors, bypass, 4, owners).size
    return total


@thinned("model, name, rank", ("gpt2", "demo"), NARROW, (4, 16))
def test_bytes_do_not_grow_with_the_workers(model: str, name: str, rank: int):
    most = {"gpt2": 1024, "demo": 64}[model]
    config, shapes = PowerSGDConfig(rank=rank, wire_dtype=name), shapes_of(model)
    with latency_decides():
        bytes_of = {workers: sent(shapes, config, workers) for workers in (2, 3, 8, 64, 256, 1024) if workers <= most}
    assert max(bytes_of.values()) <= 1.1 * bytes_of[2], bytes_of


@thinned("budgeted, name, workers", BUDGETS, NARROW, (2, 3, 8, 64, 256, 1024))
def test_a_budget_holds_for_any_number_of_workers(budgeted: tuple[str, float], name: str, workers: int):
    model, compression = budgeted
    config, shapes = PowerSGDConfig(compression=compression, wire_dtype=name), shapes_of(model)
    with latency_decides():
        ranks = Planner(shapes, config, workers).starting_ranks()
        assert sent(shapes, config, workers, ranks) <= 1.02 * budget(shapes, config)
