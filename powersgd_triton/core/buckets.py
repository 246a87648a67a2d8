"""The buckets of a model: what the workers have agreed on when a bucket came for the first time."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powersgd_triton.comm.agreement import COMPUTED_BY, Facts, together
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.exchange import waits
from powersgd_triton.comm.nodes import AUTO, check_groups, check_places, given_groups, own_place
from powersgd_triton.core.facts import basis_facts, common_facts, factor_facts, replicated_facts, saved_facts
from powersgd_triton.core.residuals import Residuals
from powersgd_triton.core.scheme import Average, Ranges, Scheme, Task
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import Tensors
from powersgd_triton.ops.backends import computed_by
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.step import Step

Shapes = Callable[[], Mapping[str, Sequence[int]]]
"""Returns {name: shape}."""


@dataclasses.dataclass(eq=False)
class BucketState:
    """One bucket.

    Attributes:
        ranked: Its layout with the ranks in force.
        ranks: The plan's ranks from which ``ranked`` was made.
        memory: What the scheme keeps for it between steps.
        found: What the scheme has found out about it. It stays if a step is void.
        agreed: Whether all workers have prepared it.
        waits: Whether it waited for the next buckets when it came first, since its messages are small.
        joined: The bucket in which it was averaged last: itself, or one of which it is a part.
        known: What the adapter has found out about it.
    """

    layout: Layout
    ranked: Layout = dataclasses.field(init=False)
    ranks: Any = None
    memory: Any = None
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    agreed: bool = False
    waits: bool | None = None
    joined: "BucketState | None" = None
    known: Any = None

    def __post_init__(self) -> None:
        self.ranked = self.layout


class Part(NamedTuple):
    """A bucket with its gradients, and where its average goes; see ``Engine.average``."""

    bucket: BucketState
    gradients: Mapping[str, Tensor]
    ranges: Ranges | None = None
    write: Callable[[Average], None] | None = None
    done: Callable[[], None] | None = None


def write_average(task: Task, parts: Sequence[Part], average: Average) -> None:
    """Write the average of buckets that were averaged as one. Only those written over their gradients are joined."""
    overflow, first = task.step.overflow(task.device), parts[0]
    if first.write is not None:
        first.write(average)
    elif first.ranges is not None:
        average.reconstruct_ranges(first.ranges, overflow)
        if overflow is not None:
            # It may overflow in fp16 although its factors are finite. Only the worker that writes it sees that.
            task.step.uneven |= any(gradient.dtype == torch.float16 for gradient in task.gradients.values())
    else:
        average.reconstruct(task.gradients, overflow)
    for part in parts:
        if part.done is not None:
            part.done()


class Buckets:
    """All buckets of a model by their keys.

    ``find``, ``prepare`` and ``end_step`` run code that may fail on one worker only, and compare what it did. Unless
    all workers agree, all raise an error, and nothing has changed. The arguments are described in ``Engine``.
    """

    def __init__(
        self,
        scheme: Scheme,
        communicator: Communicator,
        tensors: Callable[[], Tensors],
        residuals: Residuals,
        step: Step,
        device: torch.device | None,
    ) -> None:
        self.scheme, self._tensors, self._plan = scheme, tensors, residuals.plan
        self._residuals, self._step = residuals, step
        self.communicator, self.device = communicator, device
        self._buckets: dict[Hashable, BucketState] = {}
        # The tensors whose facts were compared; None before the first step.
        self.compared: Tensors | None = None

    def find(self, key: Hashable, shapes: Shapes, device: torch.device, *, compress: bool = True) -> BucketState:
        """Return a bucket. Collective when it is new. The first call also compares configuration, tensors and step."""
        self.device = device
        if self.communicator.lost_nodes():
            self.invalidate(self.communicator)
        if key in self._buckets:
            return self._buckets[key]
        first = self.compared is None

        def introduce() -> tuple[Layout, Facts, Facts]:
            layout = Layout.build(shapes(), self._plan.config, compress=compress)
            if not first:
                return layout, {}, replicated_facts(layout.shapes, self._plan)
            self._plan.connect(self.communicator.world_size)
            if self.communicator.world_size > 1:
                check_groups(self.communicator.group, self.communicator.node_group)
            common, replicated = self._facts({**layout.shapes, **self._tensors()})
            # Workers that load a state compare it then. Those that unpickle one have not.
            with self._residuals.streams.everywhere():
                saved = saved_facts(self._residuals.loaded)
                bases = basis_facts(self._residuals, self._plan.config)
            return layout, common, {**replicated, **saved, **bases, COMPUTED_BY: computed_by(self._plan.config, device)}

        layout = together("a step", introduce, self.communicator, device)
        if first:
            self._form_nodes(device)
            self.compared = self._tensors() or layout.shapes
        return self._buckets.setdefault(key, BucketState(layout))

    def join(self, parts: Sequence[BucketState]) -> BucketState:
        """Return the bucket of which these are the parts, one after the other."""
        joined = parts[0]
        if len(parts) > 1:
            key = "joined", *map(id, parts)
            if key not in self._buckets:
                self._buckets[key] = BucketState(Layout.joined([part.layout for part in parts]))
            joined = self._buckets[key]
        for part in parts:
            part.joined = joined
        return joined

    def are_large(self, parts: Sequence[Part]) -> bool:
        """Return whether buckets need not wait for the step's next one, to be averaged together."""
        bucket = self.join([part.bucket for part in parts])
        if bucket.waits is None:
            # Decided once: if it followed planned ranks, each plan could need other buckets.
            bucket.waits = waits(self.ranked(bucket), self._plan.config, self.communicator.world_size)
        return not bucket.waits

    def ranked(self, bucket: BucketState) -> Layout:
        """Return a bucket's layout with the ranks in force. If they have changed, drop its memory."""
        if bucket.ranks is not self._plan.ranks:
            before, bucket.ranked, bucket.ranks = bucket.ranked, self._plan.layout(bucket.layout), self._plan.ranks
            if bucket.ranked is not before:
                bucket.memory = None
        return bucket.ranked

    def prepare(self, parts: Sequence[Part]) -> Task:
        """Return the task of averaging buckets as one. Collective when they come for the first time.

        It is not collective if a bucket is new because ranks were planned again, since the host of a GPU must not wait.
        """
        bucket = self.join([part.bucket for part in parts])
        gradients = {name: gradient for part in parts for name, gradient in part.gradients.items()}
        layout, config = self.ranked(bucket), self._plan.config
        context = self._step, config, self.communicator, self._residuals
        # Buckets of which parts are needed are not joined.
        task = Task(layout, gradients, *context, bucket.memory, bucket.found, parts[0].ranges)
        if bucket.memory is not None:
            return task

        def allocate() -> tuple[Any, Facts, Facts]:
            # The new memory takes over errors.
            for earlier in self._residuals.buckets(layout.shapes):
                earlier.materialize(self._step)
            memory = self.scheme.prepare(task)
            # Moving an error is collective. The workers of a node exchange gradients as they are, and others in fp64 if
            # one of them is.
            kinds = {gradient.dtype for gradient in gradients.values()}
            dtypes = sorted(map(str, kinds if self.communicator.inside is not None else kinds & {torch.float64}))
            return memory, {}, {"errors to move": sorted(self._residuals.moving), "dtypes of gradients": dtypes}

        call = "the allocation for a bucket"
        memory = allocate()[0] if bucket.agreed else together(call, allocate, self.communicator, self.device)
        # Tensors are in one bucket at a time.
        for other in self._buckets.values():
            if not other.layout.shapes.keys().isdisjoint(bucket.layout.shapes):
                other.memory = None
        bucket.memory, bucket.agreed = memory, True
        return dataclasses.replace(task, memory=memory)

    def in_use(self) -> list[Bucket]:
        """Return the factors of the last steps' buckets, ordered by the names of their first tensors."""
        # Other schemes may have no factors.
        found = [getattr(bucket.memory, "bucket", None) for bucket in self._buckets.values()]
        return sorted(filter(None, found), key=lambda bucket: bucket.layout.segments[0].name)

    def is_settled(self, bucket: BucketState) -> bool:
        """Return whether the next step of this bucket does the same as its steps from then on."""
        joined = bucket.joined
        factors: Bucket | None = getattr(joined and joined.memory, "bucket", None)
        if joined is None or factors is None or self._residuals.pending:
            return False
        return factors.layout is self.ranked(joined)

    def release(self) -> None:
        """Let the next step allocate memory anew: collectives under way may still write to the old one."""
        for bucket in self._buckets.values():
            bucket.memory = None

    def invalidate(self, communicator: Communicator | None = None) -> None:
        """Lay out all buckets anew when they come again. With ``communicator``, compare everything with its workers."""
        self._buckets.clear()
        if communicator is not None:
            self.communicator, self.compared = communicator, None
            self._residuals.regroup()

    def end_step(self) -> None:
        """Compare configuration, tensors, step and the bits of the factors each ``check_every`` steps. Collective."""
        # Counted by ``ended``: the iteration is one of the things in which workers may differ.
        every, tensors = self._plan.config.check_every, self.compared
        if not every or self._step.ended % every or tensors is None:
            return

        def facts() -> tuple[None, Facts, Facts]:
            common, replicated = self._facts(tensors)
            return None, common, {**replicated, **factor_facts(self.in_use())}

        together("a check", facts, self.communicator, self.device)

    def _facts(self, tensors: Tensors) -> tuple[Facts, Facts]:
        node_group = self.communicator.node_group
        levels = node_group if node_group in (None, AUTO) else "given"
        common = {**common_facts(self._plan.config, self._step.iteration), "node_group": levels}
        common["a loss scale is attached"] = self._step.loss_scale is not None
        return common, replicated_facts(tensors, self._plan)

    def _form_nodes(self, device: torch.device) -> None:
        """Find the nodes, and check that groups that were given fit together on all workers. Collective."""
        communicator = self.communicator
        communicator.form_nodes(device)
        groups = given_groups(communicator.node_group)
        if communicator.inside is not None and groups is not None:
            places = communicator.gather(own_place(groups), device)
            together("a step", lambda: (check_places(groups, places), {}, {}), communicator, device)
