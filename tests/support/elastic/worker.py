"""A worker under torchft's Manager with prescribed gradients, and the fault that is injected into it."""

import dataclasses
import datetime
import functools
import io
import os
import pickle
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.elastic import group

SHAPES = {"bias": (16,), "small": (24, 16), "matrix": (640, 600)}
WORKERS = 3


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


def on_loopback() -> None:
    """Let torchft listen on 127.0.0.1 only."""
    import torchft.checkpointing.http_transport as http
    import torchft.manager as manager

    server, request = manager.ManagerServer, http._IPv6HTTPServer

    class Local(request):  # type: ignore[misc, valid-type]
        address_family = socket.AF_INET

        def __init__(self, _: Any, handler: Any) -> None:
            super().__init__(("127.0.0.1", 0), handler)

    manager.ManagerServer = lambda **options: server(**{**options, "bind": "127.0.0.1:0"})
    http._IPv6HTTPServer = Local
    socket.gethostname = lambda: "127.0.0.1"


def new_manager(index: int, lighthouse: str, timeout: float, load: Any, save: Any) -> Any:
    from torchft import Manager, ProcessGroupGloo

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    on_loopback()
    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), load_state_dict=load, state_dict=save, min_replica_size=1,
        use_async_quorum=False, timeout=limit, quorum_timeout=datetime.timedelta(seconds=30), connect_timeout=limit,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse,
        replica_id=f"w{index}", hostname="127.0.0.1", heartbeat_interval=datetime.timedelta(milliseconds=50),
    )  # fmt: skip
    manager.kept = store
    return manager


