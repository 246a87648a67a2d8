"""A worker that trains with DDP and the hook on gradients of its choice, and keeps the ledger."""

import dataclasses
import gc
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.faults.ledger import Fate, Ledger
from tests.support.training import Given, state_for

SHAPES: dict[str, tuple[int, ...]] = {
    "first": (24, 18),
    "first_bias": (24,),
    "twin": (24, 18),
    "conv": (8, 3, 3, 3),
    "conv_bias": (8,),
    "column": (40, 1),
    "head": (20, 16),
    "head_bias": (20,),
}
"""In the order of the forward pass: DDP's buckets begin with the last one."""

MATRICES = [name for name, shape in SHAPES.items() if len(shape) > 1]
BIASES = [name for name, shape in SHAPES.items() if len(shape) == 1]
# Bucket sizes in MB, for five buckets, four, and one.
CAPS = (0.001, 0.0015, 1.0)
Gradients = dict[str, Tensor]


class InjectedError(Exception):
    """An exception in the middle of a backward pass."""


def _fail(gradient: Tensor) -> None:
    raise InjectedError


@dataclasses.dataclass(frozen=True)
class Setting:
    """How an episode trains: ``fields`` of the state, whether the loss is scaled, and the size of buckets in MB."""

    fields: dict[str, Any]
    scaled: bool
    cap: float
    # Of random runs: whether DDP's gradients are views of its buckets, and stay from step to step.
    view: bool = False
    stay: bool = False

    @classmethod
    def draw(cls, dice: random.Random, *, scaled: bool | None = None, algorithm: str | None = None) -> "Setting":
        fields = {
            "matrix_approximation_rank": dice.choice((1, 2, 3)),
            "algorithm": dice.choice(("standard", "alternating")) if algorithm is None else algorithm,
            "error_dtype": dice.choice((None, None, None, "bf16")),
        }
        return cls(fields, dice.random() < 0.3 if scaled is None else scaled, dice.choice(CAPS[:2]))

    @classmethod
    def vary(cls, dice: random.Random) -> "Setting":
        """Draw everything."""
        drawn = cls.draw(dice)
        more = {
            "start_powerSGD_iter": dice.choice((0, 0, 3)),
            "min_compression_rate": dice.choice((0, 0.5)),
            "iterations": dice.choice((1, 1, 2)),
            "warm_start": drawn.fields["algorithm"] == "alternating" or dice.random() < 0.7,
        }
        return cls(drawn.fields | more, drawn.scaled, drawn.cap, view=dice.random() < 0.5, stay=dice.random() < 0.5)


