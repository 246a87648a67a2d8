"""Bytes of a step for any number of workers: they do not grow, and they stay within a budget. Nothing is allocated."""

import contextlib
import functools
from typing import Any

import pytest

from benchmarks.buckets import ddp_buckets
from benchmarks.network.simulator import simulate
from powersgd_triton import PowerSGDConfig
from powersgd_triton.demo.model import GPT
from powersgd_triton.planning.models import MODELS, Shapes
from powersgd_triton.ranks.planner import Planner, budget
from tests.support.exchanges import latency_decides
from tests.support.thinned import thinned

NARROW = ["bfloat16", "float16", "int8", "int4"]
# Quick cases pair them with WORKERS in this order.
BUDGETS = [("demo", 20.0), ("demo", 8.0), ("gpt2", 100.0), ("gpt2", 20.0)]
WORKERS = (1024, 256, 64, 8, 3, 2)


@functools.cache
def buckets(model: str) -> list[Shapes]:
    """DDP's buckets, in the order of the backward pass."""
    shapes = [tuple(p.shape) for p in GPT().parameters()][::-1] if model == "demo" else MODELS[model]
    return ddp_buckets(shapes)


def sent(model: str, workers: int, **fields: Any) -> float:
    """Bytes that each worker sends in a step, and receives, divided by 2 (W − 1) / W."""
    return simulate(buckets(model), PowerSGDConfig(**fields), workers).normalized


@thinned("model, name, rank", ("gpt2", "demo"), NARROW, (4, 16))
def test_bytes_do_not_grow_with_the_workers(model: str, name: str, rank: int):
    most = {"gpt2": 1024, "demo": 64}[model]
    numbers = [workers for workers in WORKERS if workers <= most]
    with latency_decides():
        bytes_of = {workers: sent(model, workers, rank=rank, wire_dtype=name) for workers in numbers}
    assert max(bytes_of.values()) <= 1.1 * bytes_of[2], bytes_of


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "each bucket for itself"])
@thinned("budgeted, name, workers", BUDGETS, NARROW, WORKERS, together=1)
def test_a_budget_holds_for_any_number_of_workers(budgeted: tuple[str, float], name: str, workers: int, joined: bool):
    model, compression = budgeted
    # As the simulator names them.
    tensors = {f"{b}.{i}": shape for b, shapes in enumerate(buckets(model)) for i, shape in enumerate(shapes)}
    config, count = PowerSGDConfig(compression=compression, wire_dtype=name), None if joined else len(buckets(model))
    with latency_decides() if joined else contextlib.nullcontext():
        ranks = Planner(tensors, config, workers, count).starting_ranks()
        found = sent(
            model, workers, rank=lambda tensor, _: ranks.get(tensor, 0), min_compression_rate=0, wire_dtype=name
        )
    assert found <= 1.02 * budget(tensors, config)


@pytest.mark.parametrize("workers", [3, 64])
def test_a_budget_that_exact_vectors_would_exceed(workers: int):
    tensors = {f"{b}.{i}": shape for b, shapes in enumerate(buckets("demo")) for i, shape in enumerate(shapes)}
    config = PowerSGDConfig(compression=200, bypass="int8")
    with pytest.raises(ValueError, match="bypass='int8', sends fewer bytes"):
        Planner(tensors, PowerSGDConfig(compression=200), workers).starting_ranks()
    with latency_decides():
        ranks = Planner(tensors, config, workers).starting_ranks()
        sizes = {"rank": lambda tensor, _: ranks.get(tensor, 0), "min_compression_rate": 0, "wire_dtype": "int4"}
        found = sent("demo", workers, bypass="int8", **sizes)
    assert 0.9 * budget(tensors, config) <= found <= 1.02 * budget(tensors, config)
