"""Workers under torchft's Manager in processes of their own, the faults that are injected, and what comes of it."""

import datetime
import functools
import io
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from powersgd_triton.comm import exchange
from powersgd_triton.elastic import group
from tests.support.distributed import forkserver
from tests.support.elastic.ledger import Outcome, checked
from tests.support.elastic.trainers import TRAINERS, Fault, Scenario
from tests.support.programs import DOCS

WORKERS = 3
LIMIT = 120.0
"""Seconds after which a scenario counts as hung."""


def new_manager(index: int, lighthouse: str, timeout: float, load: Any, save: Any) -> Any:
    from torchft import Manager, ProcessGroupGloo

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Let torchft listen there only, as the guide does.
    runpy.run_path(str(DOCS / "examples" / "train_torchft.py"))["listen_on"]("127.0.0.1")
    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), load_state_dict=load, state_dict=save, min_replica_size=1,
        use_async_quorum=False, timeout=limit, quorum_timeout=datetime.timedelta(seconds=30), connect_timeout=limit,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse,
        replica_id=f"w{index}", hostname="127.0.0.1", heartbeat_interval=datetime.timedelta(milliseconds=50),
    )  # fmt: skip
    manager.kept = store
    return manager


class Worker:
    """A trainer that suffers its faults. Files have what it logs and notes."""

    def __init__(self, index: int, life: int, scenario: Scenario, folder: str, lighthouse: str) -> None:
        self.index, self.life, self.scenario, self.folder = index, life, scenario, Path(folder)
        self.file = self.folder / f"attempts-{index}-{life}.pkl"
        self.lighthouse = lighthouse
        self.trainer = TRAINERS[scenario.door](index, life, scenario, self.connect, self.log)
        self.manager = self.trainer.manager
        self.inject()

    def connect(self, load: Any, save: Any) -> Any:
        manager = new_manager(self.index, self.lighthouse, self.scenario.timeout, load, save)
        if self.life == 0:
            # From now on each sends heartbeats, so that the first quorum is one of all.
            self.note("ready", True)
            while not all((self.folder / f"ready-{other}-0").exists() for other in range(WORKERS)):
                time.sleep(0.01)
        return manager

    def log(self, record: dict[str, Any]) -> None:
        with self.file.open("ab") as file:
            pickle.dump(record, file)

    def inject(self) -> None:
        """Let this worker count the collectives of a step, and suffer its faults."""
        from torchft.checkpointing import http_transport

        begin, trainer = group.ManagedCommunicator._begin, self.trainer
        mine = [fault for fault in self.scenario.faults if (fault.victim, fault.life) == (self.index, self.life)]

        def here(place: str, number: int) -> Fault | None:
            step = self.manager.current_step()
            return next((f for f in mine if (f.step, f.collective, f.place) == (step, number, place)), None)

        def counted(communicator: Any, name: str, *arguments: Any) -> Any:
            trainer.count += 1
            if here("before", trainer.count):
                self.die()
            work = begin(communicator, name, *arguments)
            if here("inside", trainer.count):
                self.die()
            if fault := here("stop", trainer.count):
                mine.remove(fault)
                self.stop(fault.seconds)
            return functools.partial(waited, communicator, work, trainer.count)

        def waited(communicator: Any, wait: Callable[[], object], number: int) -> None:
            wait()
            if here("after", number):
                self.die()
            if fault := here("deaf", number):
                mine.remove(fault)
                self.note("deaf", time.time())
                communicator.lost = True
                raise RuntimeError("this worker does not hear of the end")

        for fault in self.scenario.faults:
            if fault.place == "source":
                http_transport._streaming_save = functools.partial(self.heal, fault, http_transport._streaming_save)
        group.ManagedCommunicator._begin = counted  # type: ignore[assignment, method-assign]

    def die(self) -> None:
        """Write what this worker has sent, and end as if its power had failed."""
        self.note("sent", self.trainer.end())
        self.note("killed", time.time())
        os.kill(os.getpid(), signal.SIGKILL)

    def heal(self, fault: Fault, save: Any, state: Any, stream: Any) -> None:
        """Send the state to a worker that heals. If nobody has done so since the fault's step, be killed in between."""
        try:
            if self.manager.current_step() < fault.step:
                raise FileExistsError
            (self.folder / "asked").touch(exist_ok=False)
        except FileExistsError:
            save(state, stream)
            return
        # Now this worker waits for the other one in the first collective of the new quorum.
        time.sleep(0.2)
        save(state, content := io.BytesIO())
        self.trainer.noted = {}
        self.trainer.end()
        for name in ("killed", "source"):
            self.note(name, time.time())
        stream.write(content.getvalue()[: fault.collective * len(content.getvalue()) // 2])
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, seconds: float) -> None:
        self.note("killed", time.time())
        if os.fork() == 0:
            time.sleep(seconds)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    def note(self, name: str, content: Any) -> None:
        path = self.folder / f"{name}-{self.index}-{self.life}"
        path.with_suffix(".new").write_bytes(pickle.dumps(content))
        path.with_suffix(".new").replace(path)


def worker(index: int, life: int, scenario: Scenario, folder: str, lighthouse: str) -> None:
    """Train until the last step, in a process of its own."""
    log = os.open(Path(folder, f"log-{index}-{life}.txt"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    torch.set_num_threads(1)
    # Of DDP's buckets, each has collectives of its own, in which a fault may come.
    exchange.JOINED = 0
    code = 1
    try:
        Worker(index, life, scenario, folder, lighthouse).trainer.run()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # torchft's threads would go on.
    os._exit(code)


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
