"""The hook on a stream of its own, while the main stream looks at the state."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.comm import exchange
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.exchanges import latency_decides
from tests.support.streams import Network, StreamMachine, Timed, stream_machine

pytestmark = pytest.mark.usefixtures("one_worker")


def train(machine: StreamMachine, network: Network | None = None) -> None:
    """Steps of several buckets. ``network``: of two workers, instead of the one that there is."""
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 12), nn.Linear(12, 1))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
    state = PowerSGDState(None, start_powerSGD_iter=0, min_compression_rate=0.1, module=model)
    replica.register_comm_hook(state, powerSGD_hook)
    if network is not None:
        state._engine.connect(network)
    saved = None
    for step in range(5):
        replica(torch.randn(8, 20)).sum().backward()
        # DDP makes the main stream wait for the Futures, that is for what was enqueued before their results were set.
        for clock in machine.futures:
            machine.current.clock |= clock
        machine.futures.clear()
        # DDP makes its buckets anew after the first step.
        joined = exchange.SMALL_PART > 0 and network is not None
        assert step == 0 or joined or len(state._engine.buckets.in_use()) > 1
        assert state.error()
        if saved is not None:
            state.load_state_dict(saved)
        saved = state.state_dict()


def test_messages_use_memory_in_order_and_the_state_one_stream() -> None:
    for how in (contextlib.nullcontext(), latency_decides()):
        with stream_machine() as machine, how:
            train(machine, Network(machine))
        assert machine.races == []
    with stream_machine() as machine:
        train(machine)
    assert machine.races == []
    assert [stream.priority for stream in machine.made] == [-1]


@pytest.mark.parametrize(("backward", "message", "expected"), [(10, 1, 4 * 10 + 2 * 1 + 2), (0, 10, 8 * 10 + 2 + 1)])
def test_messages_travel_during_the_backward_pass_and_kernels(backward: float, message: float, expected: float):
    """If the backward pass takes longer, the last bucket alone is left. Else the network waits for kernels twice."""
    with stream_machine() as machine:
        model = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(4)))
        replica = DistributedDataParallel(model, bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
        state = PowerSGDState(None, start_powerSGD_iter=0, min_compression_rate=0.1, module=model)
        network = Network(machine, message)
        state._engine.connect(network)
        state._engine.listeners.append(Timed(machine, {"project": 1, "backproject": 1}))
        replica.register_comm_hook(state, powerSGD_hook)
        streams = network.stream, machine.current

        def compute(_: Tensor) -> None:
            machine.current.time += backward

        for parameter in model.parameters():
            parameter.register_hook(compute)
        for _ in range(2):
            # DDP makes its buckets anew after the first step.
            network.sent.clear()
            begin = max(stream.time for stream in (*streams, *machine.made))
            for stream in streams:
                stream.time = begin
            replica(torch.randn(8, 20)).sum().backward()
            machine.current.wait_stream(machine.made[-1])
        assert len(network.sent) == 8
        assert machine.made[-1].time - begin == expected
        assert machine.races == []
