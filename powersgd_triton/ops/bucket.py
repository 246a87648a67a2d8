"""The memory of one bucket: its messages, factors and error buffers."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.kernels.table import integers
from powersgd_triton.layout.layout import Layout, wire_format
from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.operations import Message, Operations
from powersgd_triton.ops.wire import Wire

Product = list[tuple[Tensor, Tensor]]
"""Σ L Rᵀ for all matrices: pairs of flat factors, one for each iteration of a step."""


@dataclasses.dataclass
class Group:
    """What belongs to B matrices of one n × m.

    Attributes:
        M: error buffers, B of [n, m]; None without error feedback.
        seeds: for random directions, of each matrix.
        keys: the same as [B] int64 on the device.
    """

    M: list[Tensor] | None
    seeds: list[int]
    keys: Tensor


class BucketState:
    """The factors of one layout's matrices, contiguous as they travel.

    Factors are flat: those of all groups one behind the other, see ``left`` and ``right``.

    Attributes:
        layout: the bucket's tensors.
        message_P: [P of all groups | bypass tensors], this worker's, then the sum over workers.
        message_Q: [Q of all groups], in the alternating algorithm [Q of all groups | bypass tensors].
        P_hat: left bases [B, n, r], orthonormal.
        basis: right bases [B, m, r], orthonormal: what the next projection multiplies by.
        P, Q: this worker's own products; P only in the alternating algorithm.
        groups: for each of ``layout.groups``.
        product: what error feedback still has to subtract from M, this worker's own.
        average: the averaged gradient, Ĝ = Σ L Rᵀ.
        bypass_means: where the bypass tensors' means are.
        applied: scalar of the last step that this bucket took part in, 0 if the optimizer skips that step; None where
            M holds no product that is still to be subtracted.
        scale: scalar, the loss scale that M contains; None for 1.
        width: of the factors in messages.
        ranks_change: whether there may be many ranks in the course of a training.
        operations: the stages of a step on this bucket.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        config: PowerSGDConfig,
        operations: Callable[[BucketState], Operations],
    ) -> None:
        def new(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        alternating = config.algorithm == "alternating"
        self.layout = layout
        self.message_P = new(layout.p_numel + layout.bypass_numel)
        self.message_Q = new(layout.q_numel + (layout.bypass_numel if alternating else 0))
        self.P_hat, self.basis = new(layout.p_numel), new(layout.q_numel)
        self.P, self.Q = new(layout.p_numel if alternating else 0), new(layout.q_numel)
        self.product: Product = []
        self.average: Product = []
        self.applied: Tensor | None = None
        self.scale: Tensor | None = None
        self.bypass_means = self.message_P[layout.p_numel :]
        self.groups = []
        for group in layout.groups:
            seeds = [zlib.crc32(segment.name.encode()) ^ config.seed for segment in group.segments]
            self.groups.append(Group(None, seeds, integers([seeds], len(seeds), torch.int64, device)[0]))
        self.width = wire_format(config)
        self.ranks_change = config.planned
        self._wires: dict[tuple[bool, int, int], Wire] = {}
        self.operations = operations(self)

    def wire(self, message: Message, workers: int) -> Wire:
        """What writes and reads messages of this kind."""
        factors = self.layout.p_numel if message.left else self.layout.q_numel
        key = message.left, message.content.numel() - factors, workers
        if key not in self._wires:
            shapes = self.layout.factor_shapes(left=message.left)
            plan = WirePlan.build(self.width, shapes, key[1], self.message_P.element_size(), workers)
            self._wires[key] = self.operations.wire(plan)
        return self._wires[key]

    def left(self, factors: Tensor) -> list[Tensor]:
        """Views [B, n, r] of flat left factors, group by group."""
        return [
            factors[g.p_offset : g.p_offset + g.p_numel].view(len(g.segments), g.n, g.rank) for g in self.layout.groups
        ]

    def right(self, factors: Tensor) -> list[Tensor]:
        """Views [B, m, r] of flat right factors, group by group."""
        return [
            factors[g.q_offset : g.q_offset + g.q_numel].view(len(g.segments), g.m, g.rank) for g in self.layout.groups
        ]

    def column_energies(self) -> list[Tensor]:
        """fp64 [B, r] for each group: ‖l_k‖² ‖r_k‖² of the average's columns. One of each pair is orthonormal."""
        found = [
            torch.zeros(len(g.segments), g.rank, device=self.P_hat.device, dtype=torch.float64)
            for g in self.layout.groups
        ]
        for P, Q in self.average:
            for energy, left, right in zip(found, self.left(P), self.right(Q), strict=True):
                energy += left.double().square().sum(dim=1) * right.double().square().sum(dim=1)
        return found

    def joined(self, product: Product) -> list[tuple[Tensor, Tensor]]:
        """A product as one pair of factors [B, n, k], [B, m, k] for each group: views if it is of one pair."""
        if len(product) == 1:
            return list(zip(self.left(product[0][0]), self.right(product[0][1]), strict=True))
        lefts = zip(*(self.left(P) for P, _ in product), strict=True)
        rights = zip(*(self.right(Q) for _, Q in product), strict=True)
        return [(torch.cat(P, dim=2), torch.cat(Q, dim=2)) for P, Q in zip(lefts, rights, strict=True)]

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """The compressed ones of {name: contiguous tensor} as matrices, group by group."""
        return [[tensors[s.name].view(group.n, group.m) for s in group.segments] for group in self.layout.groups]

    def bypass(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The others, flat."""
        return [tensors[segment.name].view(-1) for segment in self.layout.bypass]
