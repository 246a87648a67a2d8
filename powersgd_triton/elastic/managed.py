"""An engine whose workers change with the quorums of a ``torchft.Manager``."""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from powersgd_triton.checkpoint import pickled, unpickled
from powersgd_triton.config import logger
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.loading import adopt
from powersgd_triton.core.saved_state import LoadReport, SavedState
from powersgd_triton.elastic.group import ManagedCommunicator
from powersgd_triton.elastic.unsettled import Unsettled

REMEMBERED = 1000
"""Steps of which a worker that heals can learn whether they were applied."""

T = TypeVar("T")
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of engines of each manager."""


def _voted(vote: Callable[..., bool], reference: weakref.ref["Managed"], *args: Any, **options: Any) -> bool:
    """Vote whether a step is applied, and note the outcome of the open attempt."""
    applied, managed = vote(*args, **options), reference()
    if managed is not None and managed._applied is None:
        managed._applied = applied
    return applied


class Managed:
    """Connects an engine to each new quorum, and settles each step when its outcome is known.

    Each worker votes for itself whether a step is applied. So one that has not heard of a step's end may be the only
    one that does not apply it. It learns that in the next quorum: it heals from another worker, whose history says in
    which quorum each step was applied.

    Its state is registered with the manager, and can be taken from one worker alone. It has bases, ranks and history
    but no errors: a worker that heals keeps its own, and a new one starts with zero.

    ValueError: The manager or the configuration asks for what is not supported.
    """

    def __init__(self, manager: Any, engine: Engine) -> None:
        mode = getattr(getattr(manager, "_replica_world_size_mode", None), "name", "DYNAMIC")
        for refused, why in (
            (getattr(manager, "_use_async_quorum", False), "torchft.Manager(…, use_async_quorum=False)"),
            (mode != "DYNAMIC", f"world_size_mode=DYNAMIC, not {mode}: spares would send no gradients"),
            (engine.communicator.node_group is not None, "no node_group: workers of a node come and go"),
            (engine.plan.measures, 'no compression="auto" or max_overhead, which measure steps: give a number'),
        ):
            if refused:
                raise ValueError(f"manager= needs {why}")
        self._manager, self._engine, self.sent = manager, engine, Unsettled(engine)
        # The quorum to which the engine is connected; (quorum, step) of the last attempt until it is settled, and how
        # the vote about it has ended. The vote after that may be about a step of another model.
        self._quorum: int | None = None
        # Whether it was never in a quorum, and has not healed.
        self._fresh = True
        self._attempt: tuple[int, int] | None = None
        self._applied: bool | None = None
        # {step: quorum in which it was applied}.
        self._history: dict[int, int] = {}
        engine.residuals.decide, engine.residuals.agree = self._look, self._agree
        engine.residuals.forgotten = self.sent.forget
        engine.connect(ManagedCommunicator())
        number = _numbers[manager] = _numbers.get(manager, 0) + 1
        manager.should_commit = functools.partial(_voted, manager.should_commit, weakref.ref(self))
        manager.register_state_dict_fn("powersgd" if number == 1 else f"powersgd {number}", self.load, self.save)

    # A step ----------------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Settle the last step, and connect to the workers of a new quorum. Return whether the step can run.

        Collective. RuntimeError: No quorum was started for this step.
        """
        manager = self._manager
        if manager.participating_rank() is None or self._attempt == (manager._quorum_id, manager.current_step()):
            raise RuntimeError(
                "gradients are compressed once in each quorum: call zero_grad() of torchft's Optimizer, or "
                "manager.start_quorum(), before each step, and its step(), or manager.should_commit(), after it"
            )
        if not manager.errored():
            # Else this worker may have failed to heal, and the last step stays in doubt. It does until a new quorum is
            # connected: in a later one, this worker may heal from one that has applied the step.
            self._look()
            if manager._quorum_id != self._quorum:
                self._connect()
            elif self._communicator.lost:
                manager.report_error(RuntimeError("a worker of this quorum was lost"))
            else:
                self._settle()
        if manager.errored():
            # Nobody shall wait for this worker.
            manager._pg.abort()
            return False
        self._engine.step.iteration = manager.current_step()
        self._attempt, self._applied = (manager._quorum_id, manager.current_step()), None
        return True

    def guarded(self, act: Callable[[], T]) -> T | None:
        """Run collectives. If a worker is lost, end the group, and return None. The manager then commits no step."""
        try:
            return act()
        except RuntimeError as error:
            if not self._communicator.lost:
                raise
            logger.warning("PowerSGD lost a worker in step %s: %s", self._manager.current_step(), error)
            if self._engine.step.keys:
                self._engine.void()
            # Of a step that has ended before the worker was lost, in a check.
            self.sent.end_step()
            # Without the traceback, which keeps collectives and with them the group's connections.
            self._manager.report_error(RuntimeError(str(error)))
            # Else a worker that waits for this one would hear of it only after the group's timeout.
            self._manager._pg.abort()
            return None

    def _look(self) -> None:
        """Settle the last step if this worker has voted to apply it."""
        if self._applied:
            self._settle()

    def _agree(self) -> None:
        """Settle the last step if its outcome is known: it counts if a worker of the quorum applies it. Collective."""
        vote = -1 if self._applied is None else int(self._applied)
        if (most := int(self._communicator.gather(torch.tensor([vote], device="cpu")).max())) >= 0:
            self._applied = most > 0
            self._settle()

    @property
    def _communicator(self) -> Any:
        return self._engine.communicator

    def _settle(self, history: dict[int, int] | None = None) -> None:
        """Settle the last attempt by whether this worker has applied it, or by the history of another one."""
        if self._attempt is None:
            return
        (quorum, step), self._attempt = self._attempt, None
        if history is None and self._applied:
            self._history[step] = quorum
            self._history.pop(step - REMEMBERED, None)
        self.sent.settle(applied=(self._history if history is None else history).get(step) == quorum)

    # A quorum --------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to the quorum's workers, and take bases and ranks of one that took part before."""
        manager, last = self._manager, self._manager.current_step() - 1
        index, size = manager.participating_rank(), manager.num_participants()
        communicator = ManagedCommunicator(manager._pg, index, size)
        self._engine.connect(communicator)

        def share() -> None:
            shared, old = self._shared(), self._history.get(last, -1)
            state = torch.frombuffer(bytearray(pickled(shared)), dtype=torch.uint8)
            mine = [not self._fresh, old, len(shared["matrices"]), len(state)]
            places = communicator.gather(torch.tensor(mine, device="cpu")).tolist()
            source, newest = places.index(max(places)), max(place[1] for place in places)
            state = (state if source == index else state.new_empty(places[source][-1])).to(communicator.device)
            communicator.broadcast(state, source)
            if -1 < old < newest:
                raise ValueError(
                    f"step {last} was applied in quorum {newest}, and by this worker in quorum {old}, so that its "
                    "parameters differ: restart it, and it heals"
                )
            self._settle()
            self._adopt(unpickled(state.cpu().numpy().tobytes()))

        self.guarded(share)
        if not communicator.lost:
            self._quorum, self._fresh = manager._quorum_id, False

    # A state ---------------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """Return bases, ranks, step and history as plain tensors and numbers. Not collective."""
        # The manager asks a worker that is not behind, so that its own vote has decided.
        self._settle()
        return self._shared()

    def load(self, state: dict[str, Any]) -> None:
        """Continue from another worker's state. The manager calls it on a worker that heals. Not collective."""
        history = dict(map(tuple, state["history"]))
        self._settle(history)
        self._history = history
        self._adopt(state, fresh=self._fresh)
        self._fresh = False

    def _shared(self) -> dict[str, Any]:
        engine, residuals = self._engine, self._engine.residuals
        found = {name: parts for name, parts in residuals.loaded.matrices.items() if "basis" in parts}
        sizes = residuals.sizes | {name: residuals.loaded.tensors[name] for name in found}
        found |= {name: matrix.bases for name, matrix in residuals.matrices.items()}
        with residuals.streams.everywhere():
            bases = {n: {key: part.clone() for key, part in p.items() if key != "error"} for n, p in found.items()}
        saved = SavedState(engine.iteration, {name: sizes[name] for name in bases}, bases, engine.plan.state_dict())
        return {**saved.to_dict(engine.config), "history": [list(pair) for pair in self._history.items()]}

    def _adopt(self, state: dict[str, Any], *, fresh: bool = False) -> None:
        """Take over bases, ranks and step. Keep this worker's errors unless it is ``fresh``."""
        engine, residuals = self._engine, self._engine.residuals
        saved, errors = SavedState.parse(state, needs_errors=False), {} if fresh else residuals.error(engine.step)
        for name, parts in saved.matrices.items() if engine.given.error_feedback else ():
            if name not in errors:
                size = saved.tensors[name]
                errors[name] = torch.zeros(size.rows, size.m, dtype=torch.float32, device="cpu")
            parts["error"] = errors.pop(name)
        engine.plan.connect(self._manager.num_participants())
        adopt(engine, dataclasses.replace(saved, own=True), LoadReport())
        residuals.whole.hold(errors)
