"""What is remembered from step to step, by the tensor's name: errors, bases, and the bucket that they live in."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.saved_state import Parts, SavedState, Size, listing
from powersgd_triton.layout.layout import Layout, compressed_rank
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.backends import Workspace, make_backend, select_backend
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan

logger = logging.getLogger("powersgd_triton")


@dataclasses.dataclass(eq=False)
class Matrix:
    """One compressed tensor.

    Attributes:
        error: its error buffer [n, m]; None without error feedback.
        bases: what its next product starts from, views of the bucket's: "basis" [m, r], and in the alternating
            algorithm "left_basis" [n, r].
        bucket: where it was in its last step.
    """

    error: Tensor | None
    bases: Parts
    bucket: Bucket


class Memory:
    """Errors and bases of one model's tensors.

    They belong to names, not to buckets: when DDP rebuilds its buckets, or ranks change, new buckets take them over.

    Attributes:
        matrices: {name: Matrix} of all tensors that were compressed in a step.
        sizes: {name: (n, m, rank)} of all tensors that came in a bucket; rank 0 where one was not compressed.
    """

    def __init__(self, config: PowerSGDConfig, plan: RankPlan) -> None:
        self._config, self._plan = config, plan
        self.matrices: dict[str, Matrix] = {}
        self.sizes: dict[str, Size] = {}
        # The backend of the bucket in which a tensor came last.
        self._backends: dict[str, Backend] = {}
        # Of a loaded state: the parts of each matrix leave it when the matrix is in a bucket for the first time.
        self._loaded = SavedState()
        # Errors of tensors that are no longer compressed, each with the verdict of the step that it was added in.
        self._remaining: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._workspace: Workspace = {}
        self._choices: set[tuple[str, str]] = set()

    # Buckets ---------------------------------------------------------------------------------------------------------

    def bind(self, layout: Layout, gradients: Mapping[str, Tensor], step: Step) -> Backend:
        """The backend of the bucket with this layout: the known one, or a new one that takes over what is remembered.

        Its factors are fp64 where a gradient is, else fp32.

        Raises:
            RuntimeError: a checkpoint was loaded that lacks one of the layout's matrices.
            ValueError: the configured backend cannot be used.
        """
        known = self._backends.get(layout.segments[0].name)
        # Another bucket may have taken one of the tensors since.
        unchanged = all(self._backends.get(segment.name) is known for segment in layout.segments)
        if known is not None and known.bucket.layout is layout and unchanged:
            return known
        for segment in layout.compressed:
            saved = self._loaded.tensors
            if self._loaded.strict and segment.name not in saved and segment.name not in self.matrices:
                raise RuntimeError(
                    f"the loaded state has no matrix named {segment.name!r}; it has {listing(saved)}. "
                    "Was it saved from another model or with another configuration?"
                )
        dtypes = {gradient.dtype for gradient in gradients.values()}
        device = gradients[layout.segments[0].name].device
        rank = max((group.rank for group in layout.groups), default=1)
        name, reason = select_backend(self._config, device, dtypes, rank)
        if (name, reason) not in self._choices:
            logger.info("PowerSGD backend: %s (%s)", name, reason)
            self._choices.add((name, reason))
        self.materialize(step, {self.matrices[s.name].bucket for s in layout.compressed if s.name in self.matrices})
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        errors = self._error_buffers(layout, dtype, device)
        backend = make_backend(name, Bucket(layout, dtype, device, self._config, errors), self._workspace)
        self._take_over(backend, step)
        for segment in layout.segments:
            self.sizes[segment.name] = (segment.n, segment.m, segment.rank)
            self._backends[segment.name] = backend
        for segment in layout.bypass:
            # In the first steps, which are exact, nothing is compressed yet.
            if segment.name in self._loaded.matrices and not compressed_rank(segment.shape, self._config, segment.name):
                parts = self._loaded.matrices.pop(segment.name)
                if "error" in parts and self._config.error_feedback:
                    self._remaining[segment.name] = parts["error"].to(device), None
        return backend

    def _error_buffers(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> Parts | None:
        """{name: [n, m]}: those that there are, and zeros for new matrices; None without error feedback."""
        feedback, new = self._config.error_feedback, [s for s in layout.compressed if s.name not in self.matrices]
        if new and feedback:
            numel = sum(segment.numel for segment in new)
            logger.info("A zero tensor of length %s that represents local error is created.", numel)
        if new and self._config.warm_start:
            message = "Allocating contiguous memory of length %s for Ps, and of length %s for Qs, respectively."
            logger.info(message, layout.p_numel, layout.q_numel)
        if not feedback:
            return None
        if self._config.error_dtype:
            dtype = getattr(torch, str(self._config.error_dtype))
        errors: Parts = {}
        for group in layout.groups:
            known = {s.name: m.error for s in group.segments if (m := self.matrices.get(s.name)) is not None}
            # One allocation for a group's new matrices keeps them at equal distances, so that they batch.
            memory = torch.zeros(len(group.segments) - len(known), group.n, group.m, dtype=dtype, device=device)
            zeros = iter(memory.unbind())
            for segment in group.segments:
                error = known.get(segment.name)
                errors[segment.name] = next(zeros) if error is None else error.to(dtype)
        return errors

    def _take_over(self, backend: Backend, step: Step) -> None:
        """Give a new bucket's matrices the bases, and what a checkpoint brought, that there are for them."""
        bucket = backend.bucket
        backend.orthogonalize_bases(step, redraw=True)
        bases = {"basis": bucket.right(bucket.basis)}
        if self._config.algorithm == "alternating":
            bases["left_basis"] = bucket.left(bucket.P_hat)
        complete = True
        for position, group in enumerate(bucket.layout.groups):
            for index, segment in enumerate(group.segments):
                own = {key: views[position][index] for key, views in bases.items()}
                error = bucket.M[position][index] if bucket.M is not None else None
                earlier = self.matrices.get(segment.name)
                self.matrices[segment.name] = Matrix(error, own, bucket)
                if earlier is not None:
                    complete &= _fill(own, earlier.bases, functools.partial(self._plan.kept_columns, segment.name))
                loaded = self._loaded.matrices.pop(segment.name, None)
                if loaded is not None:
                    complete &= _fill(own, loaded, functools.partial(self._plan.kept_columns, segment.name))
                    if error is not None:
                        error.copy_(loaded["error"])
        if not complete:
            backend.orthogonalize_bases(step)

    def buckets(self) -> list[Bucket]:
        """Those of the last steps, in the order of their first tensors' names."""
        buckets = {backend.bucket for backend in self._backends.values()}
        return sorted(buckets, key=lambda bucket: bucket.layout.segments[0].name)

    def drop_buckets(self) -> None:
        """Give every bucket new memory when it comes again: messages of an interrupted step may still be on the way."""
        self._backends = {}

    # Errors ----------------------------------------------------------------------------------------------------------

    def materialize(self, step: Step, buckets: Iterable[Bucket] | None = None) -> None:
        """Turn error buffers into E: without the product that is still to be subtracted, and without loss scale.

        What the open step has sent is not subtracted, since it is not known yet whether the step is applied.
        ``buckets``: whose error buffers; None for all.
        """
        for bucket in {matrix.bucket for matrix in self.matrices.values()} if buckets is None else buckets:
            if not step.decides(bucket.applied):
                bucket.materialize()

    def add_remaining(self, layout: Layout, gradients: Mapping[str, Tensor], step: Step) -> Mapping[str, Tensor]:
        """The gradients; where tensors are no longer compressed, copies to which their remaining errors are added.

        Copies are fp32 or fp64. Where the step turns out not to be finite, the errors are added again in the next one.
        """
        self._remaining_errors(step)
        waiting = {name for name, (_, verdict) in self._remaining.items() if verdict is None}
        names = [segment.name for segment in layout.bypass if segment.name in waiting] if waiting else []
        if not names:
            return gradients
        device = gradients[names[0]].device
        scale = step.loss_scale.current(device) if step.loss_scale is not None else None
        # All are copied, since a bucket's gradients are of one dtype.
        sums = {name: g.to(torch.promote_types(g.dtype, torch.float32)) for name, g in gradients.items()}
        for name in names:
            error = self._remaining[name][0]
            self._remaining[name] = error, step.verdict(device)
            sums[name] = sums[name] + (error if scale is None else error * scale).view(sums[name].shape)
        return sums

    def _remaining_errors(self, step: Step) -> dict[str, Tensor]:
        """{name: remaining error} without those that were added in an applied step. Looks at each verdict once."""
        for name, (error, verdict) in list(self._remaining.items()):
            if verdict is None or step.decides(verdict):
                continue
            if verdict:
                del self._remaining[name]
            else:
                self._remaining[name] = error, None
        return {name: error for name, (error, _) in self._remaining.items()}

    def error(self, step: Step) -> Parts:
        """{name: E [n, m]}, this worker's own, copied, without loss scale; empty without error feedback."""
        if not self._config.error_feedback:
            return {}
        self.materialize(step)
        errors = {name: parts["error"].clone() for name, parts in self._loaded.matrices.items()}
        errors |= {name: error.clone() for name, error in self._remaining_errors(step).items()}
        return errors | {name: _unscaled(m.error, m.bucket) for name, m in self.matrices.items() if m.error is not None}

    def forget_errors(self, step: Step) -> None:
        """Set every error to zero, also of matrices that a checkpoint brought and that are in no bucket yet."""
        self.materialize(step)
        for matrix in self.matrices.values():
            if matrix.error is not None:
                matrix.error.zero_()
        for parts in self._loaded.matrices.values():
            if "error" in parts:
                parts["error"].zero_()
        self._remaining = {}

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def save(self, step: Step, mean: Callable[[Tensor], Tensor]) -> SavedState:
        """Copies of everything. ``mean`` averages a tensor over the workers; it is called in the same order on all."""
        self.materialize(step)
        loaded = self._loaded
        matrices = {name: {key: part.clone() for key, part in parts.items()} for name, parts in loaded.matrices.items()}
        if loaded.own:
            for name in sorted(name for name, parts in matrices.items() if "error" in parts):
                matrices[name]["error"] = mean(matrices[name]["error"])
        for name in sorted(self.matrices):
            matrix = self.matrices[name]
            matrices[name] = {key: basis.clone() for key, basis in matrix.bases.items()}
            if matrix.error is not None:
                # Sums of 16-bit values are no 16-bit values.
                wide = torch.promote_types(matrix.error.dtype, torch.float32)
                matrices[name]["error"] = mean(_unscaled(matrix.error.to(wide), matrix.bucket))
        for name, error in sorted(self._remaining_errors(step).items()):
            matrices[name] = {"error": mean(error.clone())}
        # As they were compressed last, here or where the loaded state was saved.
        tensors = loaded.tensors | self.sizes | {name: loaded.tensors[name] for name in loaded.matrices}
        plan = self._plan.state_dict() if self._config.planned else {}
        return SavedState(step.iteration, tensors, matrices, plan, own=loaded.own, owner=loaded.owner)

    def load(self, saved: SavedState) -> None:
        """Forget everything; each matrix takes over its part of ``saved`` when it is in a bucket for the first time."""
        self.matrices, self.sizes, self._backends, self._remaining = {}, {}, {}, {}
        matrices = {name: {key: part.clone() for key, part in parts.items()} for name, parts in saved.matrices.items()}
        self._loaded = dataclasses.replace(saved, matrices=matrices)

    def claim(self, worker: tuple[int, int], step: Step) -> tuple[int, int] | None:
        """Before loaded errors are used: drop them where they are another worker's own.

        Args:
            worker: (index, world size) of this worker.
            step: the step under way.

        Returns:
            Whose errors were dropped; None if none were.
        """
        owner = self._loaded.owner
        if owner is None:
            return None
        self._loaded = dataclasses.replace(self._loaded, owner=None)
        if owner == worker:
            return None
        self.forget_errors(step)
        return owner


def _fill(bases: Parts, earlier: Parts, kept_columns: Callable[[int, int], list[int]]) -> bool:
    """Take over what fits of a matrix's earlier bases; whether nothing of them is left random."""
    complete = True
    for key, basis in bases.items():
        saved = earlier.get(key, basis[:, :0])
        before, after = saved.shape[1], basis.shape[1]
        if after < before:
            saved = torch.stack([saved[:, k] for k in kept_columns(before, after)], dim=1)
        basis[:, : saved.shape[1]] = saved.to(basis)
        complete &= before >= after
    return complete


def _unscaled(error: Tensor, bucket: Bucket) -> Tensor:
    """A copy of a bucket's error buffer without loss scale."""
    return error.clone() if bucket.scale is None else error / bucket.scale
