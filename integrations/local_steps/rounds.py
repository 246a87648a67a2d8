"""Rounds of local steps: how long they are, and with whom the exchange that ends each of them averages."""

from collections.abc import Callable, Generator
from typing import Any

import torch

from powersgd_triton.comm.agreement import UNDER_WAY, Facts, compare, exhaust, fingerprint, together
from powersgd_triton.config import whole_number
from powersgd_triton.core.loading import errors, forget
from powersgd_triton.core.saved_state import listing
from powersgd_triton.core.undo import Undo
from powersgd_triton.elastic.managed import Managed
from powersgd_triton.integrations.local_steps.local_tensors import kind, unpadded
from powersgd_triton.integrations.local_steps.outer_state import OuterState, Tensors, logger
from powersgd_triton.integrations.local_steps.pending_exchange import PendingExchange

Every = int | Callable[[int], int]


def length(every: Every, steps: int) -> int:
    """Return the length of a round that begins after so many steps. An error if it is not a whole number above 0."""
    return whole_number("every", every(steps) if callable(every) else every, 1)


class Rounds:
    """The steps of this worker, and its exchanges with others. Arguments are those of ``LocalSteps``.

    Without a manager, these are the same workers in each round, which can agree on something before an exchange.

    Attributes:
        quorums: The workers of each round if a manager finds them.
        every, steps, since: See ``LocalSteps``.
        keep: Share of the error that stays in this worker's own parameters. 0 for an error apart.
        pending: The exchange under way, if there is one.
    """

    def __init__(self, outer: OuterState, manager: Any, every: Every, delay: int, keep: float) -> None:
        self._engine, self._outer, self._every, self._delay, self.keep = outer.engine, outer, every, delay, keep
        self.quorums = None if manager is None else Quorums(manager, outer, self)
        self._undo = Undo(outer.engine)
        self.resume(0, 0, self.length(0))

    def resume(self, steps: int, since: int, every: int) -> None:
        """Continue in a round of ``every`` steps of which ``since`` are done."""
        self.steps, self.since, self.every = steps, since, every
        # Number of steps when the last exchange was tried. If it has failed, the next one sends its changes.
        self._tried = steps - since
        self.pending: PendingExchange | None = None
        # ``since`` and ``every`` when the last exchange began, and whether it has counted.
        self._before, self._counted = (since, every), False

    def length(self, steps: int) -> int:
        return length(self._every, steps)

    def step(self) -> None:
        if self.pending is not None and self.pending.counts:
            # The outer optimizer has raised an exception. If it does so again, this step does not count: an exchange
            # may have to begin in it.
            self.advance(finish=False)
        self.steps += 1
        self.since += 1
        self.advance(finish=False)
        if self.steps - self._tried >= self.every:
            self.exchange()

    def finish(self) -> None:
        # What this exchange does not send is an error apart from the parameters.
        keep, self.keep = self.keep, 0.0
        try:
            self.advance(finish=True)
            if self.quorums is None:
                self.catch_up("finish")
            # A state that was saved with ``keep`` may have left the workers apart.
            if self.since > 0 or keep or (self.quorums is None and self.most(self._outer.differs()) > 0):
                self.exchange()
                self.advance(finish=True)
            self._outer.warn()
        finally:
            self.keep = keep

    def exchange(self) -> None:
        """Begin an exchange. Without a delay, finish it."""
        self.advance(finish=True)

        def begin() -> PendingExchange:
            # With a delay, a worker hears of the others one step later: now, it would wait for the slowest one.
            waits = self.quorums is not None or self._engine.communicator.others or not self._counted
            later, self._counted = self._delay > 0 and not waits, False
            meeting = self._meeting(UNDER_WAY if later else "an exchange", begins=True)
            every = next(meeting) if later else exhaust(meeting)
            pending = PendingExchange(self._outer, self._undo, self._delay, meeting, refused=not every)
            self._before = self.since, self.every
            self.since, self.every = 0, every or self.every
            return pending

        self.pending = begin() if self.quorums is None else self.quorums.run(begin)
        self._tried = self.steps
        self.advance(finish=False)

    def advance(self, *, finish: bool) -> None:
        """Advance the exchange under way by one step, or to the end, and use what has arrived."""
        pending, ended = self.pending, True
        if pending is None:
            return
        try:
            if self.quorums is not None and not pending.counts:
                ended = self.quorums.advance(pending, finish=finish)
            elif not pending.counts:
                ended = pending.advance(finish=finish)
                if ended and not pending.counts:
                    logger.warning("another shard of the model was not exchanged; the next exchange sends what changed")
        finally:
            if ended:
                self._end(pending)
        # Not after an exception, perhaps on this worker alone: the others may wait for its messages.
        self._counted = ended and pending.counts

    def _end(self, pending: PendingExchange) -> None:
        """Use what has arrived, or let the next exchange send these changes too."""
        if pending.counts:
            pending.apply(lambda: self.errors(copy=False) if self.keep else {}, self.keep)
            if self.keep:
                forget(self._engine)
            self._undo.begin()
        else:
            since, self.every = self._before
            self.since += since
        self.pending = None

    def errors(self, *, copy: bool = True) -> Tensors:
        """Return {name: E as θ is shaped} of this worker's errors, of tensors of which some was sent."""
        found, theta, local = errors(self._engine, copy=copy), self._outer.theta(), self._outer.local
        return {name: unpadded(E.view(local.shapes[name]), theta[name]) for name, E in found.items()}

    # What workers agree on. All of it is collective ------------------------------------------------------------------

    def most(self, number: int) -> int:
        """Return the greatest number of all workers."""
        least = torch.tensor(-number, device=self._outer.device)
        for workers in (self._engine.communicator, *self._engine.communicator.others):
            workers.minimum(least)
        return -int(least)

    def catch_up(self, call: str) -> None:
        """Count as many steps as the worker that has taken most since the last exchange."""
        facts = {"steps before this round": self.steps - self.since}
        together(call, lambda: (None, facts, {}), self._engine.communicator, self._outer.device)
        ahead = self.most(self.steps) - self.steps
        self.steps, self.since = self.steps + ahead, self.since + ahead

    def meet(self, call: str, *, begins: bool = False) -> int:
        """Take in parameters that are trained since the last call, compare workers, and return the next ``every``."""
        return exhaust(self._meeting(call, begins=begins))

    def _meeting(self, call: str, *, begins: bool) -> Generator[int | None, None, int]:
        """Do what ``meet`` does, in the two parts of ``compare``. Yield its result, or None if this worker refuses."""

        def prepare() -> tuple[tuple[Tensors, int], Facts, Facts]:
            new, step = self._outer.local.unfrozen(), self._engine.iteration
            found: dict[str, Any] = {f"unfrozen {name!r}": kind(tensor) for name, tensor in new.items()}
            if not begins:
                return (new, self.every), {}, found
            every, checks = self.length(self.steps), self._engine.config.check_every
            found |= {"exchanges": step, **self._outer.check()}
            if checks and step and step % checks == 0:
                found |= {f"shared {name!r}": int(fingerprint(theta)) for name, theta in self._outer.theta().items()}
            return (new, every), {"every": every, "steps": self.steps, **self._outer.settings()}, found

        comparison = compare(call, prepare, self._engine.communicator, self._outer.device)
        found_here = next(comparison)
        yield None if found_here is None else found_here[1]
        new, every = exhaust(comparison)
        self._outer.take_in(new)
        return every


