"""CUDA streams without a GPU: which work may run at once, and whether it uses the same memory.

Operations run on the CPU in the order of the program. Each is booked on the stream that is current at that time. Vector
clocks tell which operations of other streams a stream has waited for. Times that tests give to phases and messages tell
what runs at the same time.
"""

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from powersgd_triton.core import engine, streams
from powersgd_triton.core.buckets import BucketState
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.scheme import Listener, Task, watched
from powersgd_triton.planning.trial import StandIn

SHAPES: dict[str, tuple[int, ...]] = {
    "a": (24, 20), "bias": (7,), "b": (16, 12), "c": (20, 20), "scale": (5,), "d": (12, 30),
}  # fmt: skip
BUCKETS = [["a", "bias"], ["b"], ["c", "scale"], ["d"]]
"""The tensors of a model, and those of its buckets."""


def begin(engine: Engine, names: Sequence[str], device: torch.device, last: bool | None) -> BucketState:
    return engine.begin(tuple(names), lambda: {name: SHAPES[name] for name in names}, device, last=last)


class FakeStream:
    """A stream, with the number of operations of each stream that its next operation comes after.

    ``time`` is when what was enqueued so far is done."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.clock: collections.Counter[FakeStream] = collections.Counter()
        self.time = 0.0

    def wait_stream(self, other: "FakeStream") -> None:
        self.clock |= other.clock
        self.time = max(self.time, other.time)


class Use:
    """Who uses one storage: the stream that allocated it, and the last write and read of each stream."""

    def __init__(self, owner: FakeStream, shape: torch.Size) -> None:
        self.owner, self.shape = owner, shape
        self.writes: dict[FakeStream, int] = {}
        self.reads: dict[FakeStream, int] = {}


class StreamMachine(TorchDispatchMode):
    """Books operations on streams and notes those that may use memory that another stream writes or frees.

    The host never waits here. On a GPU it would, where it reads a value; the package promises not to.

    Attributes:
        current: The current stream.
        races: Descriptions of what went wrong.
        made: Streams that the package has created.
        futures: Clocks of the streams on which results of Futures were set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = FakeStream()
        self.races: list[str] = []
        self.made: list[FakeStream] = []
        self.futures: list[collections.Counter[FakeStream]] = []
        self._uses: dict[int, Use] = {}

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def stream(self, device: Any = None) -> FakeStream:  # noqa: ARG002
        return self.current

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    def create(self, device: Any = None, priority: int = 0) -> FakeStream:
        self.made.append(FakeStream(device, priority))
        return self.made[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        written = set()
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {id(tensor) for tensor in tree_leaves(value)}
        written |= {id(kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs and a.alias_info is not None}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        known = {_key(tensor) for tensor in inputs}
        new = [tensor for tensor in results if _key(tensor) not in known]
        # A view touches no memory, and neither does an allocation.
        touches = bool(written) or bool(new) or not results
        self.current.clock[self.current] += 1
        if touches and not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            for tensor in inputs:
                self._book(tensor, str(func), write=id(tensor) in written)
        for tensor in new:
            self._book(tensor, str(func), write=True)
        return result

    def _book(self, tensor: torch.Tensor, name: str, *, write: bool) -> None:
        storage, stream = tensor.untyped_storage(), self.current
        if not storage.nbytes():
            return
        key = _key(tensor)
        if key not in self._uses:
            self._uses[key] = Use(stream, tensor.shape)
            weakref.finalize(storage, self._free, key).atexit = False
        use = self._uses[key]
        for others in (use.writes, use.reads) if write else (use.writes,):
            for other, number in others.items():
                if stream.clock[other] < number:
                    self.races.append(f"{name} {'writes' if write else 'reads'} memory of shape {tuple(tensor.shape)}")
        (use.writes if write else use.reads)[stream] = stream.clock[stream]

    def _free(self, key: int) -> None:
        use = self._uses.pop(key)
        for others in (use.writes, use.reads):
            for other, number in others.items():
                # The allocator hands the memory out again on the stream that allocated it.
                if use.owner.clock[other] < number:
                    self.races.append(f"memory of shape {tuple(use.shape)} is freed that another stream still uses")


class Network(StandIn):
    """Collectives that run in order on a stream of their own.

    Like NCCL, it keeps the tensors until somebody has waited.

    Args:
        machine: Where the package's streams are.
        seconds: Time of a collective.

    Attributes:
        sent: (tensor's number of elements, when the collective started) of each collective of a step.
        stream: The stream on which collectives run.
    """

    def __init__(self, machine: StreamMachine, seconds: float = 0.0) -> None:
        super().__init__()
        self._machine, self.seconds = machine, seconds
        self.stream = FakeStream()
        self.sent: list[tuple[int, float]] = []
        self._kept: list[tuple[torch.Tensor, ...]] = []

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return self._start(lambda: tensor.mul_(2), tensor) if tensor.numel() else None

    def all_gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> Any:
        return self._start(lambda: gathered.copy_(tensor.expand_as(gathered)), tensor, gathered)

    def _start(self, work: Callable[[], object], *tensors: torch.Tensor) -> Any:
        machine, stream = self._machine, self.stream
        stream.wait_stream(machine.current)
        with machine.on(stream):
            self.sent.append((tensors[0].numel(), stream.time))
            work()
            stream.time += self.seconds
        done = FakeStream()
        done.wait_stream(stream)
        self._kept.append(tensors)

        def wait() -> None:
            machine.current.wait_stream(done)
            self._kept[:] = [kept for kept in self._kept if kept is not tensors]

        return wait


class Timed(Listener):
    """Makes the stages of buckets take time on the engine's stream, {stage: time}."""

    def __init__(self, machine: StreamMachine, times: Mapping[str, float]) -> None:
        self._machine, self._times = machine, times

    def watch(self, task: Task) -> Task:
        def before(stage: str) -> None:
            self._machine.current.time += self._times.get(stage, 0.0)

        return watched(task, before, lambda *_: None)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def stream_machine(*, own: bool = True, current: bool = True) -> Iterator[StreamMachine]:
    """Run the block on the streams of a ``StreamMachine``. Without ``own``, engines work on their callers' streams.

    Without ``current``, another device is the current one.
    """
    machine = StreamMachine()

    set_result = torch.futures.Future.set_result

    def noted(future: torch.futures.Future[Any], result: Any) -> None:
        machine.futures.append(machine.current.clock.copy())
        set_result(future, result)

    with (
        mock.patch.object(streams, "has_streams", return_value=own),
        mock.patch.object(engine, "has_streams", return_value=own),
        mock.patch.object(torch.cuda, "Stream", machine.create),
        mock.patch.object(torch.cuda, "current_stream", machine.stream),
        mock.patch.object(torch.cuda, "stream", machine.on),
        # That of CPU tensors has no index.
        mock.patch.object(torch.cuda, "current_device", return_value=None if current else 0),
        mock.patch.object(torch.cuda, "set_stream", machine.set_stream),
        mock.patch.object(torch.futures.Future, "set_result", noted),
        machine,
    ):
        yield machine
