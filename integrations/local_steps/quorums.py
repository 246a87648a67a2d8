"""Local steps whose workers change with the quorums of a ``torchft.Manager``."""

from __future__ import annotations

from typing import Any

import torch

from powersgd_triton.core.engine import Engine
from powersgd_triton.elastic.managed import Managed
from powersgd_triton.integrations.local_steps.outer_state import OuterState, without_padding
from powersgd_triton.integrations.local_steps.pending_exchange import PendingExchange


class Quorums(Managed):
    """What a worker that heals takes over of another one beside the engine's state: θ, the outer optimizer, buffers.

    A survivor keeps what it has changed and not sent, θ − its parameters. If the others have applied an exchange of
    which it does not know, it sends its changes again, and its error has lost what was sent of them. A worker that is
    new starts from θ.
    """

    def __init__(self, manager: Any, engine: Engine, outer: OuterState) -> None:
        super().__init__(manager, engine)
        self._outer = outer
        self.steps = 0

    def start(self) -> bool:
        """Start a quorum. Return whether an exchange can run."""
        self._manager.start_quorum()
        return self.begin()

    def advance(self, pending: PendingExchange, *, finish: bool) -> bool:
        """Advance an exchange by one step, or to the end. Return whether it has ended, or has lost a worker."""

        def advance() -> bool:
            ended = pending.advance(finish=finish)
            if ended and pending.counts:
                self._engine.sent += self._outer.average_exactly(pending.unchanged, pending.finite)
            return ended

        return self.guarded(advance) is not False

    def ends(self, pending: PendingExchange | None) -> bool:
        """Vote on an exchange. Return whether it is applied. Else the next exchange sends all."""
        applied = bool(self._manager.should_commit())
        if pending is None or applied:
            return applied and pending is not None and pending.counts
        if pending.counts:
            pending.take_back()
        own = {s.name for bucket in self.sent.products for s in bucket.layout.compressed}
        own |= {s.name for layout in self.sent.left for s in layout.segments}
        gradients, _ = self._outer.pseudo_gradients(pending.finite, pending.begun)
        self.sent.exact = {name: sent for name, sent in gradients.items() if name not in own}
        return False

    def save(self) -> dict[str, Any]:
        outer = self._outer
        buffers = {name: buffer.clone() for name, buffer in outer.local.buffers()}
        theta = {name: tensor.clone() for name, tensor in outer.theta().items()}
        own = {"shared": theta, "buffers": buffers, "outer": outer.optimizer.state_dict(), "steps": self.steps}
        return {**super().save(), **own}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        outer, fresh = self._outer, self._quorum is None
        super().load(state)
        changes, _ = outer.pseudo_gradients()
        values = {}
        for name, theta in outer.theta().items():
            theta.copy_(state["shared"][name])
            values[name] = theta if fresh else theta - without_padding(changes[name], theta).to(theta.device)
        outer.write(values)
        for name, buffer in outer.local.buffers() if fresh else ():
            buffer.copy_(state["buffers"][name])
        outer.optimizer.load_state_dict(state["outer"])
        self.steps = state["steps"]
