"""A peer is gone when the others exchange: the survivor is told, loses nothing, and goes on."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.distributed import run
from tests.support.local_steps import CONFIGS, backward, flat, mean, model, owed, theta

EVERY, DEATH = 4, 10


def survives(worker: int, _world_size: int, config: str, delay: int) -> dict[str, Any]:
    net = model()
    sync = LocalSteps(net, CONFIGS[config], EVERY, delay=delay)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    changed = torch.zeros_like(flat(net))
    error = ""
    for step in range(22):
        if worker == 1 and step == DEATH:
            os._exit(1)
        backward(net, worker, step)
        before = flat(net)
        optimizer.step()
        changed += before - flat(net)
        local, shared, kept = flat(net), theta(sync), owed(sync)
        try:
            sync.step()
        except RuntimeError as failure:
            error = str(failure)
            unchanged = torch.equal(local, flat(net)) and torch.equal(shared, theta(sync))
            same = torch.equal(kept, owed(sync))
            counted = sync.since
            # From here on only this worker's changes count.
            changed.zero_()
            start, begun = shared, shared - local + kept
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    sync.finish()
    missing = begun + changed - (start - theta(sync)) - mean(owed(sync))
    return {
        "error": error,
        "unchanged": unchanged,
        "kept": same,
        "counted": counted,
        "missing": float(missing.abs().max()),
    }


@pytest.mark.parametrize(("config", "delay"), [("ternary", 0), ("rank", 0), ("ternary", 2), ("exact", 1)])
def test_the_survivor_goes_on(config: str, delay: int):
    found, _ = run(survives, 2, config, delay, casualties=[1])
    assert "a sum over the workers failed" in found["error"] or "could not reach" in found["error"]
    assert found["unchanged"]
    assert found["kept"]
    assert found["counted"] >= EVERY
    assert found["missing"] < 3e-6
