"""What a backend provides: the stages of one bucket's step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Step:
    """What the stages of a step need to know of it.

    Attributes:
        iteration: its number, from which random directions are drawn.
        workers: number of workers whose messages are summed.
        epsilon: share of a column below which it carries nothing, see ``orthogonalize_reference``.
        warm_start: whether the next step starts from this one's Q̄.
    """

    iteration: int
    workers: int
    epsilon: float
    warm_start: bool


class Operations(Protocol):
    """The stages of a step on one bucket, whose memory they read and write.

    Gradients are {name: contiguous tensor} with all of the layout's tensors.
    """

    def compensate_project(self, gradients: Mapping[str, Tensor]) -> None:
        """M ← G + (M − P̂ Qᵀ), P = M · basis; the first message is [P | bypass tensors]."""

    def backproject(self, gradients: Mapping[str, Tensor], step: Step) -> None:
        """P̂ = orthogonalize(P), Q = Mᵀ P̂; the second message is Q. The bypass tensors become means."""

    def commit(self, gradients: Mapping[str, Tensor], step: Step, verdict: Tensor) -> None:
        """Q̄ = mean of Q, and what the next step starts from.

        Where a sum is not finite, M gets back what it had, the basis stays, Q̄ becomes NaN and ``verdict`` 0.
        """

    def reconstruct(self, out: Mapping[str, Tensor]) -> None:
        """out = P̂ Q̄ᵀ and the bypass tensors' means, in any float dtype."""

    def subtract_product(self) -> None:
        """M ← M − P̂ Qᵀ where that was applied: the error that lazy error feedback has not yet written down."""

    def redraw_bases(self, step: Step) -> None:
        """Random orthonormal bases, a function of the keys and the step."""

    def orthogonalize_bases(self, step: Step) -> None:
        """Make the bases orthonormal again."""
