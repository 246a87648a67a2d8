"""Buckets that wait for the next ones, since their messages are small."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.waiting import Waiting
from powersgd_triton.layout.layout import Layout

CPU = torch.device("cpu")
CONFIG = PowerSGDConfig(rank=8, min_compression_rate=0)
SHAPES = dict.fromkeys("abc", (8, 6))


def test_buckets_are_joined_until_they_are_large_and_that_stays():
    waiting, layouts = Waiting(), [Layout.build({name: SHAPES[name]}, CONFIG) for name in "ab"]
    asked: list[int] = []

    def is_large(layout: Layout) -> bool:
        asked.append(layout.numel)
        return len(layout.segments) == 2

    joined = []
    for _ in range(2):
        called: list[str] = []
        for layout, name in zip(layouts, "ab", strict=True):
            waiting.add(layout, {name: torch.zeros(8, 6)}, functools.partial(called.append, name))
            assert waiting.ready(is_large) == (name == "b")
        layout, gradients, done = waiting.take()
        done()
        assert called == ["a", "b"]
        assert list(gradients) == [segment.name for segment in layout.segments] == ["a", "b"]
        joined.append(layout)
    assert joined[0] is joined[1]
    assert asked == [48, 96], "the decision of the first step stays"
    # Only buckets of one dtype and device are joined.
    waiting.add(layouts[0], {"a": torch.zeros(8, 6)}, lambda: None)
    like = [torch.zeros(8, 6), torch.zeros(8, 6).bfloat16(), torch.zeros(8, 6, device="meta")]
    assert [waiting.takes({"b": tensor}) for tensor in like] == [True, False, False]


def test_forgetting_drops_the_buckets_that_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("powersgd_triton.core.engine.waits", lambda *_: True)
    engine = Engine(CONFIG, Communicator(), lambda: SHAPES)

    def give(names: str, value: float) -> dict[str, Tensor]:
        gradients = {name: torch.full((8, 6), value) for name in names}
        for name in names:
            layout = engine.begin(
                name, functools.partial(dict, {name: SHAPES[name]}), CPU, keys=(name,), last=name == "c"
            )
            engine.average_joined(layout, {name: gradients[name]}, lambda: None)
        return gradients

    give("a", 100.0)
    engine.forget()
    for value in (1.0, 2.0):
        averages = give("abc", value)
        assert all(torch.allclose(average, torch.full((8, 6), value)) for average in averages.values())
    assert engine.step.iteration == 2
