"""Several workers in one process: what their engines average, where all of them must hold the same bits."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.loading import load, save
from powersgd_triton.core.scheme import Listener, Task, watched
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.step import LossScale
from powersgd_triton.schemes import new_engine
from tests.support.lines import in_nodes, together

Values = dict[str, Tensor]


@dataclasses.dataclass(eq=False)
class BucketRun:
    """One bucket's part of a step.

    Attributes:
        layout: the bucket's tensors.
        backend: the first worker's.
        bases: (left, right) flat bases whenever a message was made, and at the end; equal on all workers.
        averages: each worker's Ĝ and means in fp32 (fp64 where a gradient is), from memory that was NaN.
        written: the same in the gradients' dtypes, written over the gradients.
        verdicts: each worker's of the step, which it shares with the step's other buckets.
    """

    layout: Layout
    backend: Backend
    bases: Sequence[tuple[Tensor, Tensor]]
    averages: Sequence[Values]
    written: Sequence[Values]
    verdicts: Sequence[Tensor]


class Bases(Listener):
    """Notes the bases of each bucket whenever its backend makes a message."""

    def __init__(self) -> None:
        self.noted: dict[Bucket, list[tuple[Tensor, Tensor]]] = {}

    def note(self, bucket: Bucket) -> None:
        self.noted.setdefault(bucket, []).append((bucket.P_hat.clone(), bucket.basis.clone()))

    def watch(self, task: Task) -> Task:
        def after(stage: str, *_: Any) -> None:
            if stage in ("project", "backproject"):
                self.note(task.memory.bucket)

        return watched(task, lambda _: None, after)


class Fleet:
    """Workers that compress the same tensors, {name: shape}, each with an engine of its own and the same ``config``.

    Sums take two levels if ``node_size``, the workers of each node, is more than 1."""

    def __init__(
        self, config: PowerSGDConfig, shapes: Mapping[str, Sequence[int]], world_size: int, node_size: int = 1
    ) -> None:
        self.config, self.shapes, self.node_size = config, shapes, node_size
        self._lines = in_nodes(world_size, node_size)
        self.engines = [new_engine(config, line, lambda: shapes) for line in self._lines]
        self._bases = [Bases() for _ in self.engines]
        for engine, bases in zip(self.engines, self._bases, strict=True):
            # So that averages that do not fit void the step.
            engine.step.loss_scale = LossScale(lambda: 1.0)
            engine.listeners.append(bases)

    def step(
        self, given: Sequence[Values], buckets: Sequence[Sequence[str]], overlapping: bool = True
    ) -> list[BucketRun]:
        """One step of all buckets, which move on whenever a new one starts, unless one is done after the other."""
        compress = self.engines[0].step.iteration >= self.config.start_iter
        layouts = [self.layout(tuple(names), compress) for names in buckets]
        found = together(self._lines, lambda worker: self._step(worker, given[worker], layouts, compress, overlapping))
        runs = []
        for layout, *own in zip(layouts, *found, strict=True):
            backends, bases, *values = zip(*own, strict=True)
            for noted in bases:
                for one, other in zip(noted, bases[0], strict=True):
                    assert_same_bits(one, other)
            runs.append(BucketRun(layout, backends[0], bases[0], *values))
        return runs

    def _step(
        self, worker: int, given: Values, layouts: Sequence[Layout], compress: bool, overlapping: bool
    ) -> list[Any]:
        """A worker's step, and for each bucket what it adds to the ``BucketRun``."""
        engine, bases, found = self.engines[worker], self._bases[worker], dict[int, Any]()
        bases.noted.clear()

        def take(index: int, gradients: Values, backend: Backend) -> None:
            bucket, dtype = backend.bucket, backend.bucket.message_P.dtype
            out = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in layouts[index].shapes.items()}
            verdict = engine.step.verdict(bucket.message_P.device)
            # Only what is written over the gradients counts.
            backend.reconstruct(out, None)
            backend.reconstruct(gradients, verdict)
            bases.note(bucket)
            found[index] = backend, bases.noted[bucket], out, gradients, verdict

        for index, layout in enumerate(layouts):
            gradients = packed(given, layout)
            device, last = next(iter(gradients.values())).device, False if overlapping else None
            key, shapes = (*layout.shapes, compress), functools.partial(getattr, layout, "shapes")
            bucket = engine.begin(key, shapes, device, last=last, compress=compress)
            engine.average(bucket, gradients, write=functools.partial(take, index, gradients))
        engine.end_step()
        return [found[index] for index in range(len(layouts))]

    def save(self) -> list[dict[str, Any]]:
        return together(self._lines, lambda worker: save(self.engines[worker]))

    def load(self, saved: Sequence[Any]) -> None:
        """Each worker loads its own."""
        together(self._lines, lambda worker: load(self.engines[worker], lambda: (saved[worker], None)))

    def errors(self) -> list[Values]:
        return [engine.residuals.error(engine.step) for engine in self.engines]

    def layout(self, names: tuple[str, ...], compress: bool) -> Layout:
        """The bucket's layout with the ranks in force. With other ranks, workers would send different messages."""
        layout = Layout.build({name: self.shapes[name] for name in names}, self.config, compress=compress)
        return self.engines[0].plan.layout(layout)


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
