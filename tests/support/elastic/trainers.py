"""Workers under torchft's Manager with prescribed gradients. What they log of each attempt is checked by ``ledger``."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig, attach
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.training import Given

SHAPES: dict[str, tuple[int, ...]] = {"bias": (16,), "small": (24, 16), "matrix": (640, 600)}


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a worker in a collective of a step.

    Attributes:
        place: "before", "inside" or "after" the collective it is killed, or "deaf": it does not hear of its end. Or
            "stop": it stops inside, for ``seconds``. Or "source": whichever worker is asked for its state first, by one
            that heals, is killed when it has sent ``collective`` halves of it.
    """

    victim: int
    step: int
    collective: int
    place: str
    seconds: float = 0
    life: int = 0
    """Number of workers that had this place before."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    config: dict[str, Any]
    door: str = "compressor"
    faults: tuple[Fault, ...] = ()
    steps: int = 8
    returns: float | None = None
    """Seconds after which a new worker takes the place of one that was killed."""
    heartbeat: float = 1.0
    timeout: float = 8.0
    pause: float = 0.0
    rounds: tuple[int, int] = (1, 0)
    """Local steps from one exchange to the next, and their delay."""
    error: bool = False
    """Whether errors are read after each vote, which must not change anything."""
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: SHAPES)


class Trainer:
    """A plain loop with a ``Compressor``.

    Args:
        index, life: Its place, and the number of workers that had this place before.
        connect: Returns the manager, given what loads and saves the parameters.
        log: Takes the record of an attempt.
    """

    def __init__(
        self,
        index: int,
        life: int,
        scenario: Scenario,
        connect: Callable[[Any, Any], Any],
        log: Callable[[dict[str, Any]], None],
    ) -> None:
        self.index, self.life, self.scenario, self.log = index, life, scenario, log
        self.parameters = self.new(torch.float64, life)
        self.manager = connect(self.load, lambda: self.parameters)
        self.handle: Any = self.compress({"min_compression_rate": 1, "seed": 3, **scenario.config})
        self.managed = self.handle._managed
        self.attempts = self.count = 0
        self.doubt = False
        # Step and quorum of ``before``.
        self.noted: dict[str, int] = {}
        self.gradients: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        # What local steps owe before the changes of a round.
        self.owed: dict[str, Tensor] = {}
        self.begun, self.managed.begin = self.managed.begin, self.begin

    def compress(self, config: dict[str, Any]) -> Any:
        return Compressor(PowerSGDConfig.from_dict(config), self.new(), manager=self.manager)

    def average(self) -> dict[str, Tensor]:
        """The averages of this attempt's gradients."""
        found: dict[str, Tensor] = self.handle.decompress(self.handle.compress(self.gradients))
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        self.parameters = {name: tensor.clone() for name, tensor in state.items()}

    def run(self) -> None:
        manager = self.manager
        while True:
            manager.start_quorum()
            self.count, self.gradients = 0, self.drawn()
            step, quorum = manager.current_step(), manager._quorum_id
            if step >= self.scenario.steps and self.managed.begin():
                self.log({"step": step, "quorum": quorum, "before": self.before, "last": True})
                return
            self.attempts += 1
            average = self.average() if step < self.scenario.steps else {}
            done = time.time()
            applied = manager.should_commit()
            if applied:
                self.parameters = {name: p - average[name] for name, p in self.parameters.items()}
            if self.scenario.error:
                self.errors()
            if self.doubt:
                continue
            record = {"step": step, "quorum": quorum, "before": self.before, "gradients": self.gradients, "last": False}
            record |= {"average": average, "applied": applied, "workers": manager.num_participants(), "time": done}
            self.log({**record, "parameters": self.parameters})
            time.sleep(self.scenario.pause)

    def begin(self) -> bool:
        """Do what ``Managed.begin`` does, and note the errors before the attempt."""
        ready: bool = self.begun()
        self.doubt = not ready and self.managed._attempt is not None
        if self.doubt:
            # It has failed to heal. What its errors owe is not known yet.
            self.log({**self.place(), "applied": False, "doubt": True, "last": False})
        else:
            self.before, self.noted = self.errors(), self.place()
        return ready

    def place(self) -> dict[str, int]:
        return {"step": self.manager.current_step(), "quorum": self.manager._quorum_id}

    def new(self, dtype: torch.dtype = torch.float32, value: float = 0) -> dict[str, Tensor]:
        return {name: torch.full(shape, value, dtype=dtype) for name, shape in self.scenario.shapes.items()}

    def errors(self) -> dict[str, Tensor]:
        return {name: error.clone() for name, error in self.handle.error().items()}

    def drawn(self) -> dict[str, Tensor]:
        seed = 1_000_003 * self.manager.current_step() + 1009 * self.index + 31 * self.life + self.attempts
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in self.scenario.shapes.items()}

    def end(self) -> dict[str, Any]:
        """Log that this worker ends. Return what the others apply of it if they finish the step."""
        place, found = self.place(), {name: gradient.double() for name, gradient in self.gradients.items()}
        for bucket, product in self.managed.sent.products.items():
            for group, (P, Q) in zip(bucket.layout.groups, bucket.joined(product), strict=True):
                for segment, left, right in zip(group.segments, P, Q, strict=True):
                    found[segment.name] = (left.double() @ right.double().mT).view(segment.shape)
        for held, M in self.managed._engine.residuals.whole.noted():
            for segment in held.layout.segments:
                before = self.before.get(segment.name, torch.zeros(())).double() + self.gradients[segment.name].double()
                found[segment.name] = before - M[segment.span].view(segment.shape).double()
        if self.noted != place:
            # This attempt has not begun, so that these are the errors after the last one.
            self.before = self.errors()
        self.log({"step": place["step"], "quorum": -1, "before": self.owed or self.before, "last": False})
        return {**place, "sent": found}


