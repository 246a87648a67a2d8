"""The hook on a stream of its own, while the main stream looks at the state."""

import contextlib

import pytest
import torch
from torch import nn

from powersgd_triton.comm import exchange
from powersgd_triton.integrations.ddp import PowerSGDState
from tests.support.exchanges import latency_decides
from tests.support.streams import Network, StreamMachine, stream_machine
from tests.support.training import hooked

pytestmark = pytest.mark.usefixtures("one_worker")


def train(machine: StreamMachine, network: Network | None = None) -> None:
    """Steps of several buckets. ``network``: of two workers, instead of the one that there is."""
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 12), nn.Linear(12, 1))
    state = PowerSGDState(None, start_powerSGD_iter=0, min_compression_rate=0.1, module=model)
    replica = hooked(model, state, bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
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
    for current in (True, False):
        with stream_machine(current=current) as machine:
            train(machine)
        assert machine.races == []
        assert [stream.priority for stream in machine.made] == [-1]
