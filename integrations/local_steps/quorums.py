"""Local steps whose workers are those of a ``torchft.Manager``'s quorums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from powersgd_triton.core.engine import Engine
from powersgd_triton.elastic.managed import Managed
from powersgd_triton.integrations.local_steps.outer_state import OuterState
from powersgd_triton.integrations.local_steps.pending_exchange import PendingExchange


class Quorums(Managed):
    """The workers of each new quorum, which the next exchange may not have.

    A worker that heals takes over θ, the outer optimizer and buffers of another one, beside the engine's state. A
    survivor keeps what it has changed and not sent, θ − its parameters. If the others have applied an exchange of which
    it does not know, it sends its changes again, and its error has lost what was sent of them. A worker that is new
    starts from θ.
    """

    def __init__(self, manager: Any, engine: Engine, outer: OuterState) -> None:
        super().__init__(manager, engine)
        self._outer = outer
        # Number of steps so far, as of the last exchange that was tried.
        self._steps = 0

    def start(self, steps: int) -> int:
        """Find the workers of an exchange. Return the number of steps so far: a worker that heals has the others'."""
        self._steps = steps
        self._manager.start_quorum()
        self._ready = self.begin()
        return self._steps

    def run(self, begin: Callable[[], PendingExchange]) -> PendingExchange | None:
        """Begin an exchange. None if it cannot begin."""
        pending = self.guarded(begin) if self._ready else None
        if pending is None:
            self._manager.should_commit()
        return pending

    def advance(self, pending: PendingExchange, *, finish: bool) -> bool:
        """Do the same as the method of ``pending``. The exchange ``counts`` if the manager commits it."""
        ended = True
        try:
            # A lost worker ends it too.
            ended = self.guarded(lambda: pending.advance(finish=finish)) is not False
        finally:
            if ended and not self._manager.should_commit():
                self._repeat(pending)
        return ended

    def _repeat(self, pending: PendingExchange) -> None:
        """Let the next exchange send all of one that is not applied."""
        if pending.counts:
            pending.take_back()
        own = {s.name for bucket in self.sent.products for s in bucket.layout.compressed}
        own |= {s.name for layout in self.sent.left for s in layout.segments}
        gradients, _ = self._outer.pseudo_gradients(pending.finite, pending.begun)
        self.sent.exact = {name: sent for name, sent in gradients.items() if name not in own}
        pending.counts = False

    def save(self) -> dict[str, Any]:
        outer = self._outer
        buffers = {name: buffer.clone() for name, buffer in outer.local.buffers()}
        theta = {name: tensor.clone() for name, tensor in outer.theta().items()}
        own = {"shared": theta, "buffers": buffers, "outer": outer.optimizer.state_dict(), "steps": self._steps}
        return {**super().save(), **own}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        outer, fresh = self._outer, self._quorum is None
        super().load(state)
        changes, _ = outer.pseudo_gradients()
        values = {}
        for name, theta in outer.theta().items():
            theta.copy_(state["shared"][name])
            values[name] = (
                theta if fresh else theta - outer.local.without_padding(changes[name], theta).to(theta.device)
            )
        outer.write(values)
        for name, buffer in outer.local.buffers() if fresh else ():
            buffer.copy_(state["buffers"][name])
        outer.optimizer.load_state_dict(state["outer"])
        self._steps = state["steps"]
