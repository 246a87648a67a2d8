"""What a worker has not sent yet, by the tensor's name: it is added to the gradients of the next steps."""

import dataclasses
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core.saved_state import Parts, SavedState
from powersgd_triton.core.streams import Streams
from powersgd_triton.core.whole import WholeErrors
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import Size, Tensors, compressed_rank, matrix_size
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan


@dataclasses.dataclass(eq=False)
class Matrix:
    """The matrices of one compressed tensor, one after the other.

    Attributes:
        error: Error buffer [rows, m] of this worker's rows. None without error feedback, or if it has none of the rows.
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
        whole: Errors of tensors without a matrix.
        decide: Called before errors are read or replaced: it may settle ``whole``, if that is done late.
        agree: Called before they are saved by all workers, who may have to agree on the outcome of the last step.
        forgotten: Called before errors become zero: what an undecided step has sent must not be subtracted any more.
        matrices: {name: Matrix} of all tensors that have been compressed in a step.
        sizes: {name: size} of all tensors that have been in a bucket.
        loaded: A loaded state. The parts of a matrix leave it when the matrix is in a bucket for the first time.
        moving: {name: [(first row, rows)]} of errors that belong to other rows from now on, which may be another
            worker's.
    """

    def __init__(self, plan: RankPlan, tensors: Callable[[], Tensors]) -> None:
        self.plan, self._tensors = plan, tensors
        self.streams = Streams()
        self.whole = WholeErrors(plan)
        self.decide: Callable[[], None] = lambda: None
        self.agree: Callable[[], None] = lambda: None
        self.forgotten: Callable[[], None] = lambda: None
        self.matrices: dict[str, Matrix] = {}
        self.sizes: dict[str, Size] = {}
        self.loaded = SavedState()
        self.moving: dict[str, list[tuple[int, Tensor]]] = {}

    @property
    def pending(self) -> bool:
        """Whether an error is still to be moved, or to be added to the gradient of a tensor without a matrix."""
        return bool(self.whole.remain or self.moving)

    def buckets(self, names: Collection[str] | None = None) -> list[Bucket]:
        """Return the buckets that hold the matrices of tensors with these names, or all matrices."""
        return list({m.bucket: None for name, m in self.matrices.items() if names is None or name in names})

    def regroup(self) -> None:
        """Note that this worker may share a node with other workers from now on, or have other rows there.

        All errors of shared matrices are moved then, since workers whose rows stay the same take part in the moves.
        """
        for matrix in self.matrices.values():
            if len(matrix.rows) > 1:
                matrix.rows = ()

    def enter(self, layout: Layout, device: torch.device, *, factors: bool = False) -> None:
        """Note the sizes of a new bucket's tensors. Let the loaded errors of those without factors be added to them."""
        self.sizes |= {s.name: s.size if factors else s.size._replace(rank=0) for s in layout.segments}
        for segment in [s for s in layout.segments if not (factors and s.rank)]:
            # In the exact first steps, tensors that will be compressed are bypass tensors too. Keep their parts.
            later = factors and not self.plan.exact and compressed_rank(segment.shape, self.plan.config, segment.name)
            if segment.name in self.loaded.matrices and not later:
                parts = self.loaded.matrices[segment.name]
                if "error" in parts and self.plan.config.error_feedback:
                    self.whole.hold({segment.name: parts["error"].to(device)})
                del self.loaded.matrices[segment.name]

    # Errors ----------------------------------------------------------------------------------------------------------

    def has_errors(self) -> bool:
        """Return whether errors are left that no bucket holds: of a loaded state, or of what is not compressed now."""
        return bool(self.loaded.matrices or self.whole.has_errors())

    def error(self, step: Step, *, copy: bool = True) -> Parts:
        """Return {name: E [n, m]} of this worker's errors without the loss scale. Empty without feedback.

        Without ``copy``, they may be views, which the next step changes.
        """
        self.decide()
        with self.streams.everywhere():
            if not self.plan.config.error_feedback:
                return {}
            errors = {name: parts["error"] for name, parts in self.loaded.matrices.items()} | self.whole.errors(step)
            return {name: error.clone() if copy else error for name, error in errors.items()} | self._errors(step)

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
        self.decide()
        self.forgotten()
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
            self.whole.forget()

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def save(self, step: Step, mean: Callable[[Tensor], Tensor]) -> SavedState:
        """Return copies of everything. ``mean`` averages a tensor over the workers, in the same order on all."""
        self.decide()
        with self.streams.everywhere():
            if not step.captured:
                # A run that loads these errors rounds them to 16 bits. This run then goes on with the same bits.
                held = ((m.error, m.bucket) for m in self.matrices.values())
                for bucket in {bucket for error, bucket in held if error is not None and error.itemsize < 4}:
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
            for name, error in sorted(self.whole.errors(step).items()):
                found[name] = {"error": mean(error.clone())}
            # Those too to which an interrupted first step has not come, unless buckets are compressed as a whole.
            given, seen = self._tensors(), loaded.tensors | self.sizes
            shapes = {} if seen and seen.keys().isdisjoint(given) else given
            known = {name: matrix_size(shape, self.plan.config, name) for name, shape in shapes.items()}
            # With the sizes of the last compression: in this run, or in the one that saved the loaded state.
            tensors = known | seen | {name: loaded.tensors[name] for name in loaded.matrices}
            plan = self.plan.state_dict()
            return SavedState(step.iteration, tensors, found, plan, own=loaded.own, owner=loaded.owner)

    def load(self, saved: SavedState) -> None:
        """Replace everything by ``saved``. A matrix takes over its part when it is in a bucket for the first time."""
        self.decide()
        self.matrices, self.sizes, self.moving = {}, {}, {}
        self.whole.forget()
        self.loaded = saved

    def claim(self, communicator: Communicator) -> tuple[int, int] | None:
        """Drop loaded errors of another worker, before they are used. Return its (index, world size), or None."""
        owner = self.loaded.owner
        if owner is None:
            return None
        self.loaded = dataclasses.replace(self.loaded, owner=None)
        if owner != communicator.place:
            self.forget_errors()
        return None if owner == communicator.place else owner
