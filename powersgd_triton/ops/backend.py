"""The interface of a backend, its messages, and scratch memory."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.step import Step
from powersgd_triton.ops.wire import Wire


@dataclasses.dataclass(frozen=True)
class Message:
    """A message to be summed over the workers in place: [left or right factors | bypass tensors of a first message].

    ``own`` are this worker's factors, as the average contains them: the wire corrects them if it rounds. None if only
    the span of the sum is used.
    """

    content: Tensor
    left: bool
    own: Tensor | None


STAGES = ("orthogonalize_bases", "project", "backproject", "commit", "reconstruct")
"""The methods of a backend that compute a step."""


Ranges = Mapping[str, tuple[int, Tensor]]
"""{name: (first element, flat tensor that takes the elements from there on)}."""


class Average(Protocol):
    """The average of one bucket, in the form in which a scheme has it."""

    def reconstruct(self, out: Mapping[str, Tensor], overflow: Tensor | None) -> None:
        """Write it to {name: contiguous tensor} of any float dtype.

        ``overflow`` is a scalar that becomes 0 if an element does not fit its dtype. None skips this check.
        """

    def reconstruct_ranges(self, out: Ranges, overflow: Tensor | None) -> None:
        """Write parts of it, of some of the tensors: a worker's shard."""


class Backend(Average, Protocol):
    """The stages of a step on one bucket, in the order in which ``LowRank.average`` calls them.

    In the end it is the average: Ĝ, of which it computes only rows that overlap with ranges, and the bypass tensors'
    means.

    Gradients are {name: contiguous tensor} with all of the layout's tensors. ``repetition`` counts from 0 to
    ``config.iterations`` − 1. Each repetition works on what the previous ones left over.
    """

    bucket: Bucket

    def project(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> Message:
        """Compute P = M Q. The first product of a step also writes M ← G + growth · (M − pending product)."""

    def backproject(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> Message:
        """Compute Q = Mᵀ P̂, in the standard algorithm after P̂ = orthogonalize(P).

        In the alternating algorithm this may be the first product of a step.
        """

    def commit(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> None:
        """Turn sums into means, and orthonormalize the mean as the basis of the next product.

        The last repetition sets the bucket's ``product`` and ``average``. If a sum of the step is not finite, M gets
        back what it had, the bases stay, the average becomes NaN and the step's verdict 0.
        """

    def orthogonalize_bases(self, step: Step, *, redraw: bool = False) -> None:
        """Make the bases orthonormal. With ``redraw``, draw new ones as a function of the keys and the step."""

    def wire(self, plan: WirePlan) -> Wire:
        """Return a new object that encodes, sums and decodes messages with factors narrower than fp32."""


class Workspace:
    """Scratch memory of one engine's kernels by name and device. Its buckets share it, since they share one stream.

    Attributes:
        captured: Whether a step was captured in a CUDA graph. Its replays use the memory of that time, so it is kept.
        version: Changes when memory is replaced by larger memory.
    """

    def __init__(self) -> None:
        self.captured, self.version = False, 0
        self._memory: dict[tuple[str, torch.device], Tensor] = {}
        self._kept: list[Tensor] = []

    def get(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of at least ``numel`` elements, with any values."""
        memory = self._memory.get((name, device))
        if memory is None or memory.numel() < numel:
            if memory is not None and self.captured:
                self._kept.append(memory)
            memory = self._memory[name, device] = torch.empty(numel, dtype=dtype, device=device)
            self.version += 1
        return memory
