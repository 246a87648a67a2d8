"""The memory of one bucket: its messages, factors and error buffers."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from powersgd_triton.layout import Layout
from powersgd_triton.ops.operations import Operations


@dataclasses.dataclass
class GroupTensors:
    """Everything that a step knows of B matrices of one n × m.

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


class BucketState:
    """The factors of one layout's matrices, contiguous as they travel.

    Attributes:
        layout: the bucket's tensors.
        message_P: first message, [P of all groups | bypass tensors].
        message_Q: second message, [Q of all groups].
        P_hat, Q, basis: all groups' factors of that name, flat.
        bypass: the bypass tensors' places in the first message.
        groups: views of them, for each of ``layout.groups``.
        applied: scalar of the last step that this bucket took part in, 0 if the optimizer skips that step; None where
            M holds no product that is still to be subtracted.
        operations: the stages of a step on this bucket.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        operations: Callable[[BucketState], Operations],
    ) -> None:
        def new(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        self.layout = layout
        self.message_P = new(layout.p_numel + layout.bypass_numel)
        self.message_Q = new(layout.q_numel)
        self.P_hat, self.Q, self.basis = new(layout.p_numel), new(layout.q_numel), new(layout.q_numel)
        self.applied: Tensor | None = None
        self.groups: list[GroupTensors] = []
        self.bypass = [
            self.message_P[offset : offset + segment.numel]
            for segment, offset in zip(layout.bypass, layout.bypass_offsets, strict=True)
        ]
        for group in layout.groups:
            B, n, m, r = len(group.segments), group.n, group.m, group.rank
            rows = slice(group.p_offset, group.p_offset + group.p_numel)
            columns = slice(group.q_offset, group.q_offset + group.q_numel)
            keys = [zlib.crc32(segment.name.encode()) ^ seed for segment in group.segments]
            self.groups.append(
                GroupTensors(
                    M=None,
                    P=self.message_P[rows].view(B, n, r),
                    P_hat=self.P_hat[rows].view(B, n, r),
                    Q=self.Q[columns].view(B, m, r),
                    Q_mean=self.message_Q[columns].view(B, m, r),
                    basis=self.basis[columns].view(B, m, r),
                    keys=torch.tensor(keys, dtype=torch.int64).to(device),
                )
            )
        self.operations = operations(self)

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """The compressed ones of {name: contiguous tensor} as matrices, group by group."""
        return [[tensors[s.name].view(group.n, group.m) for s in group.segments] for group in self.layout.groups]

    def bypass_tensors(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The others, flat."""
        return [tensors[segment.name].view(-1) for segment in self.layout.bypass]
