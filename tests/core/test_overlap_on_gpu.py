"""Messages travel while kernels run on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.planning.trial import StandIn
from powersgd_triton.schemes import new_engine
from tests.support.checks import everything, gradients, same_bits
from tests.support.streams import BUCKETS, SHAPES, begin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


class LateNetwork(StandIn):
    """Collectives on a GPU that take a number of cycles."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.cycles, self.stream = cycles, torch.cuda.Stream()
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def all_reduce(self, tensor: Tensor) -> Any:
        due, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        due.record()
        self.stream.wait_event(due)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(self.cycles)
            tensor.mul_(2)
            done.record()
        self.events.append((due, done))
        return done.wait


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("algorithm", ["standard", "alternating"])
def test_messages_travel_while_kernels_run_on_a_gpu(backend: str, algorithm: str):
    device = torch.device("cuda", torch.cuda.current_device())
    results = []
    for overlapping in (False, True):
        network = LateNetwork(0)
        engine = new_engine(everything(backend=backend, algorithm=algorithm), network, lambda: SHAPES, device)
        found: dict[str, Tensor] = {}
        for number in range(4):
            # The first steps compile kernels. Then a message takes tens of milliseconds.
            network.cycles = 0 if number < 2 else 50_000_000
            network.events.clear()
            given = {name: tensor.to(device) for name, tensor in gradients(number, SHAPES).items()}
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
            try:
                for names in BUCKETS:
                    layout = begin(engine, names, device, names is BUCKETS[-1] if overlapping else None)
                    with engine.residuals.streams.on(device, join=False):
                        engine.average(layout, {name: given[name] for name in names})
                engine.finish()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            found |= {f"{name} of step {number}": gradient for name, gradient in given.items()}
        results.append(found | {f"error of {n}": error for n, error in engine.residuals.error(engine.step).items()})
        # Whether the second bucket's first message was due before the first bucket's had arrived.
        (_, arrived), (due, _), *_ = network.events
        assert (due.elapsed_time(arrived) > 0) is overlapping
    assert same_bits(*results)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_looking_at_the_error_waits_for_the_step(backend: str):
    """The step is late, and the main stream does not wait for the stream that it comes from."""
    device, hook = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    errors = []
    for cycles in (0, 100_000_000):
        engine = new_engine(PowerSGDConfig(rank=2, backend=backend), Communicator(), lambda: SHAPES)
        given = {name: tensor.to(device) for name, tensor in gradients(0, SHAPES).items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(hook):
            if cycles:
                torch.cuda._sleep(cycles)
            engine.average(begin(engine, [*SHAPES], device, last=True), given)
        errors.append(engine.residuals.error(engine.step))
        torch.cuda.synchronize()
    assert same_bits(*errors)
    assert all(error.any() for error in errors[0].values())