class Quorums(Managed):
    """The workers of each new quorum, which the next exchange may not have.

    A worker that heals takes over θ, the outer optimizer and buffers of another one, beside the engine's state. A
    survivor keeps what it has changed and not sent, θ − its parameters. If the others have applied an exchange of which
    it does not know, it sends its changes again, and its error has lost what was sent of them. A worker that is new
    starts from θ.
    """

    def __init__(self, manager: Any, outer: OuterState, rounds: Rounds) -> None:
        super().__init__(manager, outer.engine)
        self._outer, self._rounds = outer, rounds

    def run(self, begin: Callable[[], PendingExchange]) -> PendingExchange | None:
        """Find the workers of an exchange, and begin it. None if it cannot begin."""
        self._manager.start_quorum()
        pending = self.guarded(begin) if self.begin() else None
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

    def _connect(self) -> None:
        super()._connect()
        # A worker that was not in a quorum in which nothing was applied has taken fewer steps, and does not heal.
        own = torch.tensor([self._rounds.steps], device="cpu")
        steps = None if self._communicator.lost else self.guarded(lambda: self._communicator.gather(own))
        if steps is not None:
            self._rounds.steps = int(steps.max())

    def _repeat(self, pending: PendingExchange) -> None:
        """Let the next exchange send all of one that is not applied."""
        if pending.counts:
            pending.take_back()
        own, (gradients, _) = self.sent.names(), self._outer.pseudo_gradients(pending.finite, pending.begun)
        self.sent.exact = {name: sent for name, sent in gradients.items() if name not in own}
        pending.counts = False

    def save(self) -> dict[str, Any]:
        outer = self._outer
        buffers = {name: buffer.clone() for name, buffer in outer.local.buffers()}
        theta = {name: tensor.clone() for name, tensor in outer.theta().items()}
        own = {"shared": theta, "buffers": buffers, "outer": outer.optimizer.state_dict(), "steps": self._rounds.steps}
        return {**super().save(), **own}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        outer, fresh = self._outer, self._fresh
        if other := sorted(state["shared"].keys() ^ outer.theta().keys()):
            raise ValueError(
                f"only one of this worker and that from which it heals trains {listing(other)}: make LocalSteps when "
                "the same parameters are trained"
            )
        super().load(state)
        parts = {name: {"shared": theta} for name, theta in state["shared"].items()}
        changes, _ = outer.pseudo_gradients()
        for name, change in changes.items() if not fresh else ():
            parts[name]["changes"] = unpadded(change, parts[name]["shared"])
        outer.load(parts, own=False)
        for name, buffer in outer.local.buffers() if fresh else ():
            buffer.copy_(state["buffers"][name])
        outer.optimizer.load_state_dict(state["outer"])
        self._rounds.steps = state["steps"]
