"""A peer is gone when the others exchange: the survivor is told, loses nothing, and goes on."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run
from tests.support.local_steps import Training, flat, owed, theta

EVERY, DEATH = 4, 10


def survives(worker: int, _world_size: int, config: str, delay: int) -> None:
    training = Training(worker, config, EVERY, delay=delay)
    sync, step_on = training.sync, training.sync.step
    failures: list[str] = []

    def step() -> None:
        local, shared, kept = flat(training.net), theta(sync), owed(sync)
        try:
            step_on()
        except RuntimeError as failure:
            failures.append(str(failure))
            assert torch.equal(local, flat(training.net))
            assert torch.equal(shared, theta(sync))
            assert torch.equal(kept, owed(sync))
            assert sync.since >= EVERY
            # From here on only this worker's changes count.
            training.changed, training.start = shared - local + kept, shared
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    sync.step = step  # type: ignore[method-assign]
    training.train(DEATH)
    if worker == 1:
        os._exit(1)
    training.train(12)
    (said,) = failures
    assert "a sum over the workers failed" in said or "could not reach" in said
    training.finish()


@pytest.mark.parametrize(("config", "delay"), [("ternary", 0), ("rank", 0), ("ternary", 2), ("exact", 1)])
def test_the_survivor_goes_on(config: str, delay: int) -> None:
    run(survives, 2, config, delay, casualties=[1])
