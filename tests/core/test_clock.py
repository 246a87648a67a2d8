"""Times that are reported of a step, by clocks and events that a test moves on."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core import clock
from powersgd_triton.core.clock import COMPUTE, EXCHANGE, PHASES, STEP
from tests.support.checks import gradients
from tests.support.recorded import CPU, SHAPES, steps, watched


def test_waiting_is_exchange_and_the_backward_pass_is_no_phase(monkeypatch: pytest.MonkeyPatch):
    """The clock moves on by a millisecond when it is read, and further while the program sleeps."""
    ticks, slept = itertools.count(1), list[float]()
    time = types.SimpleNamespace(perf_counter=lambda: (next(ticks) + sum(slept)) / 1000)
    monkeypatch.setattr("powersgd_triton.core.clock.time", time)
    # A collective for which one has to wait.
    work = types.SimpleNamespace(wait=lambda: slept.append(100))
    monkeypatch.setattr(Communicator, "all_reduce", lambda *_: work)
    state, records = watched()
    engine = state._engine
    for number in range(2):
        for name in ("weight", "same"):
            layout = engine.begin(name, lambda name=name: {name: SHAPES[name]}, CPU, last=name == "same")  # type: ignore[misc]
            engine.average(layout, {name: gradients(number, SHAPES)[name]})
            # More of the backward pass, while the first bucket is under way.
            slept.append(1000)
    (record,) = records
    found = record.milliseconds
    assert found.keys() == {*PHASES, STEP}
    # Two sums of each bucket, and a reading whenever a bucket goes on.
    assert found[EXCHANGE] == pytest.approx(4 * 100 + 6)
    assert all(0 < found[phase] < 20 for phase in COMPUTE)
    assert record.compute == pytest.approx(sum(found[phase] for phase in COMPUTE))
    # The step begins at the end of the first one, before a pause. What is between the turns of the buckets is in no
    # phase: two pauses, and nine readings of the clock.
    assert found[STEP] == pytest.approx(sum(found[phase] for phase in PHASES) + 2000 + 9)


class FakeEvent:
    """A CUDA event, which the device reaches when the test says so."""

    made = reached = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.made += 1
        self.number = FakeEvent.made

    def query(self) -> bool:
        return self.number <= FakeEvent.reached

    def synchronize(self) -> None:
        assert self.query()

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()
        return float(end.number - self.number)


def test_a_record_comes_when_the_device_has_reached_its_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(clock, "has_streams", lambda _: True)
    FakeEvent.made = FakeEvent.reached = 0
    state, records = watched(every=2)
    steps(state, range(4))
    assert records == []
    made, FakeEvent.reached = FakeEvent.made, FakeEvent.made // 2
    steps(state, [4])
    assert [record.step for record in records] == [2]
    FakeEvent.reached = made
    steps(state, [5])
    assert [record.step for record in records] == [2, 4]
    for record in records:
        # One unit between two events.
        assert record.milliseconds["commit"] == record.milliseconds["telemetry"] == 1
        assert record.milliseconds[STEP] == made // 2 - 1