class DDPTrainer(Trainer):
    """The same with DistributedDataParallel, in several buckets."""

    def compress(self, config: dict[str, Any]) -> Any:
        from torchft.process_group import ProcessGroupDummy

        group = ProcessGroupDummy(0, 1)
        self.model = DistributedDataParallel(
            Given(self.scenario.shapes), process_group=group, find_unused_parameters=True, bucket_cap_mb=0.001
        )
        return attach(self.model, PowerSGDConfig.from_dict(config), manager=self.manager)

    def average(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        self.model(self.gradients).backward()
        return {name: p.grad.clone() for name, p in self.model.module.named_parameters() if p.grad is not None}


class LocalTrainer(Trainer):
    """Local steps. A worker owes E + θ − its parameters."""

    def compress(self, config: dict[str, Any]) -> Any:
        self.model = Given(self.scenario.shapes)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(self.life)
        self.changes = self.new()
        self.exchange: dict[str, Any] = {}
        every, delay = self.scenario.rounds
        # The first exchange comes at once, before a fault can be injected.
        chosen = PowerSGDConfig.from_dict(config)
        return LocalSteps(self.model, chosen, every=every, delay=delay, manager=self.manager)

    def run(self) -> None:
        manager = self.manager
        if manager.current_step() > 1:
            # It came when the others had begun, has sent nothing, and may have applied what they have sent.
            counts = manager._commit_failures == 0
            record = {"step": manager.current_step() - counts, "quorum": manager._quorum_id, "counts": counts}
            self.log({**record, "before": self.changes, "gradients": self.changes, "last": False})
        while True:
            self.attempts += 1
            with torch.no_grad():
                for name, change in self.drawn().items():
                    self.model.get_parameter(name).sub_(change)
                    self.changes[name] = self.changes[name] + change
            if manager.current_step() == 0:
                # What it has changed before it heals is dropped.
                self.changes = self.new()
            self.handle.step()
            found = self.exchange
            if found and found["step"] >= self.scenario.steps:
                self.log({**found, "last": True})
                return
            if found and self.handle._rounds.pending is None:
                theta = self.handle.shared()
                average = {name: self.theta[name].double() - theta[name].double() for name in theta}
                record = {**found, "average": average, "applied": manager.current_step() == found["step"] + 1}
                record |= {"workers": manager.num_participants(), "parameters": theta, "time": time.time()}
                self.log({**record, "last": False, "strict": True})
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
        self.exchange = {**self.place(), "before": dict(self.owed), "gradients": self.changes}
        self.changes = self.new()
        return found


TRAINERS = {"compressor": Trainer, "ddp": DDPTrainer, "local": LocalTrainer}
