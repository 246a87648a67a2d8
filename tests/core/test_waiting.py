"""Buckets that wait for the next ones, since their messages are small."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.buckets import BucketState, Part
from powersgd_triton.core.loading import forget
from powersgd_triton.core.schedule import Schedule
from powersgd_triton.layout.layout import Layout
from powersgd_triton.schemes import new_engine

CPU = torch.device("cpu")
CONFIG = PowerSGDConfig(rank=8, min_compression_rate=0)
SHAPES = dict.fromkeys("abc", (8, 6))


def test_buckets_are_joined_until_they_are_large_and_that_stays(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def waits(layout: Layout, *_: object) -> bool:
        asked.append(layout.numel)
        return len(layout.segments) < 2

    monkeypatch.setattr("powersgd_triton.core.buckets.waits", waits)
    engine, schedule = new_engine(CONFIG, Communicator(), lambda: SHAPES), Schedule()
    joined = []
    for _ in range(2):
        lists: list[list[Part]] = []
        for name in "ab":
            bucket = engine.buckets.find(name, functools.partial(dict, {name: SHAPES[name]}), CPU)
            lists += schedule.ready(Part(bucket, {name: torch.zeros(8, 6)}), engine.buckets.are_large)
        assert [[*part.gradients] for part in lists[0]] == [["a"], ["b"]]
        joined.append(engine.buckets.join([part.bucket for part in lists[0]]))
    assert joined[0] is joined[1]
    assert [segment.name for segment in joined[0].layout.segments] == ["a", "b"]
    assert asked == [48, 96], "the decision of the first step stays"


@pytest.mark.parametrize(("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float32, "meta")])
def test_only_buckets_of_one_dtype_and_device_are_joined(dtype: torch.dtype, device: str):
    schedule, layout = Schedule(), Layout.build({"a": (8, 6)}, CONFIG)
    tensors = torch.zeros(8, 6), torch.zeros(8, 6, dtype=dtype, device=device)
    first, second = (Part(BucketState(layout, layout), {"a": tensor}) for tensor in tensors)
    third = second._replace(bucket=first.bucket)
    assert schedule.ready(first, lambda _: False) == []
    assert schedule.ready(second, lambda _: False) == [[first]]
    assert schedule.ready(third, None) == [[second, third]]


def test_forgetting_drops_the_buckets_that_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("powersgd_triton.core.buckets.waits", lambda *_: True)
    engine = new_engine(CONFIG, Communicator(), lambda: SHAPES)

    def give(names: str, value: float) -> dict[str, Tensor]:
        gradients = {name: torch.full((8, 6), value) for name in names}
        for name in names:
            bucket = engine.begin(
                name, functools.partial(dict, {name: SHAPES[name]}), CPU, keys=(name,), last=name == "c"
            )
            engine.average(bucket, {name: gradients[name]}, join=True)
        return gradients

    give("a", 100.0)
    forget(engine)
    for value in (1.0, 2.0):
        averages = give("abc", value)
        assert all(torch.allclose(average, torch.full((8, 6), value)) for average in averages.values())
    assert engine.step.iteration == 2
