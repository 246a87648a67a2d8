"""The streams on which an engine works, whatever streams its callers use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.loading import load, save
from powersgd_triton.core.scheme import Average
from powersgd_triton.schemes import new_engine
from tests.support.checks import same_bits
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
        self.engine = new_engine(config, Communicator(), lambda: SHAPES)
        # Frameworks keep gradients until the main stream has waited.
        self._gradients: list[dict[str, Tensor]] = []

    def step(self) -> None:
        gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        self._gradients.append(gradients)
        self.hook.wait_stream(self.main)
        with self.machine.on(self.hook):
            layout = self.engine.begin("all", lambda: SHAPES, torch.device("cpu"), last=True)
            self.engine.average(layout, gradients)

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
        engine.residuals.error(engine.step)
    state = save(engine)
    training.step()
    load(engine, lambda: (state, None))
    for _ in range(2):
        training.step()
        training.join()
    training.step()
    engine.residuals.forget_errors()
    training.step()
    saved = save(engine)
    load(engine, lambda: (saved, None))
    training.join()


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_is_used_in_order(name: str):
    """On the streams of the callers it is not: the check finds what went wrong before engines had their own."""
    with stream_machine() as machine:
        train(machine, CONFIGS[name])
    assert machine.races == []
    assert [stream.priority for stream in machine.made] == [-1]
    with stream_machine(own=False) as machine:
        train(machine, CONFIGS[name])
    for what in ("freed", "reads", "writes"):
        assert any(what in race for race in machine.races), what


def test_the_device_of_the_gradients_is_made_current():
    """Triton launches kernels on the current device. ``torch.cuda.stream`` also makes the stream's device current."""
    found = []
    with stream_machine() as machine:
        training = Training(machine, PowerSGDConfig(rank=2))

        def write(_: Average) -> None:
            found.append(machine.current)

        layout = training.engine.begin("all", lambda: SHAPES, torch.device("cpu"), last=True)
        training.engine.average(layout, {n: torch.randn(s) for n, s in SHAPES.items()}, write=write)
        assert found == machine.made
        assert machine.made[0].device == torch.device("cpu")
        assert machine.current is training.main


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_looking_at_the_error_waits_for_the_step(backend: str):
    """The step is late, and the main stream does not wait for the stream that it comes from."""
    device, hook = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    errors = []
    for cycles in (0, 100_000_000):
        config = PowerSGDConfig(rank=2, backend=backend)
        engine = new_engine(config, Communicator(), lambda: SHAPES)
        generator = torch.Generator(device).manual_seed(0)
        gradients = {n: torch.randn(s, generator=generator, device=device) for n, s in SHAPES.items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(hook):
            if cycles:
                torch.cuda._sleep(cycles)
            layout = engine.begin("all", lambda: SHAPES, device, last=True)
            engine.average(layout, gradients)
        errors.append(engine.residuals.error(engine.step))
        torch.cuda.synchronize()
    assert same_bits(*errors)
    assert all(error.any() for error in errors[0].values())
