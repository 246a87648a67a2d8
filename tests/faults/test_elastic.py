"""A job under torchrun's elastic agents loses a worker in the middle of a step and goes on with fewer."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checks import same_bits
from tests.support.distributed import run
from tests.support.elastic_training import DEATH, EVERY, STEPS, WORKERS, train
from tests.support.programs import ROOT
from tests.support.training import relative

LAST = DEATH // EVERY * EVERY
"""Steps before the last checkpoint that was written before the death."""
SECONDS = 900
RENDEZVOUS = {
    "is_host": 0,
    "join_timeout": SECONDS,
    "last_call_timeout": 1,
    # A machine that says nothing for so long is taken for dead.
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 8,
}


def agent(folder: Path, port: int, machine: int) -> subprocess.Popen[bytes]:
    """That of one machine, with one worker."""
    settings = {
        "nnodes": f"{WORKERS - 1}:{WORKERS}",
        "nproc-per-node": 1,
        "max-restarts": 3,
        "rdzv-backend": "c10d",
        "rdzv-id": "elastic",
        "rdzv-endpoint": f"127.0.0.1:{port}",
        "local-addr": "127.0.0.1",
        "rdzv-conf": ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items()),
    }
    options = [f"--{key}={value}" for key, value in settings.items()]
    # Else the first agent's store serves all incarnations, and gloo meets addresses of the dead in it.
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / f"log.{machine}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "-m", train.__module__, str(folder)],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_job(folder: Path) -> None:
    # The machines meet at a store that outlives all of them; the system chooses its port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.extend(agent(folder, store.port, machine) for machine in range(WORKERS))
        deadline = time.monotonic() + SECONDS
        for one in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(max(0.0, deadline - time.monotonic()))
        codes = [one.poll() for one in running]
    finally:
        for one in running:
            if one.poll() is None:
                # Its worker notices and ends itself.
                one.send_signal(signal.SIGKILL)
                one.wait()
    logs = "\n".join((folder / f"log.{machine}").read_text() for machine in range(WORKERS))
    # None: not done in time.
    assert sorted(codes, key=str) == [-signal.SIGKILL, 0, 0], f"{codes}\n{logs}"


def uninterrupted(worker: int, world_size: int, folder: Path) -> dict[str, Any]:
    """A run in a folder in which nothing is but the checkpoint from before the death."""
    own = folder.parent / "uninterrupted"
    if worker == 0:
        shutil.copytree(folder / str(LAST), own / str(LAST))
    dist.barrier()
    return train(own, worker, world_size)


# Agents, and workers that they start twice: half a minute, in which the machine mostly waits.
@pytest.mark.slow
def test_a_job_goes_on_with_fewer_workers_from_the_last_checkpoint(tmp_path: Path) -> None:
    """With the bits of an uninterrupted run: gloo's sum of two workers does not depend on timing."""
    job = tmp_path / "job"
    job.mkdir()
    run_job(job)
    for step, workers in ((LAST, WORKERS), (LAST + EVERY, WORKERS - 1), (STEPS, WORKERS - 1)):
        assert len(list(job.glob(f"{step}/error.*"))) == workers
    own = [torch.load(path) for path in job.glob(f"{LAST}/error.*")]
    for worker, expected in enumerate(run(uninterrupted, WORKERS - 1, job)):
        seen = torch.load(job / f"result.{worker}")
        assert seen["first"] == LAST
        assert same_bits(seen["parameters"], expected["parameters"])
        assert same_bits(seen["error"], expected["error"])
        # What goes on is the mean of all errors, with the dead worker's share.
        for name, error in seen["loaded"].items():
            errors = torch.stack([errors[name] for errors in own])
            assert relative(error, errors.mean(0)) < 1e-6
            assert min(relative(error, one) for one in errors) > 0.1
