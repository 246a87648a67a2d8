"""The hook on a stream of its own, while the main stream looks at the state."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.streams import StreamMachine, stream_machine


def train(machine: StreamMachine) -> None:
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 12), nn.Linear(12, 1))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
    state = PowerSGDState(None, start_powerSGD_iter=0, min_compression_rate=0.1, module=model)
    replica.register_comm_hook(state, powerSGD_hook)
    saved = None
    for step in range(5):
        replica(torch.randn(8, 20)).sum().backward()
        # DDP makes the main stream wait for the Futures, that is for what was enqueued before their results were set.
        for clock in machine.futures:
            machine.current.clock |= clock
        machine.futures.clear()
        # DDP makes its buckets anew after the first step.
        assert step == 0 or len(state._engine.memory.buckets()) > 1
        assert state.error()
        if saved is not None:
            state.load_state_dict(saved)
        saved = state.state_dict()


def test_state_is_used_on_one_stream(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with stream_machine() as machine:
            train(machine)
    finally:
        dist.destroy_process_group()
    assert machine.races == []
    assert [stream.priority for stream in machine.made] == [-1]
