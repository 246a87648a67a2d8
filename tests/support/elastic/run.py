"""Runs a scenario, whose workers train with each integration, and checks what they have logged."""

import dataclasses
import itertools
import os
import pickle
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.distributed import forkserver
from tests.support.elastic.worker import SHAPES, WORKERS, Scenario, Trainer
from tests.support.training import Given

LIMIT = 120.0
"""Seconds after which a scenario counts as hung."""


@dataclasses.dataclass
class Outcome:
    """What has come of a scenario.

    Attributes:
        delays: Seconds from each fault to the next step that was applied.
        voids: Attempts of the survivors that were not applied, at most of any one worker.
        lost: Largest error of conservation, relative to what was sent.
        unequal: Steps whose averages or parameters differ between workers.
        split: Steps that some workers applied and another one, which took part, did not.
    """

    delays: list[float]
    voids: int
    lost: float
    unequal: int
    split: int
    hung: bool
    steps: int
    failed: list[str]
    collectives: int
    """Of an undisturbed step."""


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
        return checked(Path(folder), hung, failed)


def records(path: Path) -> list[dict[str, Any]]:
    found = []
    with path.open("rb") as file:
        while True:
            try:
                found.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return found


def checked(folder: Path, hung: bool, failed: list[str]) -> Outcome:
    logs = {path.stem: records(path) for path in sorted(folder.glob("attempts-*.pkl"))}
    notes = [*folder.glob("source-*")] or [*folder.glob("killed-*"), *folder.glob("deaf-*")]
    kills = [pickle.loads(path.read_bytes()) for path in notes]
    sent = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("sent-*"))]
    whole = [log for log in logs.values() if log and log[-1]["last"]]
    voids = max((sum(not record.get("applied", True) for record in log) for log in whole), default=0)
    logs = {name: [record for record in log if not record.get("doubt")] for name, log in logs.items()}
    applied: dict[int, list[dict[str, Any]]] = {}
    for log in logs.values():
        for record in log:
            if record.get("applied"):
                applied.setdefault(record["step"], []).append(record)
    unequal = split = 0
    lost = 0.0
    for step, found in applied.items():
        first = found[0]
        same = all(r["quorum"] == first["quorum"] and _equal(r["average"], first["average"]) for r in found)
        unequal += not (same and all(_equal(r["parameters"], first["parameters"]) for r in found))
        # What each worker has sent: its errors and its gradient before, without its errors after.
        parts = [
            _left(record, after)
            for log in logs.values()
            for record, after in itertools.pairwise(log)
            if (record["step"], record["quorum"]) == (step, first["quorum"])
        ]
        parts += [s["sent"] for s in sent if (s["step"], s["quorum"]) == (step, first["quorum"])]
        split += first["workers"] > len(found) + sum(s["step"] == step for s in sent)
        if len(parts) == first["workers"]:
            lost = max(lost, *(_gap(name, parts, first) for name in SHAPES))
        else:
            failed.append(f"step {step} has {first['workers']} workers, and {len(parts)} records")
    for log in logs.values():
        for record, after in itertools.pairwise(log):
            won = applied.get(record["step"], [{}])[0].get("quorum") == record["quorum"]
            if not record.get("applied") and not won:
                # Nothing was sent: the error has the gradient, or the step is lost before it was compressed.
                lost = max(lost, *(_kept(name, record, after) for name in SHAPES))
    times = sorted(record["time"] for found in applied.values() for record in found)
    delays = [min((t - kill for t in times if t > kill + 0.05), default=float("inf")) for kill in kills]
    collectives = min((record["collectives"] for found in applied.values() for record in found), default=0)
    return Outcome(delays, voids, lost, unequal, split, hung, len(applied), failed, collectives)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(one[name].equal(other[name]) for name in SHAPES)


def _left(record: dict[str, Any], after: dict[str, Any]) -> dict[str, Tensor]:
    """E + G − E'."""
    return {name: _error(record, name) + record["gradients"][name].double() - _error(after, name) for name in SHAPES}


def _error(record: dict[str, Any], name: str) -> Tensor:
    """E of an attempt. Without a matrix, a tensor has none."""
    error: Tensor = record["before"].get(name, torch.zeros(SHAPES[name]))
    return error.double().view(SHAPES[name])