class Trainer:
    """A plain loop with a ``Compressor``. What it logs of each attempt is checked by ``ledger``."""

    def __init__(self, index: int, life: int, scenario: Scenario, folder: str, lighthouse: str) -> None:
        self.index, self.life, self.scenario = index, life, scenario
        self.folder, self.file = Path(folder), Path(folder, f"attempts-{index}-{life}.pkl")
        self.parameters = {name: torch.full(shape, float(life), dtype=torch.float64) for name, shape in SHAPES.items()}
        self.manager = new_manager(index, lighthouse, scenario.timeout, self.load, lambda: self.parameters)
        if life == 0:
            # From now on each sends heartbeats, so that the first quorum is one of all.
            self.note("ready", True)
            while not all((self.folder / f"ready-{other}-0").exists() for other in range(WORKERS)):
                time.sleep(0.01)
        self.handle: Any = self.compress({"min_compression_rate": 1, "seed": 3, **scenario.config})
        self.managed = self.handle._managed
        self.attempts = self.count = 0
        self.doubt = False
        self.gradients: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        # What local steps owe before the changes of a round.
        self.owed: dict[str, Tensor] = {}
        self.inject(index, life)

    def compress(self, config: dict[str, Any]) -> Any:
        tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
        return Compressor(PowerSGDConfig.from_dict(config), tensors, manager=self.manager)

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
                self.write(step=step, quorum=quorum, before=self.before, last=True)
                return
            self.attempts += 1
            average = self.average() if step < self.scenario.steps else {}
            done = time.time()
            applied = manager.should_commit()
            if applied:
                for name, parameter in self.parameters.items():
                    parameter.sub_(average[name])
            if self.scenario.error:
                self.errors()
            if self.doubt:
                continue
            self.write(
                step=step, quorum=quorum, before=self.before, gradients=self.gradients, average=average,
                applied=applied,
                workers=manager.num_participants(), time=done, parameters=self.parameters, last=False,
                collectives=self.count,
            )  # fmt: skip
            time.sleep(self.scenario.pause)

    def errors(self) -> dict[str, Tensor]:
        return {name: error.clone() for name, error in self.handle.error().items()}

    def drawn(self) -> dict[str, Tensor]:
        seed = 1_000_003 * self.manager.current_step() + 1009 * self.index + 31 * self.life + self.attempts
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def write(self, **record: Any) -> None:
        with self.file.open("ab") as file:
            pickle.dump(record, file)

    def inject(self, index: int, life: int) -> None:
        """Let this worker count the collectives of a step, and suffer its faults."""
        from torchft.checkpointing import http_transport

        begin, wait = group.ManagedCommunicator._begin, group._Watched.wait
        numbers: dict[int, int] = {}
        begun = self.managed.begin

        def connected() -> bool:
            ready: bool = begun()
            self.doubt = not ready and self.managed._attempt is not None
            if self.doubt:
                # It has failed to heal. What its errors owe is not known yet.
                place = {"step": self.manager.current_step(), "quorum": self.manager._quorum_id}
                self.write(**place, applied=False, doubt=True, last=False)
            else:
                self.before = self.errors()
            return ready

        self.managed.begin = connected
        mine = [fault for fault in self.scenario.faults if (fault.victim, fault.life) == (index, life)]

        def here(place: str, number: int) -> Fault | None:
            step = self.manager.current_step()
            return next((f for f in mine if (f.step, f.collective, f.place) == (step, number, place)), None)

        def counted(communicator: Any, name: str, *arguments: Any) -> Any:
            self.count += 1
            if here("before", self.count):
                self.die()
            work = begin(communicator, name, *arguments)
            numbers[id(work)] = self.count
            if here("inside", self.count):
                self.die()
            if fault := here("stop", self.count):
                mine.remove(fault)
                self.stop(fault.seconds)
            return work

        def waited(work: Any) -> None:
            number = numbers.pop(id(work), 0)
            wait(work)
            if here("after", number):
                self.die()
            if fault := here("deaf", number):
                mine.remove(fault)
                self.note("deaf", time.time())
                work.communicator.lost = True
                raise RuntimeError("this worker does not hear of the end")

        for fault in self.scenario.faults:
            if fault.place == "source":
                http_transport._streaming_save = functools.partial(self.heal, fault, http_transport._streaming_save)
        group.ManagedCommunicator._begin = counted  # type: ignore[assignment, method-assign]
        group._Watched.wait = waited  # type: ignore[assignment, method-assign]

    def die(self) -> None:
        """Write what this worker has sent, and end as if its power had failed."""
        self.note("sent", self.sent())
        self.write(step=self.manager.current_step(), quorum=-1, before=self.owed or self.before, last=False)
        self.note("killed", time.time())
        os.kill(os.getpid(), signal.SIGKILL)

    def heal(self, fault: Fault, save: Any, state: Any, stream: Any) -> None:
        """Send the state to a worker that heals. If nobody has done so since the fault's step, be killed in between."""
        try:
            if self.manager.current_step() < fault.step:
                raise FileExistsError
            (self.folder / "asked").touch(exist_ok=False)
        except FileExistsError:
            save(state, stream)
            return
        # Now this worker waits for the other one in the first collective of the new quorum.
        time.sleep(0.2)
        save(state, content := io.BytesIO())
        self.before = self.errors()
        self.write(step=self.manager.current_step(), quorum=-1, before=self.owed or self.before, last=False)
        for name in ("killed", "source"):
            self.note(name, time.time())
        stream.write(content.getvalue()[: fault.collective * len(content.getvalue()) // 2])
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, seconds: float) -> None:
        self.note("killed", time.time())
        if os.fork() == 0:
            time.sleep(seconds)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    def note(self, name: str, content: Any) -> None:
        path = self.folder / f"{name}-{self.index}-{self.life}"
        path.with_suffix(".new").write_bytes(pickle.dumps(content))
        path.with_suffix(".new").replace(path)

    def sent(self) -> dict[str, Any]:
        """What the others apply of this worker if they finish the step."""
        found = {name: gradient.double() for name, gradient in self.gradients.items()}
        for bucket, product in self.managed.sent.products.items():
            for group_, (P, Q) in zip(bucket.layout.groups, bucket.joined(product), strict=True):
                for segment, left, right in zip(group_.segments, P, Q, strict=True):
                    found[segment.name] = (left.double() @ right.double().mT).view(SHAPES[segment.name])
        for layout, M in self.managed.sent.left.items():
            for segment in layout.segments:
                error = M[segment.span].view(segment.shape).double()
                before = self.before.get(segment.name, torch.zeros(()))
                found[segment.name] = before.double() + self.gradients[segment.name].double() - error
        return {"step": self.manager.current_step(), "quorum": self.manager._quorum_id, "sent": found}
