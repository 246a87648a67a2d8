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
from tests.support.lockstep import Fleet

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


@pytest.mark.parametrize(("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float32, "meta")])
def test_only_buckets_of_one_dtype_and_device_are_joined(dtype: torch.dtype, device: str):
    waiting = Waiting()
    waiting.add(Layout.build({"a": (8, 6)}, CONFIG), {"a": torch.zeros(8, 6)}, lambda: None)
    assert waiting.takes({"b": torch.zeros(8, 6)})
    assert not waiting.takes({"b": torch.zeros(8, 6, dtype=dtype, device=device)})


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


def test_errors_have_one_dtype_on_all_workers_of_a_node():
    """The second worker of each node has no row of the first matrix."""
    config = PowerSGDConfig(rank=1, min_compression_rate=0, error_dtype="float32")
    shapes = dict.fromkeys("ab", (16, 12))
    fleet = Fleet(config, shapes, 4, 2)
    fleet.step([{name: torch.randn(16, 12, dtype=torch.float64) for name in shapes} for _ in range(4)], [list(shapes)])
    assert {error.dtype for errors in fleet.errors() for error in errors.values()} == {torch.float32}
    saved = fleet.together(lambda engine: engine.state_dict())
    assert all(
        torch.equal(saved[0]["matrices"][n]["error"], one["matrices"][n]["error"]) for one in saved for n in shapes
    )
