"""The streams on which an engine works, whatever streams its callers use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.layout.layout import Layout
from tests.support.streams import FakeStream, StreamMachine, stream_machine

SHAPES = {"weight": (24, 20), "other": (16, 12), "bias": (7,)}
CONFIGS = {
    "standard": PowerSGDConfig(rank=2),
    "alternating": PowerSGDConfig(rank=2, algorithm="alternating"),
    "planned": PowerSGDConfig(compression=3, replan_every=1, wire_dtype="fp32"),
}


class Training:
    """One worker whose hook runs on a framework's stream, and which saves and loads on the main stream."""

    def __init__(self, machine: StreamMachine, config: PowerSGDConfig) -> None:
        self.machine, self.hook, self.main = machine, FakeStream(), machine.current
        self.layout = Layout.build(SHAPES, config)
        self.engine = Engine(config, Communicator(), lambda: SHAPES)
        # Frameworks keep gradients until the main stream has waited.
        self._gradients: list[dict[str, Tensor]] = []

    def step(self) -> None:
        gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        self._gradients.append(gradients)
        self.hook.wait_stream(self.main)
        with self.machine.on(self.hook):
            assert self.engine.begin(self.layout, torch.device("cpu"), last=True)
            self.engine.average(self.layout, gradients)

    def join(self) -> None:
        """What frameworks do after the backward pass."""
        self.main.wait_stream(self.hook)
        self._gradients.clear()


def train(machine: StreamMachine, config: PowerSGDConfig) -> None:
    """Steps, and between them everything that uses the engine's memory on the main stream."""
    training = Training(machine, config)
    engine = training.engine
    for _ in range(3):
        training.step()
        # The main stream has not waited for the hook's.
        engine.memory.error(engine.step)
    state = engine.state_dict()
    training.step()
    engine.load_state_dict(state, None)
    for _ in range(2):
        training.step()
        training.join()
    training.step()
    engine.memory.forget_errors()
    training.step()
    engine.load_state_dict(engine.state_dict(), None)
    training.join()
    del training, engine, state


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_is_used_in_order(name: str):
    with stream_machine() as machine:
        train(machine, CONFIGS[name])
    assert machine.races == []
    assert [stream.priority for stream in machine.made] == [-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_not_on_the_streams_of_the_callers(name: str):
    """The check finds what went wrong before engines had streams of their own."""
    with stream_machine(own=False) as machine:
        train(machine, CONFIGS[name])
    assert any("freed" in race for race in machine.races)
    assert any("reads" in race for race in machine.races)
    assert any("writes" in race for race in machine.races)
