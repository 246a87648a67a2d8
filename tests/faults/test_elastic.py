"""A job under torchrun's elastic agents loses a worker in the middle of a step and goes on with fewer."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checks import same_bits
from tests.support.distributed import run
from tests.support.elastic_training import DEATH, EVERY, STEPS, WORKERS, checkpoint_path, train
from tests.support.training import relative

# Agents, and workers that they start twice: half a minute, in which the machine mostly waits.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LAST = DEATH // EVERY * EVERY
"""Steps before the last checkpoint that was written before the death."""
SECONDS = 900
Results = list[dict[str, Any]]


def agents(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """One agent for each machine, with one worker each."""
    rendezvous = {
        "is_host": 0,
        "join_timeout": SECONDS,
        "last_call_timeout": 1,
        # A machine that says nothing for so long is taken for dead.
        "keep_alive_interval": 1,
        "keep_alive_max_attempt": 8,
    }
    for machine in range(WORKERS):
        with (folder / f"log.{machine}").open("wb") as log:
            yield subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", f"--nnodes={WORKERS - 1}:{WORKERS}",
                    "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic",
                    f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
                    f"--rdzv-conf={','.join(f'{key}={value}' for key, value in rendezvous.items())}",
                    "--module", "tests.support.elastic_training", str(folder),
                ],
                cwd=ROOT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                    # Else the first agent's store serves all incarnations, and gloo meets addresses of the dead in it.
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that has ended."""
    folder = tmp_path_factory.mktemp("job")
    # The machines meet at a store that outlives all of them; the system chooses its port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.extend(agents(folder, store.port))
        deadline = time.monotonic() + SECONDS
        for agent in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline - time.monotonic()))
        codes = [agent.poll() for agent in running]
    finally:
        for agent in running:
            if agent.poll() is None:
                # Its worker notices and ends itself.
                agent.send_signal(signal.SIGKILL)
                agent.wait()
    logs = "\n".join((folder / f"log.{machine}").read_text() for machine in range(WORKERS))
    # None: not done in time.
    assert sorted(codes, key=str) == [-signal.SIGKILL, 0, 0], f"{codes}\n{logs}"
    return folder


@pytest.fixture(scope="module")
def resumed(job: Path) -> Results:
    """What the workers found that went on."""
    assert len(list(job.glob("result.*"))) == WORKERS - 1
    return [torch.load(job / f"result.{worker}", weights_only=True) for worker in range(WORKERS - 1)]


def uninterrupted(worker: int, world_size: int, folder: Path) -> dict[str, Any]:
    """A run in a folder in which nothing is but the checkpoint from before the death."""
    own = folder / f"uninterrupted.{worker}"
    own.mkdir()
    shutil.copy(checkpoint_path(folder, LAST), own)
    return train(own, worker, world_size)


def test_job_goes_on_with_fewer_workers_from_the_last_checkpoint(job: Path, resumed: Results) -> None:
    for step, workers in ((LAST, WORKERS), (LAST + EVERY, WORKERS - 1), (STEPS, WORKERS - 1)):
        assert torch.load(checkpoint_path(job, step), weights_only=True)["workers"] == workers
    for seen in resumed:
        assert (seen["first"], seen["workers"], len(seen["losses"])) == (LAST, WORKERS - 1, STEPS - LAST)
        assert seen["losses"][-1] < seen["losses"][0]


def test_trajectory_is_an_uninterrupted_run_s(job: Path, resumed: Results) -> None:
    """In all bits: the same operations on the same numbers, and gloo's sum of two workers does not depend on timing."""
    for seen, expected in zip(resumed, run(uninterrupted, WORKERS - 1, job), strict=True):
        assert seen["losses"] == expected["losses"]
        assert same_bits(seen["parameters"], expected["parameters"])
        assert same_bits(seen["error"], expected["error"])


def test_mean_error_of_all_workers_is_what_goes_on(job: Path, resumed: Results) -> None:
    """Also the dead worker's share. The mean of three fp32 numbers has two roundings of a sum and one of a quotient."""
    own = [torch.load(job / f"error.{LAST}.{worker}", weights_only=True) for worker in range(WORKERS)]
    for seen in resumed:
        assert len(seen["loaded"]) == 6
        for name, error in seen["loaded"].items():
            errors = torch.stack([errors[name] for errors in own]).double()
            roundings = 3 * 2.0**-24 * errors.abs().sum(0) / WORKERS
            assert ((error - errors.mean(0)).abs() <= 1.01 * roundings).all()
            assert min(relative(error, one) for one in errors) > 0.1
