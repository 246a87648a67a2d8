"""Workers under torchft's Manager that train with each integration."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.elastic.worker import SHAPES, Scenario, Trainer
from tests.support.training import Given


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
