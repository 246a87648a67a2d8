"""What a backend provides: one bucket's step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor

from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.wire import Wire


@dataclasses.dataclass(frozen=True)
class Step:
    """What the operations need to know of a step.

    Attributes:
        iteration: its number, from which random directions are drawn.
        turn: number of alternating products before it.
        workers: number of workers whose messages are summed.
        epsilon: share of a column below which it carries nothing, see ``orthogonalize_reference``.
        warm_start: whether the next step starts from this one's Q̄.
        repetitions: how often it is done, each time on what is left.
        growth: positive scalar by which the loss scale has grown since the bucket's M was written; None for 1.
    """

    iteration: int
    turn: int
    workers: int
    epsilon: float
    warm_start: bool
    repetitions: int
    growth: Tensor | None = None

    def multiplies_left(self, repetition: int) -> bool:
        """Whether the alternating algorithm computes Mᵀ P̂ rather than M Q̂ in this repetition."""
        return (self.turn + repetition) % 2 == 0


@dataclasses.dataclass(frozen=True)
class Message:
    """What is to be summed over the workers, in place.

    Attributes:
        content: [factors | bypass tensors], the latter once a step.
        left: whether the factors are left ones.
        own: what this worker's factors contribute to the average, to be corrected where they are rounded; None where
            only their span is used.
    """

    content: Tensor
    left: bool
    own: Tensor | None


class Operations(Protocol):
    """One algorithm on one bucket, whose memory it reads and writes.

    Gradients are {name: contiguous tensor} with all of the layout's tensors.
    """

    def exchange(self, gradients: Mapping[str, Tensor], step: Step, verdict: Tensor) -> Iterator[Message]:
        """Do a step up to the averaged factors. What is yielded must be summed over the workers before going on.

        M ← G + growth · (M − what is pending), then products and messages. At the end the bucket's ``product`` is what
        this worker contributed and ``average`` is Ĝ. Where a sum is not finite, M gets back what it had, the bases
        stay, the average becomes NaN and ``verdict`` 0.
        """

    def reconstruct(self, out: Mapping[str, Tensor], verdict: Tensor) -> None:
        """out = Ĝ and the bypass tensors' means, in any float dtype; ``verdict`` ← 0 where an element does not fit."""

    def subtract_product(self) -> None:
        """M ← M − product where that was applied: the error that lazy error feedback has not yet written down."""

    def redraw_bases(self, step: Step) -> None:
        """Random orthonormal bases, a function of the keys and the step."""

    def orthogonalize_bases(self, step: Step) -> None:
        """Make the bases orthonormal again."""

    def wire(self, plan: WirePlan) -> Wire:
        """What writes the bucket's messages narrower than fp32, and reads them."""
