"""Several workers in one process: their steps advance side by side, and what they send is summed between."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.buckets import Part
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.loading import load
from powersgd_triton.core.scheme import Task
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.step import LossScale
from powersgd_triton.schemes import new_engine
from powersgd_triton.schemes.low_rank import LowRank
from tests.support.lines import Line, Meeting, communicate, in_nodes

Values = dict[str, Tensor]
T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class BucketRun:
    """One bucket's part of a step.

    Attributes:
        layout: the bucket's tensors.
        backend: the first worker's.
        bases: (left, right) flat bases whenever a message was sent, and at the end; equal on all workers.
        averages: each worker's Ĝ and means in fp32 (fp64 where a gradient is), from memory that was NaN.
        written: the same in the gradients' dtypes, written over the gradients.
        verdicts: each worker's of the step, which it shares with the step's other buckets.
    """

    layout: Layout
    backend: Backend
    bases: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    averages: list[Values] = dataclasses.field(default_factory=list)
    written: list[Values] = dataclasses.field(default_factory=list)
    verdicts: list[Tensor] = dataclasses.field(default_factory=list)


class Noting:
    """A backend that notes when it returns a message, however many collectives the sum of the message takes."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.sent = backend, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def project(self, *args: Any) -> Any:
        self.sent = True
        return self._backend.project(*args)

    def backproject(self, *args: Any) -> Any:
        self.sent = True
        return self._backend.backproject(*args)


