"""The operations of a step, and the choice of who carries them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from powersgd_triton.ops.reference import (
    backproject_reference,
    compensate_project_reference,
    orthogonalize_reference,
    reconstruct_reference,
    rollback_reference,
    subtract_product_reference,
)

Matrices = Sequence[Tensor]


@dataclasses.dataclass
class GroupTensors:
    """Everything that the operations know of B matrices of one n × m.

    Attributes:
        M: error buffers, B of [n, m]; None without error feedback.
        P: [B, n, r], this worker's product, then the sum over workers; a view of the first message.
        P_hat: [B, n, r], orthonormal.
        Q: [B, m, r], this worker's own.
        Q_mean: [B, m, r], the mean over workers; a view of the second message.
        basis: [B, m, r], orthonormal, what the next projection multiplies by.
        keys: [B] int64, for random directions.
    """

    M: list[Tensor] | None
    P: Tensor
    P_hat: Tensor
    Q: Tensor
    Q_mean: Tensor
    basis: Tensor
    keys: Tensor


class Operations(Protocol):
    """What a backend provides. Each call handles all matrices of a bucket; lists are parallel to the groups."""

    def compensate_project(
        self, groups: Sequence[GroupTensors], gradients: Sequence[Matrices], applied: Tensor | None
    ) -> None:
        """M ← G + (M − P̂ Qᵀ), P = M · basis."""

    def orthogonalize(
        self, sources: Sequence[Tensor], keys: Sequence[Tensor], step: int, epsilon: float, out: Sequence[Tensor]
    ) -> None:
        """Orthonormal bases of the columns of each source."""

    def backproject(self, groups: Sequence[GroupTensors], gradients: Sequence[Matrices]) -> None:
        """Q = Mᵀ P̂."""

    def reconstruct(self, P: Sequence[Tensor], Q: Sequence[Tensor], out: Sequence[Matrices]) -> None:
        """out = P Qᵀ."""

    def subtract_product(self, groups: Sequence[GroupTensors], applied: Tensor) -> None:
        """M ← M − P̂ Qᵀ where applied."""

    def rollback(self, groups: Sequence[GroupTensors], gradients: Sequence[Matrices], finite: Tensor) -> None:
        """Take G out of M again where not finite."""


class TorchOperations:
    """The reference, group by group."""

    def compensate_project(
        self, groups: Sequence[GroupTensors], gradients: Sequence[Matrices], applied: Tensor | None
    ) -> None:
        for group, G in zip(groups, gradients, strict=True):
            compensate_project_reference(G, group.M, group.P_hat, group.Q, applied, group.basis, out=group.P)

    def orthogonalize(
        self, sources: Sequence[Tensor], keys: Sequence[Tensor], step: int, epsilon: float, out: Sequence[Tensor]
    ) -> None:
        for A, key, result in zip(sources, keys, out, strict=True):
            orthogonalize_reference(A, keys=key, step=step, epsilon=epsilon, out=result)

    def backproject(self, groups: Sequence[GroupTensors], gradients: Sequence[Matrices]) -> None:
        for group, G in zip(groups, gradients, strict=True):
            backproject_reference(G if group.M is None else group.M, group.P_hat, out=group.Q)

    def reconstruct(self, P: Sequence[Tensor], Q: Sequence[Tensor], out: Sequence[Matrices]) -> None:
        for left, right, matrices in zip(P, Q, out, strict=True):
            reconstruct_reference(left, right, out=matrices)

    def subtract_product(self, groups: Sequence[GroupTensors], applied: Tensor) -> None:
        for group in groups:
            if group.M is not None:
                subtract_product_reference(group.M, group.P_hat, group.Q, applied)

    def rollback(self, groups: Sequence[GroupTensors], gradients: Sequence[Matrices], finite: Tensor) -> None:
        for group, G in zip(groups, gradients, strict=True):
            if group.M is not None:
                rollback_reference(G, group.M, finite)


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend that was chosen, and why."""

    name: str
    reason: str
    operations: Operations


def select_backend(name: str, device: torch.device) -> Backend:
    """Choose the backend for gradients on ``device``.

    Args:
        name: "torch", or "auto" for the fastest that works there.

    Raises:
        ValueError: there is no backend of that name.
    """
    if name == "torch":
        return Backend("torch", "asked for by name", TorchOperations())
    if name == "auto":
        return Backend("torch", f"the one backend for {device.type} devices", TorchOperations())
    raise ValueError(f"backend must be 'auto' or 'torch'; got {name!r}")
