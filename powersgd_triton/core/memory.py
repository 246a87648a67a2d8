"""What the engine remembers between steps by the tensor's name: errors, bases, and the bucket that holds them."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.exchange import Schedule, sum_in_place
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.saved_state import Parts, SavedState, Size, listing
from powersgd_triton.core.streams import Streams, on_its_streams
from powersgd_triton.layout.layout import Layout, compressed_rank
from powersgd_triton.layout.shares import Shares
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.backends import Workspace, make_backend, select_backend
from powersgd_triton.ops.bucket import Bucket, error_dtype
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan

logger = logging.getLogger("powersgd_triton")


@dataclasses.dataclass(frozen=True)
class Remaining:
    """The error of a tensor that no bucket compresses. A step adds it to the gradient.

    Attributes:
        error: E [n, m].
        verdict: Verdict of the step that added it. None if no step has.
        rest: What remains if that step is applied. None for nothing.
    """

    error: Tensor
    verdict: Tensor | None = None
    rest: Tensor | None = None


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


class Memory:
    """Errors and bases of one model's tensors.

    They belong to names and not to buckets. When DDP rebuilds its buckets, or ranks change, new buckets take them over.

    Attributes:
        streams: Streams on which all of this memory is allocated and used.
        matrices: {name: Matrix} of all tensors that have been compressed in a step.
        sizes: {name: (n, m, rank)} of all tensors that have been in a bucket. Rank 0 means not compressed.
        loaded: A loaded state. The parts of a matrix leave it when the matrix is in a bucket for the first time.
    """

    def __init__(self, plan: RankPlan) -> None:
        self._plan = plan
        self.streams = Streams()
        self.matrices: dict[str, Matrix] = {}
        self.sizes: dict[str, Size] = {}
        # The backend of the bucket that each tensor was in last.
        self._backends: dict[str, Backend] = {}
        self.loaded = SavedState()
        # Of tensors that are no longer compressed, or that are sent in codes.
        self._remaining: dict[str, Remaining] = {}
        # Errors that belong to other rows from now on, which may be another worker's: (first row, rows).
        self._moving: dict[str, list[tuple[int, Tensor]]] = {}
        self._workspace: Workspace = {}
        self._choices: set[tuple[str, str]] = set()

    @property
    def _config(self) -> PowerSGDConfig:
        return self._plan.config

    # Buckets ---------------------------------------------------------------------------------------------------------

    def bind(
        self, layout: Layout, gradients: Mapping[str, Tensor], step: Step, share: tuple[int, int] = (0, 1)
    ) -> Backend:
        """Return the backend of the bucket with this layout. A new bucket takes over the errors and bases.

        Its factors are fp64 if a gradient is fp64, else fp32. If an allocation fails, no error and no basis is lost.
        ``share`` is (index of this worker in its node, workers of the node that share the bucket).

        Raises:
            RuntimeError: The loaded checkpoint lacks one of the layout's matrices.
            ValueError: The configured backend cannot be used.
        """
        known, (worker, workers) = self._known(layout), share
        if known is not None and known.bucket.shares.workers == workers:
            return known
        for segment in layout.compressed:
            saved = self.loaded.tensors
            if self.loaded.strict and segment.name not in saved and segment.name not in self.matrices:
                raise RuntimeError(
                    f"the loaded state has no matrix named {segment.name!r}; it has {listing(saved)}. "
                    "Was it saved for another model or with another configuration?"
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
        shares = Shares.build(layout, workers)
        errors = self._error_buffers(shares, worker, dtype, device)
        bucket = Bucket(layout, dtype, device, self._config, errors, shares, worker)
        backend = make_backend(name, bucket, self._workspace)
        self._take_over(backend, step)
        for segment in layout.segments:
            self.sizes[segment.name] = (segment.n, segment.m, segment.rank)
            self._backends[segment.name] = backend
        self._release(layout, device)
        return backend

    def _release(self, layout: Layout, device: torch.device) -> None:
        """Let the loaded errors of bypass tensors be added to their gradients."""
        for segment in layout.bypass:
            # In the exact first steps, tensors that will be compressed are bypass tensors too. Keep their parts.
            later = not self._plan.exact and compressed_rank(segment.shape, self._config, segment.name)
            if segment.name in self.loaded.matrices and not later:
                parts = self.loaded.matrices[segment.name]
                if "error" in parts and self._config.error_feedback:
                    self._remaining[segment.name] = Remaining(parts["error"].to(device))
                del self.loaded.matrices[segment.name]

    def compensated(self, layout: Layout, gradients: Mapping[str, Tensor], step: Step) -> Tensor:
        """Return M = G + E of tensors that are sent in codes, flat, in fp32."""
        self._release(layout, next(iter(gradients.values())).device)
        self._remaining_errors(step)
        M = torch.empty(layout.numel, device=next(iter(gradients.values())).device)
        for segment in layout.segments:
            self.sizes[segment.name] = (segment.n, segment.m, 0)
            own, known = M[segment.offset : segment.offset + segment.numel], self._remaining.get(segment.name)
            own.copy_(gradients[segment.name].reshape(-1))
            if known is not None:
                own += known.error.reshape(-1)
        return M

    def keep(self, layout: Layout, M: Tensor, step: Step) -> None:
        """Keep what codes have left of M as the errors, unless the step turns out not to be applied."""
        if not self._config.error_feedback:
            return
        verdict = step.verdict(M.device)
        for segment in layout.segments:
            rest = M[segment.offset : segment.offset + segment.numel].view(segment.n, segment.m)
            known = self._remaining.get(segment.name)
            error = torch.zeros((), device=M.device).expand_as(rest) if known is None else known.error
            self._remaining[segment.name] = Remaining(error, verdict, rest)

    def _known(self, layout: Layout) -> Backend | None:
        """Return the backend of the bucket with this layout if it had all of its tensors in their last steps."""
        known = self._backends.get(layout.segments[0].name)
        # Since the last step, another bucket may have taken one of the tensors.
        unchanged = all(self._backends.get(segment.name) is known for segment in layout.segments)
        return known if known is not None and known.bucket.layout is layout and unchanged else None

    def is_settled(self, layout: Layout) -> bool:
        """Return whether the next step of this bucket does the same as its steps from then on."""
        known = self._backends.get(layout.segments[0].name)
        if known is None or self._remaining or self._moving:
            return False
        found = known.bucket.layout
        return self._known(found) is known and (layout in found.parts or found is self._plan.layout(layout))

    def _error_buffers(self, shares: Shares, worker: int, dtype: torch.dtype, device: torch.device) -> Parts | None:
        """Return the error buffers of a worker's rows, {name: [rows, m]}. They are zero if it did not have these rows.

        The result is None without error feedback.
        """
        if not self._config.error_feedback:
            return None
        dtype = error_dtype(self._config, dtype)
        segments = {segment.name: segment for segment in shares.layout.compressed}
        errors: Parts = {}
        for group in shares.groups(worker):
            known = {
                piece.name: matrix.error
                for piece in group.segments
                if (matrix := self.matrices.get(piece.name)) is not None
                and matrix.rows == shares.rows(segments[piece.name])
            }
            # One allocation for a group's new matrices keeps them at equal distances, so that they can be batched.
            memory = torch.zeros(len(group.segments) - len(known), group.n, group.m, dtype=dtype, device=device)
            zeros = iter(memory.unbind())
            for piece in group.segments:
                error = known.get(piece.name)
                errors[piece.name] = next(zeros) if error is None else error.to(dtype)
        return errors

    def _take_over(self, backend: Backend, step: Step) -> None:
        """Copy the known bases, and the parts of a loaded state, to the matrices of a new bucket."""
        bucket = backend.bucket
        backend.orthogonalize_bases(step, redraw=True)
        bases = {"basis": bucket.right(bucket.basis)}
        if self._config.algorithm == "alternating":
            bases["left_basis"] = bucket.left(bucket.P_hat)
        complete = True
        errors = {
            piece.name: error
            for group, buffers in zip(bucket.own, bucket.M or [], strict=False)
            for piece, error in zip(group.segments, buffers, strict=True)
        }
        for position, group in enumerate(bucket.layout.groups):
            for index, segment in enumerate(group.segments):
                own = {key: views[position][index] for key, views in bases.items()}
                error, rows = errors.get(segment.name), bucket.shares.rows(segment)
                earlier = self.matrices.get(segment.name)
                if earlier is not None:
                    complete &= _fill(own, earlier.bases, functools.partial(self._plan.kept_columns, segment.name))
                    if bucket.M is not None and earlier.rows != rows:
                        moved = [] if earlier.error is None else [(earlier.first_row, earlier.error)]
                        self._moving[segment.name] = [*self._moving.get(segment.name, []), *moved]
                loaded = self.loaded.matrices.get(segment.name)
                if loaded is not None:
                    complete &= _fill(own, loaded, functools.partial(self._plan.kept_columns, segment.name))
                    if bucket.M is not None and len(rows) > 1:
                        self._moving[segment.name] = [(0, loaded["error"])]
                    elif error is not None:
                        error.copy_(loaded["error"])
                # Last, so that a failed allocation loses nothing.
                self.matrices[segment.name] = Matrix(error, rows, rows[bucket.worker][0], own, bucket)
                self.loaded.matrices.pop(segment.name, None)
        if not complete:
            backend.orthogonalize_bases(step)

    def move_rows(self, bucket: Bucket, communicator: Communicator) -> Schedule:
        """Bring errors to the workers of this node that have their rows now."""
        for segment in bucket.layout.compressed:
            if segment.name not in self._moving:
                continue
            matrix, width = self.matrices[segment.name], bucket.message_P
            whole = torch.zeros(segment.n, segment.m, dtype=width.dtype, device=width.device)
            for first, rows in self._moving[segment.name]:
                whole[first : first + len(rows)] += rows
            if communicator.inside is not None:
                yield from sum_in_place(whole, communicator.inside)
            if matrix.error is not None:
                matrix.error += whole[matrix.first_row :][: len(matrix.error)]
            del self._moving[segment.name]

    def moving(self) -> list[str]:
        """Return the names of the matrices whose errors have to be moved."""
        return sorted(self._moving)

    def regroup(self) -> None:
        """Note that this worker may share a node with other workers from now on, or have other rows there.

        All errors of shared matrices are moved then, since workers whose rows stay the same take part in the moves.
        """
        shared = [matrix for matrix in self.matrices.values() if len(matrix.rows) > 1]
        for matrix in shared:
            matrix.rows = ()
        if shared:
            self.drop_buckets()

    def buckets(self) -> list[Bucket]:
        """Return the buckets of the last steps, ordered by the names of their first tensors."""
        buckets = {backend.bucket for backend in self._backends.values()}
        return sorted(buckets, key=lambda bucket: bucket.layout.segments[0].name)

    def drop_buckets(self) -> None:
        """Forget the backends, so that the next step makes new buckets: collectives may still write to the old ones."""
        self._backends = {}

    # Errors ----------------------------------------------------------------------------------------------------------

    def materialize(self, step: Step, buckets: Iterable[Bucket]) -> None:
        """Turn error buffers into E: subtract the pending products, and divide by the loss scale.

        Products of the open step are not subtracted, since it is not known yet whether the step is applied.
        """
        for bucket in buckets:
            if not step.decides(bucket.applied):
                bucket.materialize()

    def add_remaining(self, layout: Layout, gradients: Mapping[str, Tensor], step: Step) -> Mapping[str, Tensor]:
        """Add remaining errors to the gradients of tensors that are no longer compressed, in fp32 or fp64 copies.

        Without remaining errors, return the gradients themselves. If the step turns out not to be finite, the errors
        are added again in the next step.
        """
        self._remaining_errors(step)
        waiting = {name for name, known in self._remaining.items() if known.verdict is None}
        names = [segment.name for segment in layout.bypass if segment.name in waiting] if waiting else []
        if not names:
            return gradients
        device = gradients[names[0]].device
        scale = step.loss_scale.current(device) if step.loss_scale is not None else None
        # Copy all gradients of the bucket, so that they keep one dtype.
        sums = {name: g.to(torch.promote_types(g.dtype, torch.float32)) for name, g in gradients.items()}
        for name in names:
            error = self._remaining[name].error
            self._remaining[name] = Remaining(error, step.verdict(device))
            sums[name] = sums[name] + (error if scale is None else error * scale).view(sums[name].shape)
        return sums

    def has_errors(self, step: Step) -> bool:
        """Return whether errors are left that no bucket holds: of a loaded state, or of what is not compressed now."""
        return bool(self.loaded.matrices or self._remaining_errors(step))

    def _remaining_errors(self, step: Step) -> dict[str, Tensor]:
        """Return the remaining errors, without what applied steps have sent of them. Read each verdict only once."""
        applied: dict[int, bool] = {}
        for name, known in list(self._remaining.items()):
            if known.verdict is None or step.decides(known.verdict):
                continue
            # Tensors of one step share a verdict, and reading it waits for the device.
            if id(known.verdict) not in applied:
                applied[id(known.verdict)] = bool(known.verdict)
            left = known.rest if applied[id(known.verdict)] else known.error
            if left is None:
                del self._remaining[name]
            else:
                self._remaining[name] = Remaining(left)
        return {name: known.error for name, known in self._remaining.items()}

    def renew_verdict(self, verdict: Tensor, copy: Tensor) -> None:
        """Use a copy of the last step's verdict, because the next step overwrites the verdict itself."""
        for matrix in self.matrices.values():
            if matrix.bucket.applied is verdict:
                matrix.bucket.applied = copy
        self._remaining = {
            name: dataclasses.replace(known, verdict=copy) if known.verdict is verdict else known
            for name, known in self._remaining.items()
        }

    @on_its_streams
    def error(self, step: Step) -> Parts:
        """Return copies {name: E [n, m]} of this worker's errors without the loss scale. Empty without feedback."""
        if not self._config.error_feedback:
            return {}
        errors = {name: parts["error"].clone() for name, parts in self.loaded.matrices.items()}
        errors |= {name: error.clone() for name, error in self._remaining_errors(step).items()}
        return errors | self._errors(step)

    def _errors(self, step: Step, *, wide: bool = False) -> Parts:
        """Return copies of the errors of all matrices that are in buckets."""
        found: Parts = {}
        for bucket in {matrix.bucket: None for matrix in self.matrices.values()}:
            errors = bucket.errors(step, wide=wide)
            # Another bucket may have taken over some of the matrices.
            found |= {name: error for name, error in errors.items() if self.matrices[name].bucket is bucket}
        for name, parts in self._moving.items():
            for first, rows in parts:
                found[name][first : first + len(rows)] += rows
        return found

    @on_its_streams
    def forget_errors(self) -> None:
        """Set all errors to zero, including those of a loaded state whose matrices are not in a bucket yet."""
        for matrix in self.matrices.values():
            if matrix.error is not None:
                matrix.error.zero_()
            if matrix.bucket.applied is not None:
                # Nothing is to be subtracted any more, also in the replay of a step.
                matrix.bucket.applied.zero_()
        for parts in self.loaded.matrices.values():
            if "error" in parts:
                parts["error"].zero_()
        self._remaining, self._moving = {}, {}

    # Checkpoints -----------------------------------------------------------------------------------------------------

    @on_its_streams
    def save(self, step: Step, mean: Callable[[Tensor], Tensor]) -> SavedState:
        """Return copies of everything. ``mean`` averages a tensor over the workers, in the same order on all."""
        if not step.captured:
            # A run that loads these errors rounds them to 16 bits. This run then goes on with the same bits.
            self.materialize(
                step, {m.bucket for m in self.matrices.values() if m.error is not None and m.error.element_size() < 4}
            )
        loaded, errors = self.loaded, self._errors(step, wide=True)
        matrices = {name: {key: part.clone() for key, part in parts.items()} for name, parts in loaded.matrices.items()}
        if loaded.own:
            for name in sorted(name for name, parts in matrices.items() if "error" in parts):
                matrices[name]["error"] = mean(matrices[name]["error"])
        for name in sorted(self.matrices):
            matrices[name] = {key: basis.clone() for key, basis in self.matrices[name].bases.items()}
            if name in errors:
                # A mean of 16-bit values does not fit 16 bits in general.
                matrices[name]["error"] = mean(errors[name])
        for name, error in sorted(self._remaining_errors(step).items()):
            matrices[name] = {"error": mean(error.clone())}
        # The sizes with which each tensor was compressed last: in this run, or in the run that saved the loaded state.
        tensors = loaded.tensors | self.sizes | {name: loaded.tensors[name] for name in loaded.matrices}
        plan = self._plan.state_dict() if self._config.planned else {}
        return SavedState(step.iteration, tensors, matrices, plan, own=loaded.own, owner=loaded.owner)

    def load(self, saved: SavedState) -> None:
        """Replace everything by ``saved``. A matrix takes over its part when it is in a bucket for the first time."""
        self.matrices, self.sizes, self._backends, self._remaining, self._moving = {}, {}, {}, {}, {}
        self.loaded = saved

    def claim(self, worker: Callable[[], tuple[int, int]]) -> tuple[int, int] | None:
        """Drop loaded errors that belong to another worker. Call it before they are used.

        Args:
            worker: (index, world size) of this worker.

        Returns:
            (index, world size) of the worker whose errors were dropped. None if none were dropped.
        """
        owner = self.loaded.owner
        if owner is None:
            return None
        self.loaded = dataclasses.replace(self.loaded, owner=None)
        if owner == worker():
            return None
        self.forget_errors()
        return owner


def _fill(bases: Parts, earlier: Parts, kept_columns: Callable[[int, int], list[int]]) -> bool:
    """Copy the columns that fit from a matrix's earlier bases. Return whether no random column is left."""
    complete = True
    for key, basis in bases.items():
        saved = earlier.get(key, basis[:, :0])
        before, after = saved.shape[1], basis.shape[1]
        if after < before:
            saved = torch.stack([saved[:, k] for k in kept_columns(before, after)], dim=1)
        basis[:, : saved.shape[1]] = saved.to(basis)
        complete &= before >= after
    return complete