class Fleet:
    """Workers that compress the same tensors, {name: shape}, each with an engine of its own and the same ``config``.

    Sums take two levels if ``node_size``, the workers of each node, is more than 1."""

    def __init__(
        self, config: PowerSGDConfig, shapes: Mapping[str, Sequence[int]], world_size: int, node_size: int = 1
    ) -> None:
        self.config, self.shapes, self.node_size = config, shapes, node_size
        self._lines, levels = in_nodes(world_size, node_size)
        self._groups = [self._lines, *levels]
        self.engines = [new_engine(config, line, lambda: shapes) for line in self._lines]
        for engine in self.engines:
            # So that averages that do not fit void the step.
            engine.step.loss_scale = LossScale(lambda: 1.0)
        self._layouts: dict[tuple[tuple[str, ...], bool], Layout] = {}

    def step(
        self, given: Sequence[Values], buckets: Sequence[Sequence[str]], overlapping: bool = True
    ) -> list[BucketRun]:
        """One step of all buckets, which move on whenever a new one starts, unless one is done after the other."""
        compress = self.engines[0].step.iteration >= self.config.start_iter
        runs: list[BucketRun] = []
        under_way: collections.deque[list[Callable[[], bool]]] = collections.deque()
        for names in buckets:
            run, started = self._start(tuple(names), given, compress)
            runs.append(run)
            under_way.append(started)
            while under_way:
                # Each takes one turn; those that are done leave.
                for stages in list(under_way):
                    going_on = [stage() for stage in stages]
                    assert len(set(going_on)) == 1, "workers are at different stages"
                    for group in self._groups:
                        communicate(group)
                    if not going_on[0]:
                        under_way.remove(stages)
                if overlapping and len(runs) < len(buckets):
                    break
        self.together(lambda engine: engine.end_step())
        return runs

    def together(self, fn: Callable[[Engine], T]) -> list[T]:
        """``fn(engine)`` of each worker, which may be collective."""
        if len(self.engines) == 1:
            return [fn(self.engines[0])]
        meeting = Meeting(len(self.engines))

        def run(line: Line, engine: Engine) -> T:
            line.meeting = meeting
            try:
                return fn(engine)
            except BaseException:
                meeting.abort()
                raise
            finally:
                line.meeting = None

        with ThreadPoolExecutor(len(self.engines)) as pool:
            return list(pool.map(run, self._lines, self.engines))

    def load(self, saved: Sequence[Any]) -> None:
        """Each worker loads its own."""
        states = {id(engine): one for engine, one in zip(self.engines, saved, strict=True)}
        self.together(lambda engine: load(engine, lambda: (states[id(engine)], None)))

    def errors(self) -> list[Values]:
        return [engine.residuals.error(engine.step) for engine in self.engines]

    def layout(self, names: tuple[str, ...], compress: bool) -> Layout:
        if (names, compress) not in self._layouts:
            shapes = {name: self.shapes[name] for name in names}
            self._layouts[names, compress] = Layout.build(shapes, self.config, compress=compress)
        plans = [engine.plan.layout(self._layouts[names, compress]) for engine in self.engines]
        assert all(plan.segments == plans[0].segments for plan in plans), "workers have different plans"
        return plans[0]

    def _start(
        self, names: tuple[str, ...], given: Sequence[Values], compress: bool
    ) -> tuple[BucketRun, list[Callable[[], bool]]]:
        """The bucket's run, and for each worker what does its next stage and says whether there are more."""
        layout = self.layout(names, compress)
        given = [packed(own, layout) for own in given]
        device = next(iter(given[0].values())).device
        own = self._layouts[names, compress]
        buckets = self.together(
            lambda engine: engine.begin((names, compress), lambda: own.shapes, device, last=False, compress=compress)
        )
        tasks: list[Task] = []
        for engine, bucket, gradients in zip(self.engines, buckets, given, strict=True):
            # One worker after the other, since Triton's interpreter cannot run in threads.
            bucket.agreed = True
            task = engine.buckets.prepare([Part(bucket, gradients)])
            for listener in engine.listeners:
                task = listener.watch(task)
            tasks.append(task)
        backends = [task.memory for task in tasks]
        run = BucketRun(layout, backends[0])
        notes: list[Any] = [Noting(backend) for backend in backends]

        def write(worker: int, backend: Backend) -> None:
            step, bucket = self.engines[worker].step, backend.bucket
            out = {s.name: torch.full(s.shape, torch.nan, dtype=bucket.message_P.dtype) for s in layout.segments}
            # Only what is written over the gradients counts.
            backend.reconstruct(out, None)
            run.averages.append(out)
            backend.reconstruct(given[worker], step.overflow(device))
            run.written.append(given[worker])
            run.verdicts.append(step.verdict(device))

        def averaging(worker: int, task: Task) -> Iterator[Work]:
            yield from LowRank().average(task)
            write(worker, backends[worker])

        generators = [
            averaging(worker, dataclasses.replace(task, memory=noting))
            for worker, (task, noting) in enumerate(zip(tasks, notes, strict=True))
        ]

        def stage(worker: int) -> bool:
            going_on = next(generators[worker], self) is not self
            bucket, noting = backends[worker].bucket, notes[worker]
            if going_on and not noting.sent:
                return going_on
            noting.sent = False
            if worker == 0:
                run.bases.append((bucket.P_hat.clone(), bucket.basis.clone()))
            else:
                assert_same_bits((bucket.P_hat, bucket.basis), run.bases[-1])
            return going_on

        return run, [functools.partial(stage, worker) for worker in range(len(given))]


def packed(gradients: Values, layout: Layout) -> Values:
    """Copies of the layout's tensors, those of one dtype in one flat buffer as DDP has them."""
    copies = {}
    for dtype in {gradients[segment.name].dtype for segment in layout.segments}:
        names = [segment.name for segment in layout.segments if gradients[segment.name].dtype == dtype]
        flat = torch.cat([gradients[name].reshape(-1) for name in names])
        pieces = flat.split([gradients[name].numel() for name in names])
        copies.update({name: piece.view(gradients[name].shape) for name, piece in zip(names, pieces, strict=True)})
    return copies


def assert_same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(bits(a), bits(b)), "workers hold different bits"


def bits(tensor: Tensor) -> Tensor:
    """As integers, so that NaNs are compared too."""
    return tensor.contiguous().view(-1).view(torch.uint8)
