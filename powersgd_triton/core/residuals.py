"""What a worker has not sent yet, by the tensor's name: it is added to the gradients of the next steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.exchange import flat
from powersgd_triton.core.saved_state import Parts, SavedState
from powersgd_triton.core.streams import Streams
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import Size, compressed_rank
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.reference import on_host
from powersgd_triton.ops.step import HostCopy, Step
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
        spares: Whether memory for the errors of the next step is kept between steps, on the CPU.
        decide: Called before errors are read or replaced: it may ``settle``, if that is done late.
        noted: Where to note M of tensors that are sent whole, of which a step leaves what it does not send.
        late: Whether the adapter calls ``settle``, since at the end of a step not all is known that decides about it.
        matrices: {name: Matrix} of all tensors that have been compressed in a step.
        sizes: {name: size} of all tensors that have been in a bucket.
        loaded: A loaded state. The parts of a matrix leave it when the matrix is in a bucket for the first time.
        moving: {name: [(first row, rows)]} of errors that belong to other rows from now on, which may be another
            worker's.
    """

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self.streams = Streams()
        self.late, self.spares = False, True
        self.noted: dict[Layout, Tensor] | None = None
        self.decide: Callable[[], None] = lambda: None
        self.matrices: dict[str, Matrix] = {}
        self.sizes: dict[str, Size] = {}
        self.loaded = SavedState()
        self.moving: dict[str, list[tuple[int, Tensor]]] = {}
        self._forget_remaining()

    def _forget_remaining(self) -> None:
        # Errors of tensors that are sent whole, flat, by their bucket's layout. What the open step has left of them.
        self._whole: dict[Layout, Tensor] = {}
        self._left: dict[Layout, Tensor] = {}
        # Memory of the CPU for what the next step will leave: new memory takes longer than the step.
        self._spare: dict[Layout, Tensor] = {}
        # Errors E [n, m] of other tensors without a matrix. Which a step has added to gradients, and its verdict.
        self._remaining: Parts = {}
        self._added: set[str] = set()
        self._told: HostCopy | None = None
        # The verdict that is to decide what remains; see ``settle``.
        self._verdict: Tensor | None = None

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
        self.sizes |= {s.name: s.size if factors else s.size._replace(rank=0) for s in layout.segments}
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
        if not self.plan.config.error_feedback:
            return flat(layout, gradients).to(torch.float32, copy=True)
        M, terms = self.terms(layout, gradients, step)
        return torch.add(*terms, out=M)

    def terms(
        self, layout: Layout, gradients: Mapping[str, Tensor], step: Step
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return memory for M, and G and E, of which it is the sum."""
        G = flat(layout, gradients)
        E, scale = self._flat(layout, G.device), step.scale(G.device)
        M = self._spare.pop(layout, None)
        M = torch.empty_like(E) if M is None else M
        if self.noted is not None:
            self.noted[layout] = M
        return M, (G, E if scale is None else E * scale)

    def keep(self, layout: Layout, M: Tensor, step: Step) -> None:
        """Take over what a step has left of M as the errors, unless it turns out not to be applied."""
        if not self.plan.config.error_feedback:
            return
        self._verdict, scale = step.verdict(M.device), step.scale(M.device)
        self._left[layout] = M if scale is None else M.div_(scale)

    def _flat(self, layout: Layout, device: torch.device) -> Tensor:
        """Return the errors of tensors that are sent whole. At first, they come from other layouts, or are zero."""
        if layout not in self._whole:
            E, remaining = torch.zeros(layout.numel, device=device), self._apart(layout)
            for segment in layout.segments:
                if segment.name in remaining:
                    E[segment.span] = remaining.pop(segment.name).reshape(-1)
            self._whole[layout] = E
        return self._whole[layout]

    def _apart(self, layout: Layout) -> Parts:
        """Return the remaining errors by name, with those that other layouts share with this one."""
        for other in [other for other in self._whole if not other.shapes.keys().isdisjoint(layout.shapes)]:
            # Copies, since views would keep the memory of all until the last one is used.
            self._remaining |= {name: E.clone() for name, E in _named(other, self._whole.pop(other)).items()}
            self._spare.pop(other, None)
        return self._unsent()

    # Errors ----------------------------------------------------------------------------------------------------------

    def add_remaining(self, layout: Layout, gradients: Mapping[str, Tensor], step: Step) -> Mapping[str, Tensor]:
        """Add remaining errors to the gradients of tensors that are no longer compressed, in fp32 or fp64 copies.

        Without remaining errors, return the gradients themselves. If the step turns out not to be finite, the errors
        are added again in the next step.
        """
        waiting = self._apart(layout).keys() - self._added
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
        self._added |= {*names}
        self._verdict = step.verdict(device)
        return sums

    def has_errors(self) -> bool:
        """Return whether errors are left that no bucket holds: of a loaded state, or of what is not compressed now."""
        return bool(self.loaded.matrices or self._whole or self._unsent())

    def settle(self, step: Step) -> None:
        """Keep what the last step has left, or what was before it if it is not applied, unless it is still open.

        The host does not wait for a device.
        """
        verdict = self._verdict
        if verdict is None or not self.is_unsettled(step):
            return
        for layout, M in self._left.items():
            E = self._flat(layout, M.device)
            if not on_host(verdict):
                torch.where(verdict.bool(), M, E, out=E)
            else:
                self._whole[layout], spare = (M, E) if verdict else (E, M)
                if self.spares:
                    self._spare[layout] = spare
        self._left, self._verdict = {}, None
        if self._added and self._told is None:
            # Whether any error is left decides what the host does. Replays of a captured step overwrite the verdict.
            self._told = HostCopy(verdict.clone())

    @property
    def undecided(self) -> tuple[dict[Layout, Tensor], Tensor | None]:
        """What ``settle`` decides about, and its verdict: for who must hold it back until later."""
        return self._left, self._verdict

    @undecided.setter
    def undecided(self, held: tuple[dict[Layout, Tensor], Tensor | None]) -> None:
        self._left, self._verdict = held

    def wait(self, errors: Parts) -> None:
        """Add {name: E} of tensors without a matrix to their next gradients."""
        self._remaining = self._unsent() | errors

    def is_unsettled(self, step: Step) -> bool:
        """Return whether a step has ended that ``settle`` would decide about."""
        return self._verdict is not None and not step.decides(self._verdict)

    def take_back(self, unsent: Mapping[str, Tensor]) -> None:
        """Let tensors keep the errors from before the last step where the scalar ``unsent[name]`` is True."""
        for layout, M in self._left.items():
            before, after = _named(layout, self._flat(layout, M.device)), _named(layout, M)
            for name in after.keys() & unsent.keys():
                after[name].copy_(torch.where(unsent[name].to(M.device), before[name], after[name]))
        for name in self._added & unsent.keys() if self._verdict is not None else ():
            error = self._remaining[name]
            self._remaining[name] = error.where(unsent[name].to(error.device) | (self._verdict == 0), 0.0)
            self._added.discard(name)

    def _unsent(self) -> Parts:
        """Return the remaining errors, without those that an applied step has added to gradients."""
        if self._told is not None:
            for name in self._added if self._told.numbers() else ():
                del self._remaining[name]
            self._added, self._told = set(), None
        return self._remaining

    def _settled(self, step: Step) -> Parts:
        """Return views of all errors of tensors without a matrix."""
        self.settle(step)
        found = dict(self._unsent())
        for layout, E in self._whole.items():
            found |= _named(layout, E)
        return found

    def error(self, step: Step) -> Parts:
        """Return copies {name: E [n, m]} of this worker's errors without the loss scale. Empty without feedback."""
        self.decide()
        with self.streams.everywhere():
            if not self.plan.config.error_feedback:
                return {}
            errors = {name: parts["error"].clone() for name, parts in self.loaded.matrices.items()}
            errors |= {name: error.clone() for name, error in self._settled(step).items()}
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
        self.decide()
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
            for name, error in sorted(self._settled(step).items()):
                found[name] = {"error": mean(error.clone())}
            # With the sizes of the last compression: in this run, or in the one that saved the loaded state.
            tensors = loaded.tensors | self.sizes | {name: loaded.tensors[name] for name in loaded.matrices}
            plan = self.plan.state_dict() if self.plan.given.planned else {}
            return SavedState(step.iteration, tensors, found, plan, own=loaded.own, owner=loaded.owner)

    def load(self, saved: SavedState) -> None:
        """Replace everything by ``saved``. A matrix takes over its part when it is in a bucket for the first time."""
        self.decide()
        self.matrices, self.sizes, self.moving = {}, {}, {}
        self._forget_remaining()
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


def _named(layout: Layout, E: Tensor) -> Parts:
    return {s.name: E[s.span].view(s.rows, s.m) for s in layout.segments}
