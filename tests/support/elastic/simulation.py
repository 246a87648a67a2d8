"""torchft in one process: each worker is a thread. One runs at a time. A seed decides which, and what fails."""

import copy
import random
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.elastic import alone
from tests.support.elastic.ledger import Outcome, checked
from tests.support.elastic.trainers import TRAINERS, Scenario, Trainer


class Killed(BaseException):
    """Ends the thread of a worker that is killed."""


class Worker:
    """A thread that runs when it is told to, and until it waits.

    Attributes:
        ready: Returns whether it can go on.
        failed: The traceback of its exception.
    """

    def __init__(self, name: int, act: Callable[["Worker"], None], others: threading.Semaphore) -> None:
        self.name, self.others, self.turn = name, others, threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.done, self.stopped, self.failed = False, False, ""
        self.log: list[dict[str, Any]] = []
        self.manager: Any = None
        self.trainer: Trainer | None = None
        threading.Thread(target=self._run, args=(act,), daemon=True).start()

    def _run(self, act: Callable[["Worker"], None]) -> None:
        self.turn.acquire()
        try:
            act(self)
        except Killed:
            pass
        except BaseException:
            self.failed = traceback.format_exc()
        self.done = True
        self.others.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let the others run until ``ready`` returns True."""
        self.ready = ready
        self.others.release()
        self.turn.acquire()
        self.ready = lambda: True


class Quorum:
    """Workers, and the collectives that they have begun: {number: {index of a worker: (name, arguments)}}.

    Attributes:
        sources: {worker that is behind: the one whose state it takes}.
        states: {worker that is behind: that state and step}.
        broken: Whether a worker was lost, so that no collective will end.
    """

    def __init__(self, number: int, members: list[Worker]) -> None:
        self.number, self.members = number, members
        self.sources, self.states = dict[Worker, Worker](), dict[Worker, tuple[dict[str, Any], int]]()
        self.begun: dict[int, dict[int, tuple[str, Any]]] = defaultdict(dict)
        self.results: dict[int, list[Tensor]] = {}
        self.broken = False

    def complete(self, number: int) -> bool:
        return len(self.begun[number]) == len(self.members)

    def result(self, number: int, index: int) -> list[Tensor]:
        """Return what a worker receives in a collective that all have begun."""
        (name,) = {name for name, _ in self.begun[number].values()}
        given = [self.begun[number][each][1] for each in range(len(self.members))]
        if number not in self.results:
            # The first one to ask, before a result overwrites what was given.
            sent = [arguments[1 if name in ("allgather", "alltoall_base") else 0] for arguments in given]
            self.results[number] = [(one[0] if isinstance(one, list) else one).clone() for one in sent]
        tensors, options = self.results[number], given[0][-1]
        if name == "allreduce":
            least = options.reduceOp == dist.ReduceOp.MIN
            return [torch.stack(tensors).amin(0) if least else torch.stack(tensors).sum(0)]
        if name == "broadcast":
            return [tensors[options.rootRank]]
        if name == "allgather":
            return tensors
        return [tensor.view(len(self.members), -1)[index] for tensor in tensors]


class Group:
    """torchft's process group of a worker."""

    def __init__(self, simulation: "Simulation", worker: Worker) -> None:
        self._simulation, self._worker = simulation, worker
        self._quorum, self._index, self._number = Quorum(0, []), 0, 0

    def configure(self, quorum: Quorum, index: int) -> None:
        self._quorum.broken = True
        self._quorum, self._index, self._number = quorum, index, 0

    def abort(self) -> None:
        self._quorum.broken = True

    def getBackendName(self) -> str:
        return "torchft-gloo"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._begin(name, arguments)

    def _begin(self, name: str, arguments: Any) -> Any:
        quorum, number, happens = self._quorum, self._number, self._simulation.happens
        if happens("kill", self._worker) or quorum.broken:
            raise RuntimeError("a worker was lost")
        self._number += 1
        quorum.begun[number][self._index] = name, arguments
        happens("kill", self._worker)
        if happens("stop", self._worker):
            quorum.broken = self._worker.stopped = True
            self._worker.wait(self._simulation.wakes())
            self._worker.stopped = False
        return SimpleNamespace(wait=lambda: self._wait(quorum, number, arguments))

    def _wait(self, quorum: Quorum, number: int, arguments: Any) -> None:
        self._worker.wait(lambda: quorum.complete(number) or quorum.broken)
        deaf = self._simulation.happens("deaf", self._worker)
        # After a loss, a worker may hear of the end of a collective that was complete before, or not.
        if deaf or not quorum.complete(number) or (quorum.broken and self._simulation.dice.random() < 0.5):
            quorum.broken = True
            raise RuntimeError("a worker was lost")
        received = quorum.result(number, self._index)
        places = arguments[0]
        if isinstance(places, Tensor):
            places = places.view(len(received), -1)
        elif isinstance(places[0], list):
            places = places[0]
        for place, tensor in zip(places, received, strict=True):
            place.copy_(tensor.view_as(place))
        self._simulation.happens("kill", self._worker)