def _gap(name: str, parts: list[dict[str, Any]], record: dict[str, Any]) -> float:
    total = sum(part[name] for part in parts)
    scale = sum(part[name].norm() for part in parts)
    return float((total - record["workers"] * record["average"][name].double()).norm() / scale)


def _kept(name: str, record: dict[str, Any], after: dict[str, Any]) -> float:
    left = _left(record, after)[name]
    gradient = record["gradients"][name].double()
    scale = gradient.norm() + _error(record, name).norm() + 1e-30
    nothing = left.norm() if record.get("strict") else min(left.norm(), (left - gradient).norm())
    return float(nothing / scale)


class DDPTrainer(Trainer):
    """The same with DistributedDataParallel, in several buckets."""

    def compress(self, config: dict[str, Any]) -> Any:
        from torchft.process_group import ProcessGroupDummy

        group = ProcessGroupDummy(0, 1)
        self.model = DistributedDataParallel(
            Given(SHAPES), process_group=group, find_unused_parameters=True, bucket_cap_mb=0.001
        )
        return attach(self.model, PowerSGDConfig.from_dict(config), manager=self.manager)

    def average(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        self.model(self.gradients).backward()
        return {name: p.grad.clone() for name, p in self.model.module.named_parameters() if p.grad is not None}


class LocalTrainer(Trainer):
    """Local steps. A worker owes E + θ − its parameters."""

    def compress(self, config: dict[str, Any]) -> Any:
        self.model = Given(SHAPES)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(self.life)
        self.changes = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.exchange: dict[str, Any] = {}
        every, delay = self.scenario.rounds
        # The first exchange comes at once, before a fault can be injected.
        return LocalSteps(
            self.model, PowerSGDConfig.from_dict(config), every=every, delay=delay, manager=self.manager
        )  # fmt: skip

    def run(self) -> None:
        manager = self.manager
        if manager.current_step() > 1 and manager._commit_failures == 0:
            # It came when the others had begun, and has sent nothing.
            place = {"step": manager.current_step() - 1, "quorum": manager._quorum_id}
            self.write(**place, before=self.changes, gradients=self.changes, last=False)
        while True:
            self.attempts += 1
            with torch.no_grad():
                for name, change in self.drawn().items():
                    self.model.get_parameter(name).sub_(change)
                    self.changes[name] = self.changes[name] + change
            if manager.current_step() == 0:
                # What it has changed before it heals is dropped.
                self.changes = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            self.handle.step()
            found = self.exchange
            if found and found["step"] >= self.scenario.steps:
                self.write(**found, last=True)
                return
            if found and self.handle._rounds.pending is None:
                theta = self.handle.shared()
                average = {name: self.theta[name].double() - theta[name].double() for name in theta}
                self.write(
                    **found, average=average, applied=manager.current_step() == found["step"] + 1, time=time.time(),
                    workers=manager.num_participants(), parameters=theta, last=False, collectives=self.count,
                    strict=True,
                )  # fmt: skip
                self.exchange = {}
            time.sleep(self.scenario.pause)

    def errors(self) -> dict[str, Tensor]:
        """Return E, as an exchange begins. Note what was owed before the changes of this round."""
        found = super().errors()
        self.count, self.theta = 0, self.handle.shared()
        self.gradients = {n: self.theta[n] - parameter.detach() for n, parameter in self.model.named_parameters()}
        for name, debt in self.gradients.items():
            error = found.get(name, torch.zeros(())).double()
            self.owed[name] = debt.double() + error - self.changes[name].double()
        place = {"step": self.manager.current_step(), "quorum": self.manager._quorum_id}
        self.exchange = {**place, "before": dict(self.owed), "gradients": self.changes}
        self.changes = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        return found


TRAINERS = {"compressor": Trainer, "ddp": DDPTrainer, "local": LocalTrainer}


def worker(index: int, life: int, scenario: Scenario, folder: str, lighthouse: str) -> None:
    """Train until the last step, in a process of its own."""
    log = os.open(Path(folder, f"log-{index}-{life}.txt"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    torch.set_num_threads(1)
    code = 1
    try:
        TRAINERS[scenario.door](index, life, scenario, folder, lighthouse).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # torchft's threads would go on.
    os._exit(code)
