"""The memory of one bucket: its messages, factors and error buffers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import Layout, wire_format
from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.reference import subtract_product_reference
from powersgd_triton.ops.step import Step

Product = Sequence[tuple[Tensor, Tensor]]
"""Σ L Rᵀ for all matrices: pairs of flat factors, one pair for each repetition of a step."""


class Bucket:
    """The factors of one layout's matrices, contiguous as they travel, and the error buffers of these matrices.

    Factors are flat tensors, with those of all shape groups one behind the other; ``left`` and ``right`` give views.

    Error feedback is lazy. After a step M still is G + E; the product that the step sent is subtracted when the next
    step's gradient is added, in the same pass over memory. Until then ``product`` and ``applied`` say what to subtract.

    Args:
        layout: the bucket's tensors.
        dtype: of factors and messages, fp32 or fp64.
        device: of the gradients.
        config: what to compress and how.
        errors: the error buffers, [n, m] of each matrix by name; None without error feedback.

    Attributes:
        message_P: [P of all groups | bypass tensors], this worker's, then the sum over workers.
        message_Q: [Q of all groups], in the alternating algorithm [Q of all groups | bypass tensors].
        P_hat: left bases [B, n, r], orthonormal.
        basis: right bases [B, m, r], orthonormal: what the next projection multiplies by.
        P, Q: this worker's own products; P only in the alternating algorithm.
        M: error buffers, for each group B of [n, m]; None without error feedback.
        keys: for each group [B] int64 on the device, the matrices' seeds of random directions.
        product: what this worker contributed to the last step.
        applied: scalar, 0 where the last step is not applied; None where M holds no product to be subtracted.
        average: the averaged gradient Ĝ = Σ L Rᵀ.
        bypass_means: means of the bypass tensors, flat.
        scale: scalar, the loss scale that M contains; None for 1.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        config: PowerSGDConfig,
        errors: Mapping[str, Tensor] | None = None,
    ) -> None:
        def new(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        alternating = config.algorithm == "alternating"
        self.layout, self.config = layout, config
        self.message_P = new(layout.p_numel + layout.bypass_numel)
        self.message_Q = new(layout.q_numel + (layout.bypass_numel if alternating else 0))
        self.P_hat, self.basis = new(layout.p_numel), new(layout.q_numel)
        self.P, self.Q = new(layout.p_numel if alternating else 0), new(layout.q_numel)
        self.M: list[list[Tensor]] | None = None
        if errors is not None:
            self.M = [[errors[segment.name] for segment in group.segments] for group in layout.groups]
        self.keys = [
            _on_device(torch.tensor([seed(segment.name, config) for segment in group.segments]), device)
            for group in layout.groups
        ]
        self.product: Product = []
        self.applied: Tensor | None = None
        self.average: Product = []
        self.bypass_means = self.message_P[layout.p_numel :]
        self.scale: Tensor | None = None
        self._wire_plans: dict[tuple[int, bool, int], WirePlan] = {}

    # What a step does to M -------------------------------------------------------------------------------------------

    def rescale(self, step: Step) -> Tensor | None:
        """M is about to get this step's loss scale. Returns what that multiplies it by; None for 1."""
        if not self.M or step.loss_scale is None:
            return None
        before, device = self.scale, self.message_P.device
        self.scale = step.loss_scale.current(device)
        return step.loss_scale.growth(before, device)

    def compensated(self) -> None:
        """M is G + E now: the product of the step before is subtracted, and this step's is not made yet."""
        self.applied = None

    def commit(self, product: Product, average: Product, bypass_means: Tensor, verdict: Tensor) -> None:
        """Note what the step sent. It is subtracted from M in the next step, unless ``verdict`` is 0 by then."""
        self.product, self.average, self.bypass_means = product, average, bypass_means
        if self.M:
            self.applied = verdict

    def materialize(self) -> None:
        """M ← E: subtract what is still to be subtracted, and divide by the loss scale that M contains."""
        if self.applied is not None:
            for errors, (P, Q) in zip(self.M or [], self.joined(self.product), strict=True):
                subtract_product_reference(errors, P, Q, self.applied)
                for M in errors:
                    # Next to the largest numbers the difference may be out of range, though M and the factors are not.
                    M.nan_to_num_(nan=0.0)
            self.applied = None
        if self.scale is not None:
            for M in [M for errors in self.M or [] for M in errors]:
                M.div_(self.scale)
            self.scale = None

    def wire_plan(self, numel: int, *, left: bool, workers: int) -> WirePlan | None:
        """How a message of ``numel`` elements with left or right factors is written; None where it travels as it is."""
        width = wire_format(self.config)
        if width.bits == 32 or workers == 1 or numel == 0:
            return None
        if (numel, left, workers) not in self._wire_plans:
            bypass = numel - (self.layout.p_numel if left else self.layout.q_numel)
            shapes = self.layout.factor_shapes(left=left)
            plan = WirePlan.build(width, shapes, bypass, self.message_P.element_size(), workers)
            self._wire_plans[numel, left, workers] = plan
        return self._wire_plans[numel, left, workers]

    # Views -----------------------------------------------------------------------------------------------------------

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

    def split_bypass(self, flat: Tensor) -> Sequence[Tensor]:
        """The places of the bypass tensors in the end of a message, or in ``bypass_means``."""
        places: Sequence[Tensor] = flat.split([segment.numel for segment in self.layout.bypass])
        return places


def seed(name: str, config: PowerSGDConfig) -> int:
    """The seed of a matrix's random directions: the same on all workers, whatever bucket the matrix is in."""
    return zlib.crc32(name.encode()) ^ config.seed


def _on_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that the host does not wait for."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
