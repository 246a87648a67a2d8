"""The memory of one bucket: its messages, factors and error buffers."""

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import Layout, RowPartition, Segment, ShapeGroup
from powersgd_triton.layout.matrices import wire_format
from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.blocks import Matrices, together
from powersgd_triton.ops.products import subtract_product
from powersgd_triton.ops.step import Step
from powersgd_triton.ops.wire import Wire

Product = Sequence[tuple[Tensor, Tensor]]
"""Σ L Rᵀ of all matrices, as pairs of flat factors: one pair for each repetition of a step."""


class Bucket:
    """The factors of one layout's matrices, contiguous as in messages, and the error buffers of these matrices.

    Factors are flat tensors that hold all shape groups one after the other. ``left`` and ``right`` return views.

    Error feedback is lazy. After a step, M is still G + E. The product that the step sent is subtracted when the next
    step's gradient is added, in the same pass over memory. ``product`` and ``applied`` say what to subtract.

    Args:
        dtype: Dtype of factors and messages, fp32 or fp64.
        errors: {name: error buffer} of the rows that this worker compresses. None without error feedback.
        partition, worker: The rows that each worker of this node compresses, and this one's index. None for all rows.

    Attributes:
        shared: Whether other workers of this node compress a part of the matrices.
        own: The rows that this worker multiplies, as matrices with their places in the factors. M belongs to them.
        message_P: [P of all groups | bypass tensors] of this worker, and after a collective the sum over workers.
        message_Q: [Q of all groups]. In the alternating algorithm [Q of all groups | bypass tensors].
        P_hat: Orthonormal left bases [B, n, r].
        basis: Orthonormal right bases [B, m, r], by which the next projection multiplies.
        P, Q: This worker's own products. P is empty in the standard algorithm.
        M: Error buffers of each group of ``own``, as matrices. None without error feedback.
        buffers: The same by name, [rows, m].
        keys: Seeds of the matrices' random directions, [B] int64 on the device for each group.
        product: This worker's contribution to the last step.
        applied: Scalar, 0 if the last step is not applied. None if M has no product to subtract, as after M ← G + E.
        average: The averaged gradient Ĝ = Σ L Rᵀ.
        bypass_means: Means of the bypass tensors, flat.
        scale: Scalar, the loss scale contained in M. None for 1.
        zeroed: Counts of the columns of bases that were set to zero since they would not have been orthonormal.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        config: PowerSGDConfig,
        errors: Mapping[str, Tensor] | None = None,
        partition: RowPartition | None = None,
        worker: int = 0,
    ) -> None:
        def new(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        alternating = config.algorithm == "alternating"
        self.layout, self.config = layout, config
        self.partition = partition or RowPartition.build(layout, 1)
        self.worker, self.shared = worker, self.partition.workers > 1
        self.own = self.partition.groups(worker)
        self.message_P = new(layout.p_numel + layout.bypass_numel)
        self.message_Q = new(layout.q_numel + (layout.bypass_numel if alternating else 0))
        self.P_hat, self.basis = new(layout.p_numel), new(layout.q_numel)
        self.P, self.Q = new(layout.p_numel if alternating else 0), new(layout.q_numel)
        memory = self.message_P, self.message_Q, self.P_hat, self.basis, self.P, self.Q
        self._memory = {flat.untyped_storage().data_ptr() for flat in memory if len(flat)}
        self._made: dict[Hashable, list[Tensor]] = {}
        self.buffers = errors or {}
        self.M = None if errors is None else self.matrices(errors, self.own)
        numbers = [[key for s in group.segments for key in keys(s, config)] for group in layout.groups]
        seeds = [torch.tensor(own, device="cpu") for own in numbers]
        if device.type not in ("cpu", "meta"):
            # So that the copies do not wait for the device.
            seeds = [own.pin_memory() for own in seeds]
        self.keys = [own.to(device, non_blocking=True) for own in seeds]
        self.product: Product = []
        self.applied: Tensor | None = None
        self.average: Product = []
        self.bypass_means = self.message_P[layout.p_numel :]
        self.scale: Tensor | None = None
        self.zeroed = [torch.zeros((), dtype=torch.int64, device=device)]
        self._wires: dict[tuple[int, bool, int, int], Wire] = {}

    def rescale(self, step: Step) -> Tensor | None:
        """Note that M gets this step's loss scale. Return the factor by which that multiplies M. None for 1."""
        if not self.M or step.loss_scale is None:
            return None
        before, device = self.scale, self.message_P.device
        self.scale = step.loss_scale.current(device)
        return step.loss_scale.growth(before, device)

    def commit(self, product: Product, average: Product, bypass_means: Tensor, verdict: Tensor) -> None:
        """Note what the step sent. The next step subtracts it from M, unless ``verdict`` is 0 by then."""
        self.product, self.average, self.bypass_means = product, average, bypass_means
        if self.M:
            self.applied = verdict

    def take_back(self, unsent: Mapping[str, Tensor], stale: Mapping[str, Tensor]) -> None:
        """Leave matrices out of the pending product where the scalar ``unsent[name]`` is True, so that E keeps them.

        ``stale`` are gradients that M then has to lose. A node's workers have no M of their own, which keeps them.
        """
        applied = self.applied
        assert applied is not None
        for name in () if self.shared else stale.keys() & unsent.keys() & self.buffers.keys():
            M = self.buffers[name]
            counts = unsent[name].to(M.device) & (applied > 0)
            M.sub_(torch.where(counts, stale[name].to(M.dtype).reshape(M.shape), 0))
        masks = []
        never = torch.zeros((), dtype=torch.bool, device=self.message_P.device)
        for group in self.layout.groups:
            rows = [unsent.get(s.name, never).to(never.device).expand(s.batch) for s in group.segments]
            masks.append(torch.cat(rows).view(-1, 1, 1))
        product = []
        for left, right in self.product:
            # A new tensor, since the left factor may be a basis.
            kept = left.clone()
            for factor, mask in zip(self.left(kept), masks, strict=True):
                factor.masked_fill_(mask, 0)
            product.append((kept, right))
        self.product = product

    def materialize(self, step: Step, copies: Sequence[Matrices] | None = None) -> None:
        """M ← E: subtract the pending product unless it is not applied, and divide by the loss scale contained in M.

        With ``copies`` of M, do so there. The product of an open step is not subtracted, since it is not known yet
        whether it is applied. Then, or if the last step is undecided, M stays as it is.
        """
        is_open = step.decides(self.applied)
        if copies is None and (is_open or step.undecided):
            return
        applied = None if is_open else self.applied
        buffers = self.M or [] if copies is None else copies
        if applied is not None:
            for matrices, (P, Q) in zip(buffers, self.joined(self.product, self.own), strict=True):
                subtract_product(matrices, P, Q, applied)
        for error in [error for matrices in buffers for error in matrices]:
            if applied is not None:
                # Near the largest number, the difference may overflow although M and the factors are finite.
                error.nan_to_num_(nan=0.0)
            if self.scale is not None:
                error.div_(self.scale)
        if copies is None:
            self.applied = self.scale = None

    def errors(self, step: Step, *, wide: bool = False) -> dict[str, Tensor]:
        """Return copies {name: E} of whole matrices, in at least fp32 if ``wide``. Other workers' rows are zero."""
        if self.M is None:
            return {}
        # A worker without rows of a matrix must have its error in the same dtype, since errors are averaged.
        dtype = error_dtype(self.config, self.message_P.dtype)
        dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
        device, compressed = self.message_P.device, self.layout.compressed
        whole = {s.name: torch.zeros(s.rows, s.m, dtype=dtype, device=device) for s in compressed}
        offsets = {segment.name: segment.offset for segment in compressed}
        copies: list[Matrices] = []
        for group in self.own:
            rows = [whole[p.name][(p.offset - offsets[p.name]) // p.m :][: p.rows] for p in group.segments]
            for own, piece in zip(rows, group.segments, strict=True):
                own.copy_(self.buffers[piece.name])
            copies.append(together(rows, group.n, group.m))
        self.materialize(step, copies)
        return whole

    def wire(self, new: Callable[[WirePlan], Wire], numel: int, *, left: bool, owners: int, part: int) -> Wire:
        """Return what ``new`` makes for a message of ``numel`` elements, or for this worker's part of a node's.

        ``left`` says whether its factors are left factors. Each of ``owners`` workers sums a chunk of the part.
        """
        key = numel, left, owners, part
        if key not in self._wires:
            bypass, parts = numel - (self.layout.p_numel if left else self.layout.q_numel), self.partition.workers
            shapes, itemsize = self.layout.factor_shapes(left=left), self.message_P.element_size()
            plan = WirePlan.build(wire_format(self.config), shapes, bypass, itemsize, parts * owners)
            self._wires[key] = new(plan.part(part, parts))
        return self._wires[key]

    def left(self, factors: Tensor, groups: Sequence[ShapeGroup] | None = None) -> list[Tensor]:
        """Return views [B, n, r] of flat left factors, for all groups of the layout or for those given."""
        return self._factors(factors, groups, left=True)

    def right(self, factors: Tensor, groups: Sequence[ShapeGroup] | None = None) -> list[Tensor]:
        """Return views [B, m, r] of flat right factors, for all groups of the layout or for those given."""
        return self._factors(factors, groups, left=False)

    def joined(self, product: Product, groups: Sequence[ShapeGroup] | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return a product as one pair of factors [B, n, k], [B, m, k] for each group. One pair gives views."""
        if len(product) == 1:
            ((P, Q),) = product
            return list(zip(self.left(P, groups), self.right(Q, groups), strict=True))
        lefts = zip(*(self.left(P, groups) for P, _ in product), strict=True)
        rights = zip(*(self.right(Q, groups) for _, Q in product), strict=True)
        return [(torch.cat(P, dim=2), torch.cat(Q, dim=2)) for P, Q in zip(lefts, rights, strict=True)]

    def matrices(self, tensors: Mapping[str, Tensor], groups: Sequence[ShapeGroup] | None = None) -> list[Matrices]:
        """Return the compressed tensors of {name: contiguous tensor} as matrices, group by group."""
        groups = self.layout.groups if groups is None else groups
        return [together([tensors[s.name] for s in group.segments], group.n, group.m) for group in groups]

    def bypass(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the bypass tensors of {name: contiguous tensor}, flat."""
        found = [tensors[segment.name] for segment in self.layout.bypass]
        return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in found]

    def split_bypass(self, flat: Tensor) -> list[Tensor]:
        """Split the bypass part of a message, or ``bypass_means``, into views of the bypass tensors."""
        return self._once(flat, None, lambda: list(flat.split([segment.numel for segment in self.layout.bypass])))

    def _factors(self, flat: Tensor, groups: Sequence[ShapeGroup] | None, *, left: bool) -> list[Tensor]:
        groups = self.layout.groups if groups is None else groups

        def view(group: ShapeGroup) -> Tensor:
            rows, offset = (group.n, group.p_offset) if left else (group.m, group.q_offset)
            shape, start = (sum(group.counts), rows, group.rank), flat.storage_offset() + offset
            return flat.as_strided(shape, (rows * group.rank, group.rank, 1), start)

        return self._once(flat, (left, id(groups)), lambda: list(map(view, groups)))

    def _once(self, flat: Tensor, kind: Hashable, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return views of a flat tensor. Those of the bucket's own memory are made only once: a step needs many."""
        if flat.untyped_storage().data_ptr() not in self._memory:
            return make()
        key = flat.data_ptr(), kind
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def error_dtype(config: PowerSGDConfig, messages: torch.dtype) -> torch.dtype:
    """Return the dtype of the error buffers of a bucket whose messages have the dtype ``messages``."""
    return getattr(torch, str(config.error_dtype)) if config.error_dtype else messages


def keys(segment: Segment, config: PowerSGDConfig) -> list[int]:
    """Return the seeds of random directions of a tensor's matrices, the same on all workers and in every bucket."""
    name, count = segment.name, segment.batch
    names = [name] if count == 1 else [f"{name}[{index}]" for index in range(count)]
    return [zlib.crc32(each.encode()) ^ config.seed for each in names]
