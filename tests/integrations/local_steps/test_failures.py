"""Exchanges that fail on two levels and of shards: nothing is lost, and the next one sends what they have not."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.distributed.device_mesh import init_device_mesh

from powersgd_triton.comm import communicator
from powersgd_triton.core import schedule
from powersgd_triton.integrations.local_steps import pending_exchange
from tests.support.distributed import on_workers
from tests.support.local_steps import LOST, InFSDP2, Training, mean, owed, theta

EVERY = 3


@contextlib.contextmanager
def failing(last: int, fragment: int) -> Iterator[list[str]]:
    """Let an exchange fail at a message, on this worker. What goes wrong in the block is in the list."""
    waits, failures = itertools.count(1), list[str]()

    def wait(work: Any) -> None:
        communicator.wait(work)
        if next(waits) == last:
            raise RuntimeError("injected")

    with mock.patch.object(schedule, "wait", wait), mock.patch.object(pending_exchange, "FRAGMENT", fragment):
        try:
            yield failures
        except RuntimeError as failure:
            failures.append(str(failure))
    assert failures in ([], ["injected"])


@on_workers(4)
def test_two_levels_and_shards(worker: int, world_size: int) -> None:
    """The errors of a node have the sum of its workers' pseudo-gradients."""
    mesh = init_device_mesh("cpu", (2, 2))
    training = Training(worker, "rank", EVERY, node_group=mesh)
    training.train(EVERY)
    assert training.sync._engine.communicator.inside is not None
    for last in itertools.count(1):
        training.train(EVERY - 1)
        kept = owed(training.sync)
        # The smallest fragments have one tensor each. Those that were averaged and written already are taken back too.
        with failing(last, 50 if last % 2 else 200) as failures:
            training.train(1)
        training.check()
        if not failures:
            break
        assert training.sync.since >= EVERY
        # Rows of the errors may have moved to another worker of the node.
        assert float(mean(kept - owed(training.sync)).abs().max()) < LOST, last
        training.train(EVERY)
    assert last > 2, "no message has failed"
    training.finish()
    training = Training(worker, "ternary", EVERY, node_group=mesh)
    training.train(2 * EVERY)
    training.finish()
    # The exchange of one FSDP2 shard fails. The other shard hears of it, and both send their changes again.
    for config in ("ternary", "rank"):
        training = InFSDP2(worker, config, 1)
        for step in range(4):
            with failing(step if worker % 2 == 0 else 0, 50) as failures:
                training.train(1)
            assert bool(failures) == (step > 0 and worker % 2 == 0)
            assert training.sync.since == step
            training.check()
        training.finish()
        assert theta(training.sync).isfinite().all()
    # With a delay, the second of several fragments fails on all workers.
    training = InFSDP2(worker, "ternary", 6, delay=5)
    training.train(6)
    with failing(3, 50) as failures:
        training.train(5)
    assert failures
    training.train(7)
    training.finish()
