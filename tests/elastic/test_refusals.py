"""What a manager is refused for, before anything has changed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from powersgd_triton import Compressor, PowerSGDConfig, attach
from powersgd_triton.elastic.group import ManagedCommunicator
from tests.support.elastic.alone import CONFIG, SHAPES, Manager


def refused(said: str, config: PowerSGDConfig = CONFIG, group: Any = None, node_group: Any = None, **options: Any):
    with pytest.raises(ValueError, match=said):
        Compressor(config, SHAPES, group, node_group=node_group, manager=Manager(**options))


def test_what_is_refused():
    """Asynchronous quorums, spares, nodes, a group beside a manager, measured choices, and other wrappers than DDP."""
    refused("use_async_quorum=False", _use_async_quorum=True)
    refused("DYNAMIC", _replica_world_size_mode=SimpleNamespace(name="FIXED_WITH_SPARES"))
    refused("node_group", node_group="auto")
    refused("group=", group=object())
    refused("auto", PowerSGDConfig(compression="auto"))
    for said, node_group in (("node_group=", "auto"), ("FSDP and DeepSpeed", None)):
        with pytest.raises(ValueError, match=said):
            attach(nn.Linear(4, 4), rank=2, node_group=node_group, manager=Manager())


def test_a_step_needs_a_quorum_of_its_own():
    manager = Manager()
    compressor = Compressor(CONFIG, SHAPES, manager=manager)
    gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    with pytest.raises(RuntimeError, match="once in each quorum"):
        compressor.compress(gradients)
    manager._quorum_id = 1
    compressed = compressor.compress(gradients)
    with pytest.raises(RuntimeError, match="once in each quorum"):
        compressor.compress(gradients)
    with pytest.raises(ValueError, match="leave_error"):
        compressor.leave_error(compressed, gradients)


def test_a_first_step_that_loses_a_worker_is_zero():
    """Also of a compressor that knows shapes only."""
    compressor = Compressor(CONFIG, SHAPES, manager=Manager(_quorum_id=1, errored=lambda: RuntimeError("lost")))
    compressed = compressor.compress({name: torch.ones(shape) for name, shape in SHAPES.items()})
    averages: Any = compressor.decompress(compressed)
    assert not any(averages[name].any() for name in SHAPES)
    with pytest.raises(ValueError, match="lost a worker"):
        compressed.factors()


def test_a_worker_that_applied_a_step_alone_is_told(monkeypatch: pytest.MonkeyPatch):
    manager = Manager(_quorum_id=1)
    compressor = Compressor(CONFIG, SHAPES, manager=manager)
    gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    compressor.compress(gradients)
    manager.should_commit()
    manager._quorum_id = 3
    # The other worker has applied the same step in quorum 2.
    other = torch.tensor([0, 1, 0, 0])
    monkeypatch.setattr(ManagedCommunicator, "gather", lambda _, mine: torch.stack([mine, mine + other]))
    with pytest.raises(ValueError, match="step 0 was applied in quorum 2, and by this worker in quorum 1"):
        compressor.compress(gradients)


def test_several_compressors_have_states_of_their_own():
    manager = Manager()
    for _ in range(2):
        Compressor(CONFIG, SHAPES, manager=manager)
    assert list(manager.states) == ["powersgd", "powersgd 2"]
