"""Several workers in one process: their steps advance side by side, and what they send is summed between."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.compressor import Compression
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.state import State
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops import BucketState

Values = dict[str, Tensor]
T = TypeVar("T")


class Line(Communicator):
    """One worker's end: it notes what is to be communicated, and goes on once ``communicate`` has done so."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size
        self.message: tuple[str, Tensor, Tensor] | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_reduce(self, tensor: Tensor) -> dist.Work | None:
        if self.world_size > 1 and tensor.numel():
            self._note("sum", tensor, tensor)
        return None

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        self._note("exchange", received, sent)

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> Any:
        self._note("gather", gathered, tensor)

    def _note(self, kind: str, received: Tensor, sent: Tensor) -> None:
        assert self.message is None, "two messages at once"
        self.message = kind, received, sent


def communicate(lines: Sequence[Line]) -> None:
    """Do what all workers wait for. Sums are made one worker after the other in the message's dtype."""
    messages = [line.message for line in lines if line.message is not None]
    for line in lines:
        line.message = None
    if not messages:
        return
    assert len(messages) == len(lines), "some workers sent a message and others did not"
    kinds = {(kind, received.shape, sent.shape, sent.dtype) for kind, received, sent in messages}
    assert len(kinds) == 1, "workers sent different messages"
    ((kind, *_),) = kinds
    sent = [tensor.clone() for _, _, tensor in messages]
    total = sent[0].clone()
    if kind == "sum":
        for tensor in sent[1:]:
            total += tensor
    for worker, (_, received, _) in enumerate(messages):
        if kind == "sum":
            received.copy_(total)
        else:
            received.copy_(torch.stack(sent if kind == "gather" else [tensor[worker] for tensor in sent]))


@dataclasses.dataclass(eq=False)
class Passage:
    """One bucket's step.

    Attributes:
        layout: the bucket's tensors.
        bases: (left, right) flat bases whenever a message was sent, and at the end; equal on all workers.
        bucket: the first worker's.
        averages: each worker's Ĝ and means in fp32 (fp64 where a gradient is), from memory that was NaN.
        written: the same in the gradients' dtypes, written over the gradients.
        verdicts: each worker's of the step, which it shares with the step's other buckets.
    """

    layout: Layout
    bases: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    bucket: BucketState | None = None
    averages: list[Values] = dataclasses.field(default_factory=list)
    written: list[Values] = dataclasses.field(default_factory=list)
    verdicts: list[Tensor] = dataclasses.field(default_factory=list)


class Fleet:
    """Workers that compress the same tensors.

    Args:
        config: the same on all of them.
        shapes: {name: shape}.
        world_size: number of workers.
    """

    def __init__(self, config: PowerSGDConfig, shapes: Mapping[str, Sequence[int]], world_size: int) -> None:
        self.config, self.shapes = config, shapes
        self.states = [State(config) for _ in range(world_size)]
        for state in self.states:
            # So that averages that do not fit are owed again.
            state.attach(lambda: 1.0)
            state.plan.begin(shapes)
        self._lines = [Line(rank, world_size) for rank in range(world_size)]
        self._layouts: dict[tuple[tuple[str, ...], bool], Layout] = {}

    def step(
        self, given: Sequence[Values], buckets: Sequence[Sequence[str]], overlapping: bool = True
    ) -> list[Passage]:
        """One step of all buckets.

        Args:
            given: each worker's gradients, not changed.
            buckets: names of the tensors in each.
            overlapping: whether buckets move on whenever a new one starts, or are done one after the other.
        """
        compress = self.states[0].iteration >= self.config.start_iter
        passages = [Passage(self._layout(tuple(names), compress)) for names in buckets]
        under_way: collections.deque[list[Callable[[], bool]]] = collections.deque()
        for passage in passages:
            under_way.append(self._start(passage, [packed(own, passage.layout) for own in given]))
            while under_way:
                # Each takes one turn; those that are done leave.
                for stages in list(under_way):
                    going_on = [stage() for stage in stages]
                    assert len(set(going_on)) == 1, "workers are at different stages"
                    communicate(self._lines)
                    if not going_on[0]:
                        under_way.remove(stages)
                if overlapping and passage is not passages[-1]:
                    break
        for state in self.states:
            state.end_step()
        self._replan()
        return passages

    def _replan(self) -> None:
        """What ``Replanner`` does on each worker."""
        replanned = [state.plan.replan() for state in self.states]
        assert len(set(replanned)) == 1, "some workers have a new plan and others have not"
        if replanned[0]:
            return
        measured = [one for state in self.states if (one := state.measure()) is not None]
        totals = [one.totals.clone() for one in measured]
        for one, state in zip(measured, self.states, strict=bool(measured)):
            one.totals.copy_(sum(totals[1:], totals[0]) / len(totals))
            one.send()
            state.plan.pending = one

    def collectively(self, fn: Callable[[State, Callable[[Tensor], Tensor]], T]) -> list[T]:
        """``fn(state, mean)`` of each worker, where ``mean`` averages over them. ``fn`` is called twice."""
        given: list[list[Tensor]] = [[] for _ in self.states]

        def noting(own: list[Tensor]) -> Callable[[Tensor], Tensor]:
            def note(tensor: Tensor) -> Tensor:
                own.append(tensor.clone())
                return tensor

            return note

        def replaying(means: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
            following = iter(means)
            return lambda _: next(following).clone()

        for own, state in zip(given, self.states, strict=True):
            fn(state, noting(own))
        means = [torch.stack(tensors).sum(0) / len(tensors) for tensors in zip(*given, strict=True)]
        return [fn(state, replaying(means)) for state in self.states]

    def _layout(self, names: tuple[str, ...], compress: bool) -> Layout:
        if (names, compress) not in self._layouts:
            shapes = [(name, self.shapes[name]) for name in names]
            self._layouts[names, compress] = Layout.build(shapes, self.config, compress=compress)
        plans = [state.plan.layout(self._layouts[names, compress]) for state in self.states]
        assert all(plan.segments == plans[0].segments for plan in plans), "workers have different plans"
        return plans[0]

    def _start(self, passage: Passage, given: Sequence[Values]) -> list[Callable[[], bool]]:
        """For each worker what does its next stage and says whether there are more."""
        compressions = [
            Compression(state, passage.layout, gradients, line)
            for state, gradients, line in zip(self.states, given, self._lines, strict=True)
        ]
        passage.bucket = compressions[0].bucket
        wide = compressions[0].bucket.message_P.dtype
        generators = [compression.run() for compression in compressions]

        def stage(worker: int) -> bool:
            going_on = next(generators[worker], self) is not self
            bucket = compressions[worker].bucket
            if worker == 0:
                passage.bases.append((bucket.P_hat.clone(), bucket.basis.clone()))
            else:
                assert_same_bits((bucket.P_hat, bucket.basis), passage.bases[-1])
            if not going_on:
                out = {s.name: torch.full(s.shape, torch.nan, dtype=wide) for s in passage.layout.segments}
                # Only what is written over the gradients counts.
                bucket.operations.reconstruct(out, torch.ones(()))
                passage.averages.append(out)
                compressions[worker].reconstruct(given[worker])
                passage.written.append(given[worker])
                passage.verdicts.append(compressions[worker].verdict)
            return going_on

        return [functools.partial(stage, worker) for worker in range(len(compressions))]


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
