"""A worker that takes local steps with gradients of its choice, and keeps books of what it has changed and sent."""

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from powersgd_triton.integrations.local_steps import LocalSteps, pending_exchange, rounds
from powersgd_triton.integrations.local_steps.outer_state import OuterState
from tests.support.local_steps import CONFIGS, NESTEROV, SGD, mean, real, same_bits

SHAPES = {"w": (12, 8), "v": (7, 9), "b": (9,), "s": (), "e": (0, 4), "c": (3, 5), "z": (4, 3)}
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
OUTER = (None, NESTEROV, SGD, functools.partial(torch.optim.Adam, lr=0.01))
LOST = 1e-5
"""What rounding to fp32 may lose of changes of parameters below 10 in a run."""


class Local:
    """See above. ``state`` is the newest ``LocalSteps``. ``dice`` are the same on all workers.

    The mean over the workers of changed − unsent − E, minus the means that were sent, never changes. What is unsent was
    changed since the last exchange began, so that the local parameters are θ − unsent.
    """

    def __init__(self, worker: int, workers: int, dice: random.Random) -> None:
        self.worker, self.workers, self.dice = worker, workers, dice
        self.generator = torch.Generator().manual_seed(dice.randrange(1 << 40) * 64 + worker)
        self.net = nn.ParameterDict()
        self.lost: list[str] = []
        self.poisoned: list[str] = []

    def begin(self, _setting: Any = None) -> None:
        dice = self.dice
        self.dtypes = {n: torch.complex64 if n == "z" else dice.choice(DTYPES) for n in SHAPES}
        self.every, self.outer, self.share = dice.randrange(1, 7), dice.choice(OUTER), dice.random() < 0.3
        self.delay, self.fragment = dice.randrange(min(self.every, 4)), dice.choice((1 << 25, 50))
        self.setting = (
            f"every={self.every}, {self.delay=}, {self.outer=}, {self.share=}, {self.fragment=}, {self.dtypes}"
        )
        self.renew(dice.choice(list(CONFIGS)))
        self.rebase()

    def renew(self, config: str) -> None:
        """Make a new model, and new local steps. "c" is frozen at first."""
        trains = self.net["c"].requires_grad if self.net else False
        self.config, self.net = config, nn.ParameterDict()
        for name, dtype in self.dtypes.items():
            # Users load parameters that are frozen themselves.
            value = torch.randn(SHAPES[name], generator=self.generator) if name != "c" else torch.ones(SHAPES[name])
            self.net[name] = nn.Parameter(value.to(dtype), name != "c" or trains)
        self.net.register_buffer("average", torch.zeros(5))
        self.net.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.03, momentum=0.5)
        options: dict[str, Any] = {"optimizer": self.optimizer} if self.share else {}
        every = self.every if self.every % 2 else lambda steps: self.every + steps // 30
        self.state = LocalSteps(self.net, CONFIGS[config], every, self.outer, delay=self.delay, **options)
        self.frozen = not trains
        self.state.outer.register_step_pre_hook(lambda *_: self._applied())

    def rebase(self) -> None:
        """Begin the books anew."""
        self.unsent = self.flat(self.state._outer.pseudo_gradients()[0])
        self.changed, self.sent, self.moved = (torch.zeros_like(self.unsent) for _ in range(3))
        self.base, self.frozen = self._balance(), "c" not in self.state.shared()

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        found = {name: real(tensor) for name, tensor in named.items()}
        parts = [found.get(name, torch.zeros_like(real(p))) for name, p in self.net.items()]
        return torch.cat([part.double().reshape(-1) for part in parts])

    def local(self) -> Tensor:
        return self.flat(dict(self.net.items()))

    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """The local parameters, θ and E."""
        return self.local(), self.flat({**self.net, **self.state.shared()}), self.flat(self.state.error())

    def differs(self, before: tuple[Tensor, ...]) -> bool:
        return not all(map(torch.equal, before, self.seen()))

    def _balance(self) -> Tensor:
        return mean(self.changed - self.unsent - self.seen()[2]) - self.sent

    def act(self, call: Callable[[], Any]) -> Any:
        """Call something of the local steps, and note the exchanges that begin in it."""
        with (
            mock.patch.object(rounds, "PendingExchange", self._begun),
            mock.patch.object(pending_exchange, "FRAGMENT", self.fragment),
            mock.patch.object(OuterState, "take_in", functools.partial(self._take_in, OuterState.take_in)),
        ):
            return call()

    def _begun(self, *arguments: Any, **options: Any) -> Any:
        self.drop()
        self.moved, self.kept = self.unsent.clone(), self.seen()[2]
        return pending_exchange.PendingExchange(*arguments, **options)

    def _take_in(self, original: Callable[..., None], new: Mapping[str, Tensor]) -> None:
        """The changes of a parameter that was unfrozen are averaged."""
        original(self.state._outer, new)
        if self.frozen and "c" in new:
            at, self.frozen = self.flat({"c": torch.ones(SHAPES["c"])}), False
            self.sent += at * mean(self.unsent)
            self.unsent *= 1 - at
            self.moved *= 1 - at

    def drop(self) -> None:
        """If this worker is not finite, its changes are lost."""
        if not self.local().isfinite().all():
            self.changed -= self.unsent
            self.unsent.zero_()

    def _applied(self) -> None:
        self.sent += self.flat(
            {n: theta.grad for n, theta in self.state._outer.shared.items() if theta.grad is not None}
        )
        self.unsent -= self.moved
        self.moved = torch.zeros_like(self.moved)

    def step(self) -> None:
        before = self.local()
        for parameter in self.net.values():
            if parameter.requires_grad:
                gradient = torch.randn(parameter.shape, generator=self.generator, dtype=torch.float64)
                parameter.grad = gradient.to(parameter.dtype)
        self.optimizer.step()
        if self.local().isfinite().all():
            self.changed += before - self.local()
            self.unsent += before - self.local()
        self.act(self.state.step)

    def audit(self) -> None:
        """Compare with the books. An exchange under way is finished, and sometimes one begins."""
        if self.dice.random() < 0.5 or self.state._rounds.pending is not None:
            self.act(self.state.finish)
        local, theta, error = self.seen()
        self.poisoned += [str(self.state.steps) for tensor in (local, theta, error) if not tensor.isfinite().all()]
        missing = float((self._balance() - self.base).abs().max())
        if not missing <= LOST or not same_bits(self.flat(self.state.shared())):
            self.lost.append(f"{missing:.3g} of the changes, or workers hold different bits of θ")
        self.audit_local()

    def audit_local(self) -> None:
        local, theta, _ = self.seen()
        eps = {n: torch.full_like(real(p), torch.finfo(p.dtype).eps * (p.itemsize == 2)) for n, p in self.net.items()}
        known = self.flat({name: torch.ones_like(shared) for name, shared in self.state.shared().items()})
        away = (local - (theta - known * self.unsent)).abs() - LOST - self.flat(eps) * (1 + theta.abs())
        if not float(away.max()) <= 0:
            self.lost.append(f"local parameters are {float(away.max()):.3g} away from θ and what is unsent")

    def unwrap(self) -> None:
        """Nothing wraps the model."""

    def regroup(self, saved: Any) -> None:
        """Go on from a saved state in the process group that is the default one now."""
        self.renew(self.config)
        self.state.load_state_dict(saved)
        self.rebase()
