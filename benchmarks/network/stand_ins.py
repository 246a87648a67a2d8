"""A worker whose collectives are counted instead of carried out, and an engine that computes nothing."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.core.scheme import Scheme, Task
from powersgd_triton.demo.measure import Call
from powersgd_triton.layout.layout import RowPartition
from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.backend import Backend, Message
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.step import Step
from powersgd_triton.ops.wire import Wire
from powersgd_triton.planning.trial import StandIn
from powersgd_triton.schemes.low_rank import LowRank
from powersgd_triton.schemes.mixed import Mixed

META = torch.device("meta")
"""Device of tensors that have sizes and no memory."""


class _Done:
    def wait(self) -> None:
        pass


class _Collectives:
    """The functions of ``torch.distributed`` that a communicator calls. They only note the call."""

    def __init__(self, note: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._note = note

    def __getattr__(self, name: str) -> Callable[..., _Done]:
        # Which functions there are depends on the version of torch.
        getattr(dist, name)

        def noted(*args: Any, **kwargs: Any) -> _Done:
            self._note(name, args, kwargs)
            return _Done()

        return noted


class CountedWorker(StandIn):
    """One of several workers, the others of which do the same."""

    def __init__(self, index: int, workers: int, calls: list[tuple[bool, Call]], *, inside: bool = False) -> None:
        def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((inside, Call.of(name, args, kwargs, workers, index)))

        super().__init__(workers, index, _Collectives(note))


class _Unwritten:
    """A ``Wire`` that writes nothing."""

    def __init__(self, plan: WirePlan) -> None:
        self.plan = plan

    def encode(self, message: Tensor, own: Tensor | None, *, out: Tensor) -> None: ...

    def reduce(self, received: Tensor, own: Tensor | None, worker: int, *, out: Tensor) -> None: ...

    def decode(self, gathered: Tensor, *, out: Tensor) -> None: ...


class _Messages:
    """A backend that computes nothing: its messages have the right sizes."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def project(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> Message:  # noqa: ARG002
        bucket, layout = self.bucket, self.bucket.layout
        content = bucket.message_P if repetition == 0 else bucket.message_P[: layout.p_numel]
        return Message(content, left=True, own=bucket.P if bucket.P.numel() else None)

    def backproject(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> Message:  # noqa: ARG002
        bucket, layout = self.bucket, self.bucket.layout
        content = bucket.message_Q if repetition == 0 else bucket.message_Q[: layout.q_numel]
        return Message(content, left=False, own=bucket.Q)

    def commit(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> None: ...

    def reconstruct(self, out: Mapping[str, Tensor], overflow: Tensor | None) -> None: ...

    def reconstruct_ranges(self, out: Mapping[str, tuple[int, Tensor]], overflow: Tensor | None) -> None: ...

    def orthogonalize_bases(self, step: Step, *, redraw: bool = False) -> None: ...

    def wire(self, plan: WirePlan) -> Wire:
        return _Unwritten(plan)


class Counted(LowRank):
    """PowerSGD whose steps communicate and compute nothing."""

    def prepare(self, task: Task) -> Backend:
        """See ``Scheme``."""
        worker, workers = task.communicator.share
        rows = RowPartition.build(task.layout, workers)
        return _Messages(Bucket(task.layout, torch.float32, META, task.config, None, rows, worker))


def counted() -> Scheme:
    """Return a scheme whose factors are not computed."""
    scheme = Mixed()
    scheme._factors = Counted()
    return scheme
