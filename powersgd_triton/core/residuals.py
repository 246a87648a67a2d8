"""What a worker has not sent yet, by the tensor's name: it is added to the gradients of the next steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core.saved_state import Parts, SavedState, Size
from powersgd_triton.core.streams import Streams
from powersgd_triton.layout.layout import Layout, compressed_rank
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.step import HostCopy, Step
from powersgd_triton.ranks.plan import RankPlan


@dataclasses.dataclass(eq=False)
class Matrix:
    """One compressed tensor.

    Attributes:
        error: Error buffer of this worker's rows. None without error feedback, or if it has none of the rows.
        rows: (first row, row after the last) of each worker of this node. Empty once the node may have other workers.
        first_row: First of this worker's rows.
        bases: Bases of the next products, as views of the bucket's: "basis" [m, r], and "left_basis" [n, r] in the
            alternating algorithm.
        bucket: Bucket that held the tensor in its last step.
    """

    error: Tensor | None
    rows: tuple[tuple[int, int], ...]
    first_row: int
    bases: Parts
    bucket: Bucket


class Residuals:
    """Errors and bases of one model's tensors.

    They belong to names and not to buckets. When DDP rebuilds its buckets, or ranks change, new buckets take them over.

    Attributes:
        streams: Streams on which all of this memory is allocated and used.
        matrices: {name: Matrix} of all tensors that have been compressed in a step.
        sizes: {name: (n, m, rank)} of all tensors that have been in a bucket. Rank 0 means not compressed.
        loaded: A loaded state. The parts of a matrix leave it when the matrix is in a bucket for the first time.
        moving: {name: [(first row, rows)]} of errors that belong to other rows from now on, which may be another
            worker's.
    """

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self.streams = Streams()
        self.matrices: dict[str, Matrix] = {}
        self.sizes: dict[str, Size] = {}
        self.loaded = SavedState()
        self.moving: dict[str, list[tuple[int, Tensor]]] = {}
        self._forget_remaining()

    def _forget_remaining(self) -> None:
        # Errors E [n, m] of tensors that are no longer compressed, or that are sent whole.
        self._remaining: Parts = {}
        # What is left of those that a step has added to gradients, if it is applied. None if nothing is.
        self._rest: dict[str, Tensor | None] = {}
        # The verdict of that step, and when it has ended, a copy on the host.
        self._verdict: Tensor | None = None
        self._told: HostCopy | None = None

    @property
    def pending(self) -> bool:
        """Whether an error is still to be moved, or to be added to the gradient of a tensor without a matrix."""
        return bool(self._remaining or self.moving)

    def buckets(self) -> list[Bucket]:
        """Return the buckets that hold the matrices."""
        return list({matrix.bucket: None for matrix in self.matrices.values()})

    def regroup(self) -> None:
        """Note that this worker may share a node with other workers from now on, or have other rows there.

        All errors of shared matrices are moved then, since workers whose rows stay the same take part in the moves.
        """
        for matrix in self.matrices.values():
            if len(matrix.rows) > 1:
                matrix.rows = ()

    # Tensors without a matrix ----------------------------------------------------------------------------------------

    def enter(self, layout: Layout, device: torch.device, *, factors: bool = False) -> None:
        """Note the sizes of a new bucket's tensors. Let the loaded errors of those without factors be added to them."""
        self.sizes |= {s.name: (s.n, s.m, s.rank if factors else 0) for s in layout.segments}
        for segment in [s for s in layout.segments if not (factors and s.rank)]:
            # In the exact first steps, tensors that will be compressed are bypass tensors too. Keep their parts.
            later = factors and not self.plan.exact and compressed_rank(segment.shape, self.plan.config, segment.name)
            if segment.name in self.loaded.matrices and not later:
                parts = self.loaded.matrices[segment.name]
                if "error" in parts and self.plan.config.error_feedback:
                    self._remaining[segment.name] = parts["error"].to(device)
                del self.loaded.matrices[segment.name]

    def compensated(self, layout: Layout, gradients: Mapping[str, Tensor], step: Step) -> Tensor:
        """Return M = G + E of tensors that are sent whole, flat, in fp32."""
        errors = self._remaining_errors(step)
        M = torch.empty(layout.numel, device=next(iter(gradients.values())).device)
        scale = step.scale(M.device)
        for segment in layout.segments:
            own, error = M[segment.span], errors.get(segment.name)
            own.copy_(gradients[segment.name].reshape(-1))
            if error is not None:
                own += error.reshape(-1) if scale is None else error.reshape(-1) * scale
        return M

    def keep(self, layout: Layout, M: Tensor, step: Step) -> None:
        """Keep what a step has left of M as the errors, unless it turns out not to be applied."""
        if not self.plan.config.error_feedback:
            return
        self._verdict, scale = step.verdict(M.device), step.scale(M.device)
        M, zero = M if scale is None else M / scale, M.new_zeros(())
        for segment in layout.segments:
            self._rest[segment.name] = rest = M[segment.span].view(segment.n, segment.m)
            self._remaining.setdefault(segment.name, zero.expand_as(rest))

    # Errors ----------------------------------------------------------------------------------------------------------

    def add_remaining(self, layout: Layout, gradients: Mapping[str, Tensor], step: Step) -> Mapping[str, Tensor]:
        """Add remaining errors to the gradients of tensors that are no longer compressed, in fp32 or fp64 copies.

        Without remaining errors, return the gradients themselves. If the step turns out not to be finite, the errors
        are added again in the next step.
        """
        waiting = self._remaining_errors(step).keys() - self._rest.keys()
        names = [s.name for s in layout.segments if not s.rank and s.name in waiting] if waiting else []
        if not names:
            return gradients
        device = gradients[names[0]].device
        scale = step.scale(device)
        # Copy all gradients of the bucket, so that they keep one dtype.
        sums = {name: g.to(torch.promote_types(g.dtype, torch.float32)) for name, g in gradients.items()}
        for name in names:
            error = self._remaining[name]
            sums[name] = sums[name] + (error if scale is None else error * scale).view(sums[name].shape)
        self._rest |= dict.fromkeys(names)
        self._verdict = step.verdict(device)
        return sums

    @property
    def sent(self) -> Tensor | None:
        """Verdict of the last step that has sent errors of tensors without a matrix, until the next one does."""
        return self._verdict

    def take_back(self, unsent: Mapping[str, Tensor]) -> None:
        """Let tensors keep the errors from before that step where the scalar ``unsent[name]`` is True."""
        for name in self._rest.keys() & unsent.keys():
            error, rest = self._remaining[name], self._rest[name]
            mask = unsent[name].to(error.device)
            self._rest[name] = torch.where(mask, error, error.new_zeros(()) if rest is None else rest)

    def has_errors(self, step: Step) -> bool:
        """Return whether errors are left that no bucket holds: of a loaded state, or of what is not compressed now."""
        return bool(self.loaded.matrices or self._remaining_errors(step))

    def _remaining_errors(self, step: Step) -> Parts:
        """Return the remaining errors, without what applied steps have sent of them."""
        if self._verdict is not None and not step.decides(self._verdict):
            # Reading a verdict waits for the device, unless it was copied.
            applied = bool(self._verdict if self._told is None else self._told.numbers())
            for name, rest in self._rest.items() if applied else ():
                if rest is None:
                    del self._remaining[name]
                else:
                    self._remaining[name] = rest
            self._rest, self._verdict, self._told = {}, None, None
        return self._remaining

    def end_step(self) -> None:
        """Copy the verdict that decides about remaining errors to the host, which does not wait."""
        if self._verdict is not None and self._told is None:
            self._told = HostCopy(self._verdict)

    def renew_verdict(self, verdict: Tensor, copy: Tensor) -> None:
        """Use a copy of the last step's verdict, because the next step overwrites the verdict itself."""
        for matrix in self.matrices.values():
            if matrix.bucket.applied is verdict:
                matrix.bucket.applied = copy
        if self._verdict is verdict:
            self._verdict, self._told = copy, None

    def error(self, step: Step) -> Parts:
        """Return copies {name: E [n, m]} of this worker's errors without the loss scale. Empty without feedback."""
        with self.streams.everywhere():
            if not self.plan.config.error_feedback:
                return {}
            errors = {name: parts["error"].clone() for name, parts in self.loaded.matrices.items()}
            errors |= {name: error.clone() for name, error in self._remaining_errors(step).items()}
            return errors | self._errors(step)

    def _errors(self, step: Step, *, wide: bool = False) -> Parts:
        """Return copies of the errors of all matrices that are in buckets."""
        found: Parts = {}
        for bucket in self.buckets():
            errors = bucket.errors(step, wide=wide)
            # Another bucket may have taken over some of the matrices.
            found |= {name: error for name, error in errors.items() if self.matrices[name].bucket is bucket}
        for name, parts in self.moving.items():
            for first, rows in parts:
                found[name][first : first + len(rows)] += rows
        return found

    def forget_errors(self) -> None:
        """Set all errors to zero, including those of a loaded state whose matrices are not in a bucket yet."""
        with self.streams.everywhere():
            for matrix in self.matrices.values():
                if matrix.error is not None:
                    matrix.error.zero_()
                if matrix.bucket.applied is not None:
                    # Nothing is to be subtracted any more, also in the replay of a step.
                    matrix.bucket.applied.zero_()
            for parts in self.loaded.matrices.values():
                if "error" in parts:
                    parts["error"].zero_()
            self.moving = {}
            self._forget_remaining()

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def save(self, step: Step, mean: Callable[[Tensor], Tensor]) -> SavedState:
        """Return copies of everything. ``mean`` averages a tensor over the workers, in the same order on all."""
        with self.streams.everywhere():
            if not step.captured:
                # A run that loads these errors rounds them to 16 bits. This run then goes on with the same bits.
                matrices = self.matrices.values()
                for bucket in {m.bucket for m in matrices if m.error is not None and m.error.itemsize < 4}:
                    bucket.materialize(step)
            loaded, errors, found = self.loaded, self._errors(step, wide=True), dict[str, Parts]()
            for name, parts in sorted(loaded.matrices.items()):
                found[name] = {key: part.clone() for key, part in parts.items()}
                if loaded.own and "error" in parts:
                    found[name]["error"] = mean(found[name]["error"])
            for name in sorted(self.matrices):
                found[name] = {key: basis.clone() for key, basis in self.matrices[name].bases.items()}
                if name in errors:
                    # A mean of 16-bit values does not fit 16 bits in general.
                    found[name]["error"] = mean(errors[name])
            for name, error in sorted(self._remaining_errors(step).items()):
                found[name] = {"error": mean(error.clone())}
            # With the sizes of the last compression: in this run, or in the one that saved the loaded state.
            tensors = loaded.tensors | self.sizes | {name: loaded.tensors[name] for name in loaded.matrices}
            plan = self.plan.state_dict() if self.plan.given.planned else {}
            return SavedState(step.iteration, tensors, found, plan, own=loaded.own, owner=loaded.owner)

    def load(self, saved: SavedState) -> None:
        """Replace everything by ``saved``. A matrix takes over its part when it is in a bucket for the first time."""
        self.matrices, self.sizes, self.moving = {}, {}, {}
        self._forget_remaining()
        self.loaded = saved

    def claim(self, communicator: Communicator) -> tuple[int, int] | None:
        """Drop loaded errors of another worker, before they are used. Return its (index, world size), or None."""
        owner = self.loaded.owner
        if owner is None:
            return None
        self.loaded = dataclasses.replace(self.loaded, owner=None)
        if owner == communicator.place:
            return None
        self.forget_errors()
        return owner