class Trainer:
    """One of several workers that do the same. ``dice`` are the same on all of them."""

    def __init__(self, worker: int, workers: int, dice: random.Random) -> None:
        self.worker, self.workers, self.dice = worker, workers, dice
        self.generator = torch.Generator().manual_seed(dice.randrange(1 << 40) * 64 + worker)
        self.model = Given(SHAPES)
        self.replica: DistributedDataParallel | None = None
        self.lost: list[str] = []
        self.poisoned: list[str] = []
        self.buckets: list[list[str]] = []
        self.returned: Gradients = {}
        self.skipped = 0
        self._wrapped: tuple[float, bool] | None = None
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}

    def begin(self, setting: Setting) -> None:
        """A state that owes nothing."""
        self.setting = setting
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3, enabled=setting.scaled)
        self.state = self.new_state()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=2.0**-20)
        if self._wrapped != (setting.cap, setting.view):
            self.wrap(setting.cap)
        self.ledger = Ledger(SHAPES, self.workers, self.state.config)

    def new_state(self, **fields: Any) -> PowerSGDState:
        state = state_for(self.model, **{**self.setting.fields, **fields})
        if self.setting.scaled:
            state.attach(self.scaler)
        return state

    def wrap(self, cap: float) -> None:
        """Wrap the model anew, in buckets of other sizes."""
        self.unwrap()
        view = self.setting.view
        self.replica = DistributedDataParallel(
            self.model, bucket_cap_mb=cap, find_unused_parameters=True, gradient_as_bucket_view=view
        )
        self.replica.register_comm_hook(self, _recorded)
        self._wrapped = cap, view

    def unwrap(self) -> None:
        """Let go of the wrapper, whose hooks would otherwise stay with the parameters."""
        self.replica = None
        gc.collect()

    def regroup(self, saved: Mapping[str, Any]) -> None:
        """Go on from a saved state in the process group that is the default one now."""
        self.workers = dist.get_world_size()
        self.state = self.new_state()
        self.state.load_state_dict(saved)
        self.ledger.load(self.state.config, self.workers)
        self.wrap(self.setting.cap)

    def gradients(self, size: float = 1.0) -> Gradients:
        """This worker's, drawn at random."""
        return {name: size * torch.randn(shape, generator=self.generator) for name, shape in SHAPES.items()}

    def step(
        self, given: Gradients | None = None, *, before: Sequence[Gradients] = (), spoiled: Collection[str] | None = ()
    ) -> None:
        """One step, with micro-batches ``before`` the last one, and its entry in the ledger.

        Averages of ``spoiled`` parameters must not be finite. Without one the step must be applied. None: either way.
        """
        given = self.gradients() if given is None else given
        scale = self.scaler.get_scale()
        assert self.replica is not None
        compresses = self.state.iter >= self.state.config.start_iter
        self.optimizer.zero_grad(set_to_none=not self.setting.stay)
        self.buckets = []
        for micro in before:
            with self.replica.no_sync():
                self.scaler.scale(self.replica(micro)).backward()
        self.scaler.scale(self.replica(given)).backward()
        total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for micro in [*before, given]:
            for name, gradient in micro.items():
                total[name] += scale * gradient
        # Where no worker uses a parameter, DDP discards its average.
        averages = {
            name: (p.grad if p.grad is not None and p.grad.any() else self.returned[name]).detach().clone()
            for name, p in self.model.named_parameters()
        }
        finite = all(bool(average.isfinite().all()) for average in averages.values())
        self._update(finite)
        self._enter(total, averages, scale, compresses)
        self.skipped += not finite
        if spoiled is not None:
            missed = [name for name in spoiled if averages[name].isfinite().all()]
            if missed:
                self.lost.append(f"a non-finite step looks finite in {missed}")
            if not finite and not spoiled:
                self.lost.append("a step that should be finite is not")

    def _update(self, finite: bool) -> None:
        """As users do, with or without a scaler: what is not finite is not applied."""
        weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        if self.setting.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite:
            self.optimizer.step()
        used = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.grad is not None]
        if not finite and any(not torch.equal(parameter, weights[name]) for name, parameter in used):
            self.lost.append("the optimizer applied a step that is not finite")
        if any(not parameter.isfinite().all() for _, parameter in used):
            self.poisoned.append("weights")

    def _enter(self, total: Gradients, averages: Gradients, scale: float, compresses: bool) -> None:
        given = self._gathered({name: gradient.double() / scale for name, gradient in total.items()})
        bits = self._gathered({name: average.view(torch.int32).double() for name, average in averages.items()})
        if any(not torch.equal(bits[0][name], other[name]) for other in bits for name in SHAPES):
            self.lost.append("workers have different averages")
        broken = [bucket for bucket in self.buckets if not all(averages[name].isfinite().all() for name in bucket)]
        spoiled = {name for bucket in broken for name in bucket}
        for name in SHAPES:
            fate = Fate.APPLIED
            if spoiled:
                kept = name not in spoiled and self.ledger.ranks[name] and compresses
                fate = Fate.CARRIED if kept else Fate.DROPPED
            self.ledger.enter(name, fate, [gradients[name] for gradients in given], averages[name].double() / scale)

    def fail(self, name: str) -> None:
        """A backward pass that fails at a parameter, on all workers. What was compressed is carried."""
        given = self.gradients()
        with mock.patch.object(self.model, "at", (name, _fail)):
            self.interrupted(given, InjectedError)
        self.enter_void(given)

    def interrupted(self, given: Gradients, *expected: type[Exception]) -> str:
        """A backward pass that must end with such an exception. Return its name and what it says."""
        assert self.replica is not None
        self.optimizer.zero_grad()
        self.buckets = []
        try:
            self.scaler.scale(self.replica(given)).backward()
        except expected as error:
            return f"{type(error).__name__}: {error}"
        self.lost.append("a backward pass that was to fail looks complete")
        return "nothing"

    def enter_void(self, given: Gradients) -> None:
        """Enter a step that was begun and will never be applied. DDP does not go on: its wrapper is replaced."""
        self.wrap(self.setting.cap)
        scale = self.scaler.get_scale()
        everyone = self._gathered({name: (scale * g).double() / scale for name, g in given.items()})
        self.ledger.enter_void(self.buckets, everyone)

    def audit(self) -> None:
        """Compare what all workers owe with the ledger, and look whether anything in the state is not finite."""
        self.lost += self.ledger.differences(self._gathered(self.owed()))
        for name, parts in self.state.state_dict()["matrices"].items():
            self.poisoned += [f"{part} of {name}" for part, tensor in parts.items() if not tensor.isfinite().all()]

    def owed(self) -> Gradients:
        """What this worker owes of every parameter, in fp64."""
        errors = self.state.error()
        return {name: errors.get(name, torch.zeros(shape)).double() for name, shape in SHAPES.items()}

    def _gathered(self, named: Gradients) -> list[Gradients]:
        """Every worker's fp64 tensors."""
        mine = torch.cat([named[name].reshape(-1) for name in SHAPES])
        everyone = [torch.empty_like(mine) for _ in range(self.workers)]
        dist.all_gather(everyone, mine)
        sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
        return [
            {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), flat.split(sizes), strict=True)}
            for flat in everyone
        ]


def _recorded(trainer, bucket):
    """The hook with the state of the trainer's current episode. Without annotations, which DDP would compare."""
    trainer.buckets.append([trainer._names[parameter] for parameter in bucket.parameters()])
    trainer.returned.update(zip(trainer.buckets[-1], bucket.gradients(), strict=True))
    return powerSGD_hook(trainer.state, bucket)