class Manager(alone.Manager):
    """torchft's manager of a worker."""

    def __init__(self, simulation: "Simulation", worker: Worker, load: Any, save: Any) -> None:
        super().__init__(_pg=Group(simulation, worker), _quorum_id=-1)
        self._simulation, self._worker, self._commit_failures = simulation, worker, 0
        self.states["default"] = load, save
        # The next quorum, once it is formed. None while this worker waits for it.
        self.quorum: Quorum | None = Quorum(0, [])

    def participating_rank(self) -> int | None:
        found = self.quorum
        return found.members.index(self._worker) if found and found.members else None

    def num_participants(self) -> int:
        return len(self.quorum.members) if self.quorum else 0

    def start_quorum(self) -> None:
        self.quorum, self.error, worker = None, None, self._worker
        worker.wait(lambda: self.quorum is not None or self._simulation.form())
        quorum: Any = self.quorum
        if quorum.number != self._quorum_id:
            self._quorum_id = quorum.number
            self._pg.configure(quorum, quorum.members.index(worker))
        for behind, source in quorum.sources.items():
            if source is worker:
                states = {key: save() for key, (_, save) in self.states.items()}
                quorum.states[behind] = copy.deepcopy(states), self._step
        source = quorum.sources.get(worker)
        if source is None:
            return
        worker.wait(lambda: worker in quorum.states or source.done)
        if worker not in quorum.states or self._simulation.happens("heal", worker):
            self.report_error(RuntimeError("this worker could not heal"))
            return
        states, self._step = quorum.states[worker]
        for key, (load, _) in self.states.items():
            load(states[key])

    def should_commit(self, *, applied: bool = True) -> bool:
        self._worker.wait(lambda: True)
        applied = super().should_commit(applied=applied and self.error is None)
        self._commit_failures = 0 if applied else self._commit_failures + 1
        return applied


class Simulation:
    """Trains workers with faults.

    Args:
        scenario: Its faults are left out.
        likely: {what happens to a worker in a collective, or while it heals: its probability}: it is killed ("kill"),
            stops while others form new quorums ("stop"), does not hear of the collective's end ("deaf"), or does not
            receive the state ("heal").
        most: Most of that.
        joins: Workers that come later.
    """

    def __init__(self, scenario: Scenario, seed: int, likely: dict[str, float], *, workers: int, most: int, joins: int):
        self.dice, self.scenario, self.likely = random.Random(seed), scenario, likely
        self._left, self._joins, self._quorum = most, joins, Quorum(0, [])
        self._others = threading.Semaphore(0)
        self._workers = list[Worker]()
        self._sent = list[dict[str, Any]]()
        for _ in range(workers):
            self._start()

    def _start(self) -> None:
        index = len(self._workers)

        def act(worker: Worker) -> None:
            def connect(load: Any, save: Any) -> Any:
                worker.manager = Manager(self, worker, load, save)
                return worker.manager

            def log(record: dict[str, Any]) -> None:
                worker.log.append(copy.deepcopy(record))

            worker.trainer = TRAINERS[self.scenario.door](index, 0, self.scenario, connect, log)
            try:
                worker.trainer.run()
            except ValueError as error:
                # It alone has applied a step, and is told to restart: what it did from then on does not count.
                if "restart it" not in str(error):
                    raise
                last = max(index for index, record in enumerate(worker.log) if record.get("applied"))
                del worker.log[last + 1 :]
                worker.log[last]["applied"] = False
                worker.manager._pg.abort()

        self._workers.append(Worker(index, act, self._others))

    def happens(self, what: str, worker: Worker) -> bool:
        """Return whether it happens. Does not return if the worker is killed."""
        alive = sum(not other.done for other in self._workers)
        # The first exchange of local steps comes before the trainer is there.
        ready = worker.trainer is not None and self._left > 0 and (what != "kill" or alive > 2)
        if not ready or self.dice.random() >= self.likely.get(what, 0):
            return False
        self._left -= 1
        if what == "kill":
            self._kill(worker)
        return True

    def _kill(self, worker: Worker) -> None:
        assert worker.trainer is not None
        self._sent.append(worker.trainer.end())
        worker.manager._pg.abort()
        raise Killed

    def form(self) -> bool:
        """Form a quorum if all workers wait for one. Return whether it did."""
        alive = [worker for worker in self._workers if not worker.done and not worker.stopped]
        managers = [worker.manager for worker in alive]
        if any(manager is None or manager.quorum is not None for manager in managers):
            return False
        newest = max(manager._step for manager in managers)
        if self._joins and newest >= 2:
            self._joins -= 1
            self._start()
            return False
        if newest >= self.scenario.steps - 2:
            self._left = 0
            if any(worker.stopped for worker in self._workers):
                return False
        if alive != self._quorum.members or any(manager._commit_failures for manager in managers):
            self._quorum = Quorum(self._quorum.number + 1, alive)
        ahead = [worker for worker in alive if worker.manager._step == newest]
        # Before the first step, all take the parameters of the first worker.
        ahead = ahead if newest else ahead[:1]
        self._quorum.sources = {worker: self.dice.choice(ahead) for worker in alive if worker not in ahead}
        self._quorum.states = {}
        for manager in managers:
            manager.quorum = self._quorum
        return True

    def wakes(self) -> Callable[[], bool]:
        """Return what returns whether a worker that stops now goes on."""
        number = self._quorum.number + self.dice.randrange(3)
        return lambda: self._quorum.number >= number or not self._left

    def run(self) -> Outcome:
        hung = False
        while not hung and (alive := [worker for worker in self._workers if not worker.done]):
            # Twice, since asking one worker may form a quorum or wake another one.
            ready = [worker for worker in alive * 2 if worker.ready()]
            hung = not ready and len(alive) == sum(not worker.done for worker in self._workers)
            if ready:
                self.dice.choice(ready).turn.release()
                self._others.acquire()
        logs = {str(worker.name): worker.log for worker in self._workers}
        failed = [f"worker {worker.name}: {worker.failed}" for worker in self._workers if worker.failed]
        return checked(logs, self._sent, [], hung, failed)
