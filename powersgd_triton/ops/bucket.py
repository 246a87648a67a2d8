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
"""Σ L Rᵀ of all matrices, as pairs of flat factors: one pair for each repetition of a step."""


class Bucket:
    """The factors of one layout's matrices, contiguous as in messages, and the error buffers of these matrices.

    Factors are flat tensors that hold all shape groups one after the other. ``left`` and ``right`` return views.

    Error feedback is lazy. After a step, M is still G + E. The product that the step sent is subtracted when the next
    step's gradient is added, in the same pass over memory. Until then ``product`` and ``applied`` say what to subtract.

    Args:
        layout: The bucket's tensors.
        dtype: Dtype of factors and messages, fp32 or fp64.
        device: Device of the gradients.
        config: Configuration of the compression.
        errors: {name: error buffer [n, m]} of all matrices. None without error feedback.

    Attributes:
        message_P: [P of all groups | bypass tensors] of this worker, and after a collective the sum over workers.
        message_Q: [Q of all groups]. In the alternating algorithm [Q of all groups | bypass tensors].
        P_hat: Orthonormal left bases [B, n, r].
        basis: Orthonormal right bases [B, m, r], by which the next projection multiplies.
        P, Q: This worker's own products. P is empty in the standard algorithm.
        M: Error buffers, B of [n, m] for each group. None without error feedback.
        keys: Seeds of the matrices' random directions, [B] int64 on the device for each group.
        product: This worker's contribution to the last step.
        applied: Scalar, 0 if the last step is not applied. None if there is no product to subtract from M.
        average: The averaged gradient Ĝ = Σ L Rᵀ.
        bypass_means: Means of the bypass tensors, flat.
        scale: Scalar, the loss scale contained in M. None for 1.
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

    # Error buffers ---------------------------------------------------------------------------------------------------

    def rescale(self, step: Step) -> Tensor | None:
        """Note that M gets this step's loss scale. Return the factor by which that multiplies M. None for 1."""
        if not self.M or step.loss_scale is None:
            return None
        before, device = self.scale, self.message_P.device
        self.scale = step.loss_scale.current(device)
        return step.loss_scale.growth(before, device)

    def compensated(self) -> None:
        """Note that M is G + E: the last step's product is subtracted, and this step's does not exist yet."""
        self.applied = None

    def commit(self, product: Product, average: Product, bypass_means: Tensor, verdict: Tensor) -> None:
        """Note what the step sent. The next step subtracts it from M, unless ``verdict`` is 0 by then."""
        self.product, self.average, self.bypass_means = product, average, bypass_means
        if self.M:
            self.applied = verdict

    def take_back(self, unsent: Mapping[str, Tensor]) -> None:
        """Leave matrices out of the pending product where the scalar ``unsent[name]`` is True, so that E keeps them."""
        masks = []
        for group in self.layout.groups:
            never = torch.zeros((), dtype=torch.bool, device=self.message_P.device)
            mask = torch.stack([unsent.get(segment.name, never).to(never.device) for segment in group.segments])
            masks.append(mask.view(-1, 1, 1))
        product = []
        for left, right in self.product:
            # A new tensor, since the left factor may be a basis.
            kept = left.clone()
            for factor, mask in zip(self.left(kept), masks, strict=True):
                factor.masked_fill_(mask, 0)
            product.append((kept, right))
        self.product = product

    def materialize(self) -> None:
        """M ← E: subtract the pending product, and divide by the loss scale contained in M."""
        self._settle(self.M or [], self.applied)
        self.applied = self.scale = None

    def errors(self, step: Step, *, wide: bool = False) -> dict[str, Tensor]:
        """Return copies {name: E}, in at least fp32 if ``wide``. Nothing changes.

        The product of an open step is not subtracted, since it is not known yet whether the step is applied.
        """
        copies = [
            [M.to(torch.promote_types(M.dtype, torch.float32) if wide else M.dtype, copy=True) for M in errors]
            for errors in self.M or []
        ]
        self._settle(copies, None if step.decides(self.applied) else self.applied)
        return {
            segment.name: error
            for group, errors in zip(self.layout.groups, copies, strict=False)
            for segment, error in zip(group.segments, errors, strict=True)
        }

    def _settle(self, buffers: list[list[Tensor]], applied: Tensor | None) -> None:
        """Turn M into E: subtract the pending product unless ``applied`` is 0 or None, and divide by the loss scale."""
        if applied is not None:
            for errors, (P, Q) in zip(buffers, self.joined(self.product), strict=True):
                subtract_product_reference(errors, P, Q, applied)
                for error in errors:
                    # Near the largest number, the difference may overflow although M and the factors are finite.
                    error.nan_to_num_(nan=0.0)
        if self.scale is not None:
            for error in [error for errors in buffers for error in errors]:
                error.div_(self.scale)

    def wire_plan(self, numel: int, *, left: bool, workers: int) -> WirePlan | None:
        """Return the byte format of a message of ``numel`` elements. None if the message is sent as it is."""
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
        """Return views [B, n, r] of flat left factors, group by group."""
        return [
            factors[g.p_offset : g.p_offset + g.p_numel].view(len(g.segments), g.n, g.rank) for g in self.layout.groups
        ]

    def right(self, factors: Tensor) -> list[Tensor]:
        """Return views [B, m, r] of flat right factors, group by group."""
        return [
            factors[g.q_offset : g.q_offset + g.q_numel].view(len(g.segments), g.m, g.rank) for g in self.layout.groups
        ]

    def joined(self, product: Product) -> list[tuple[Tensor, Tensor]]:
        """Return a product as one pair of factors [B, n, k], [B, m, k] for each group. One pair gives views."""
        if len(product) == 1:
            return list(zip(self.left(product[0][0]), self.right(product[0][1]), strict=True))
        lefts = zip(*(self.left(P) for P, _ in product), strict=True)
        rights = zip(*(self.right(Q) for _, Q in product), strict=True)
        return [(torch.cat(P, dim=2), torch.cat(Q, dim=2)) for P, Q in zip(lefts, rights, strict=True)]

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """Return the compressed tensors of {name: contiguous tensor} as matrices, group by group."""
        return [[tensors[s.name].view(group.n, group.m) for s in group.segments] for group in self.layout.groups]

    def bypass(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the bypass tensors of {name: contiguous tensor}, flat."""
        return [tensors[segment.name].view(-1) for segment in self.layout.bypass]

    def split_bypass(self, flat: Tensor) -> Sequence[Tensor]:
        """Split the bypass part of a message, or ``bypass_means``, into views of the bypass tensors."""
        places: Sequence[Tensor] = flat.split([segment.numel for segment in self.layout.bypass])
        return places


def seed(name: str, config: PowerSGDConfig) -> int:
    """Return the seed of a matrix's random directions. It is the same on all workers and in every bucket."""
    return zlib.crc32(name.encode()) ^ config.seed


def _on_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, without waiting for it."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
