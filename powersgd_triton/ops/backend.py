"""What a backend does for one bucket, and the messages that it gives to be summed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.step import Step
from powersgd_triton.ops.wire import Wire


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


class Backend(Protocol):
    """The stages of a step on one bucket, in the order in which ``Engine.run`` calls them.

    Gradients are {name: contiguous tensor} with all of the layout's tensors. ``repetition`` counts from 0 to
    ``config.iterations`` − 1; all but the first work on what the ones before left over.
    """

    bucket: Bucket

    def project(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> Message:
        """P = M Q. The first product of a step writes M ← G + growth · (M − what is to be subtracted) on the way."""

    def backproject(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> Message:
        """Q = Mᵀ P̂. In the standard algorithm P̂ = orthogonalize(P) before; else this may be a step's first product."""

    def commit(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> None:
        """Turn sums into means, and their orthonormal basis into what the next product starts from.

        The last repetition leaves the bucket's ``product`` and ``average``. Where a sum of the step is not finite,
        M gets back what it had, the bases stay, the average becomes NaN and the step's verdict 0.
        """

    def reconstruct(self, out: Mapping[str, Tensor], overflow: Tensor | None) -> None:
        """out = Ĝ and the bypass tensors' means, in any float dtype.

        ``overflow``: scalar, set to 0 where an element does not fit its dtype; None where no one asks.
        """

    def orthogonalize_bases(self, step: Step, *, redraw: bool = False) -> None:
        """Make the bases orthonormal, or draw random orthonormal ones, a function of the keys and the step."""

    def wire(self, plan: WirePlan) -> Wire:
        """What writes messages narrower than fp32, and reads them."""
