"""Runs a scenario, whose workers train in processes, and checks what they have logged."""

import os
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.distributed import forkserver
from tests.support.elastic.ledger import Outcome, checked
from tests.support.elastic.trainers import Scenario
from tests.support.elastic.worker import WORKERS, worker

LIMIT = 120.0
"""Seconds after which a scenario counts as hung."""


def run(scenario: Scenario) -> Outcome:
    from torchft.coordination import LighthouseServer

    milliseconds = int(1000 * scenario.heartbeat)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        server = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=15000, quorum_tick_ms=20,
            heartbeat_timeout_ms=milliseconds,
        )  # fmt: skip
        address = "http://127.0.0.1:" + server.address().rsplit(":", 1)[1]
        context = forkserver()

        def start(index: int, life: int) -> Any:
            process = context.Process(target=worker, args=(index, life, scenario, folder, address), daemon=True)
            process.start()
            return process

        processes = {(index, 0): start(index, 0) for index in range(WORKERS)}
        deadline, hung = time.monotonic() + LIMIT, False
        while any(process.is_alive() for process in processes.values()):
            time.sleep(0.02)
            for index, life in list(processes):
                gone = processes[index, life].exitcode == -9 and (index, life + 1) not in processes
                if gone and scenario.returns is not None:
                    killed = pickle.loads(Path(folder, f"killed-{index}-{life}").read_bytes())
                    if time.time() > killed + scenario.returns:
                        processes[index, life + 1] = start(index, life + 1)
            if time.monotonic() > deadline:
                hung = True
                for process in processes.values():
                    if process.is_alive():
                        process.kill()
                        process.join()
        server.shutdown()
        failed = [
            f"worker {index}, life {life}:\n{Path(folder, f'log-{index}-{life}.txt').read_text()[-3000:]}"
            for (index, life), process in processes.items()
            if process.exitcode not in (0, -9) or os.environ.get("SHOW")
        ]
        logs = {path.stem: records(path) for path in sorted(Path(folder).glob("attempts-*.pkl"))}
        notes = [*Path(folder).glob("source-*")] or [*Path(folder).glob("killed-*"), *Path(folder).glob("deaf-*")]
        faults, sent = (
            [pickle.loads(path.read_bytes()) for path in paths] for paths in (notes, Path(folder).glob("sent-*"))
        )
        return checked(logs, sent, faults, hung, failed)


def records(path: Path) -> list[dict[str, Any]]:
    found = []
    with path.open("rb") as file:
        while True:
            try:
                found.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return found
