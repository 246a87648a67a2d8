"""What lives from step to step: error buffers and bases, by parameter name, and the factors of each bucket."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.carried import CarriedErrors
from powersgd_triton.core.loss_scale import LossScale, LossScaleSource
from powersgd_triton.core.saved_state import FORMAT_VERSION, LoadReport, SavedState, Size, fingerprint, listing
from powersgd_triton.layout.layout import Layout, compressed_rank, first_turn
from powersgd_triton.ops import Backend, BucketState, Step, select_backend
from powersgd_triton.ranks.plan import Measurement, RankPlan
from powersgd_triton.ranks.report import RankReport

logger = logging.getLogger("powersgd_triton")

VERDICTS = 1024
"""So many steps' verdicts are made at once: one launch on the device instead of one a step."""


@dataclasses.dataclass(eq=False)
class MatrixState:
    """One matrix: its (n, m), error buffer [n, m] or None, bases, and the bucket that they belong to.

    bases: "basis" [m, r], and in the alternating algorithm "left_basis" [n, r].
    """

    shape: tuple[int, int]
    error: Tensor | None
    bases: dict[str, Tensor]
    bucket: BucketState


class State:
    """Everything that one model's compression remembers, keyed by parameter name.

    A bucket is bound to the state anew whenever its layout changes; matrices keep their error and basis.

    Attributes:
        plan: the ranks, where they are planned.
    """

    def __init__(self, config: PowerSGDConfig) -> None:
        self.config = config
        self.plan = RankPlan(config)
        self.iteration = 0
        self.matrices: dict[str, MatrixState] = {}
        self._backends: dict[tuple[str, str], Backend] = {}
        self._buckets: dict[Layout, BucketState] = {}
        # Where each tensor was last seen. A bucket that all its tensors have left is dropped.
        self._homes: dict[str, Layout] = {}
        self._verdict: Tensor | None = None
        self._verdicts: list[Tensor] = []
        # Written to where it does not matter whether averages fit.
        self._unheeded: Tensor | None = None
        self._loss_scale: LossScale | None = None
        # This step's, and the quotients in use: one for each scale that a bucket's M may have.
        self._scale: Tensor | None = None
        self._growths: list[tuple[Tensor | None, Tensor]] = []
        self._restored: dict[str, dict[str, Tensor]] = {}
        self._restored_own = False
        # Sizes of the tensors in the loaded state, and whether there must be no others.
        self._saved_tensors: dict[str, Size] = {}
        self._strict = False
        self._carried = CarriedErrors()

    # A step -----------------------------------------------------------------------------------------------------

    def verdict(self, device: torch.device) -> Tensor:
        """Scalar of the current step, shared by its buckets: 1, set to 0 by a bucket that is not finite."""
        if self._verdict is None:
            if not self._verdicts or self._verdicts[-1].device != device:
                self._verdicts = list(torch.ones(VERDICTS, device=device).unbind())
            self._verdict = self._verdicts.pop()
        return self._verdict

    @property
    def follows_loss_scale(self) -> bool:
        """Whether a loss scale is attached."""
        return self._loss_scale is not None

    def verdict_on_averages(self, verdict: Tensor) -> Tensor:
        """Where to note that an average does not fit its dtype: ``verdict``, else a scalar that no one reads.

        What does not fit is owed again only where the error follows a loss scale. Where it does not, a scaler that
        shrinks the gradients cannot shrink what was carried, and no step would ever fit again.
        """
        if self.follows_loss_scale:
            return verdict
        if self._unheeded is None or self._unheeded.device != verdict.device:
            self._unheeded = torch.zeros_like(verdict)
        return self._unheeded

    @property
    def interrupted(self) -> bool:
        """Whether a step has begun that is not closed."""
        return self._verdict is not None

    def attach(self, source: LossScaleSource) -> None:
        """Let the error follow a loss scale, see ``LossScale``. It is read once a step, at its first bucket."""
        self._loss_scale = LossScale(source)

    def rescale(self, bucket: BucketState) -> Tensor | None:
        """Note that a bucket's M gets this step's loss scale; what that multiplies it by, None for 1."""
        if self._loss_scale is None or not any(group.M for group in bucket.groups):
            return None
        before, scale = bucket.scale, self._read_scale(bucket.message_P.device)
        bucket.scale = scale
        if before is scale:
            return None
        for known, growth in self._growths:
            if known is before:
                return growth
        if scale is None:
            assert before is not None
            growth = before.reciprocal()
        else:
            growth = scale if before is None else scale / before
        self._growths.append((before, growth))
        return growth

    def _read_scale(self, device: torch.device) -> Tensor | None:
        if self._scale is None and self._loss_scale is not None:
            self._scale = self._loss_scale.read(device)
        return self._scale

    def step(self, workers: int) -> Step:
        """What the operations need to know of the current step."""
        config = self.config
        return Step(
            iteration=self.iteration,
            turn=first_turn(config, self.iteration),
            workers=workers,
            epsilon=config.orthogonalization_epsilon,
            warm_start=config.warm_start,
            repetitions=config.iterations,
        )

    def end_step(self) -> None:
        """Close the current step: what follows belongs to the next one."""
        self._forget_step()
        self.iteration += 1

    def void_step(self) -> None:
        """The current step will never be applied: it is begun anew, and what it has been given so far is still owed.

        Its messages may still be on their way, so every bucket gets new memory.
        """
        if self._verdict is not None:
            self._verdict.zero_()
        self._forget_step()
        self._buckets = {}

    def _forget_step(self) -> None:
        self._verdict, self._scale, self._growths = None, None, []

    # Buckets ----------------------------------------------------------------------------------------------------

    def bind(self, layout: Layout, dtypes: Collection[torch.dtype], device: torch.device) -> BucketState:
        """The factors for a layout whose tensors are of ``dtypes`` on ``device``: fp64 where one of them is, else fp32.

        Raises:
            RuntimeError: a checkpoint was loaded that lacks one of the layout's matrices.
            ValueError: the configured backend cannot be used for them.
        """
        if layout in self._buckets and all(self._homes.get(segment.name) is layout for segment in layout.segments):
            return self._buckets[layout]
        backend = self._select_backend(layout, dtypes, device)
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        for segment in layout.compressed:
            saved = self._saved_tensors
            if self._strict and segment.name not in saved and segment.name not in self.matrices:
                raise RuntimeError(
                    f"the loaded state has no matrix named {segment.name!r}; it has {listing(saved)}. "
                    "Was it saved from another model or with another configuration?"
                )
        bucket = BucketState(layout, dtype, device, self.config, backend.operations)
        self._move_in(bucket, dtype, device)
        self._homes.update((segment.name, layout) for segment in layout.segments)
        homes = set(self._homes.values())
        self._buckets = {home: kept for home, kept in self._buckets.items() if home in homes}
        self._buckets[layout] = bucket
        for segment in layout.bypass:
            # In the first steps, which are exact, nothing is compressed yet.
            if segment.name in self._restored and not compressed_rank(segment.shape, self.config, segment.name):
                parts = self._restored.pop(segment.name)
                if "error" in parts and self.config.error_feedback:
                    self._carried.owed[segment.name] = parts["error"].to(device)
        return bucket

    def add_carried(self, layout: Layout, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The gradients with what is still owed for tensors that are no longer compressed; copies if there is any."""
        self._carried.settle(self._verdict)
        names = self._carried.names(segment.name for segment in layout.bypass)
        if not names:
            return gradients
        device = gradients[names[0]].device
        return self._carried.add(names, gradients, self.verdict(device), self._read_scale(device))

    def _select_backend(self, layout: Layout, dtypes: Collection[torch.dtype], device: torch.device) -> Backend:
        """The backend for a bucket; the same one for all buckets for which the choice has the same reason."""
        rank = max((group.rank for group in layout.groups), default=1)
        backend = select_backend(self.config, device, dtypes, rank)
        if (backend.name, backend.reason) not in self._backends:
            logger.info("PowerSGD backend: %s (%s)", backend.name, backend.reason)
        return self._backends.setdefault((backend.name, backend.reason), backend)

    def _move_in(self, bucket: BucketState, dtype: torch.dtype, device: torch.device) -> None:
        """Give each of the bucket's matrices its error buffer and basis, old or new."""
        layout = bucket.layout
        self._materialize({self.matrices[s.name].bucket for s in layout.compressed if s.name in self.matrices})
        feedback = self.config.error_feedback
        newcomers = [segment for segment in layout.compressed if segment.name not in self.matrices]
        if newcomers and feedback:
            numel = sum(segment.numel for segment in newcomers)
            logger.info("A zero tensor of length %s that represents local error is created.", numel)
        if newcomers and self.config.warm_start:
            logger.info(
                "Allocating contiguous memory of length %s for Ps, and of length %s for Qs, respectively.",
                layout.p_numel,
                layout.q_numel,
            )
        bucket.operations.redraw_bases(self.step(1))
        error_dtype = getattr(torch, str(self.config.error_dtype)) if self.config.error_dtype else dtype
        bases = {"basis": bucket.right(bucket.basis)}
        if self.config.algorithm == "alternating":
            bases["left_basis"] = bucket.left(bucket.P_hat)
        complete = True
        for position, (group, tensors) in enumerate(zip(layout.groups, bucket.groups, strict=True)):
            new = sum(segment.name not in self.matrices for segment in group.segments) if feedback else 0
            # One allocation for a group's new matrices keeps them at equal distances, so that they batch.
            memory = iter(torch.zeros(new, group.n, group.m, dtype=error_dtype, device=device).unbind())
            errors: list[Tensor] = []
            for index, segment in enumerate(group.segments):
                known = self.matrices.get(segment.name)
                error = None
                if feedback:
                    error = next(memory) if known is None or known.error is None else known.error.to(error_dtype)
                    errors.append(error)
                own = {key: views[position][index] for key, views in bases.items()}
                self.matrices[segment.name] = MatrixState((group.n, group.m), error, own, bucket)
                if known is not None:
                    complete &= self._fill(segment.name, own, known.bases)
                if segment.name in self._restored:
                    parts = self._restored.pop(segment.name)
                    complete &= self._fill(segment.name, own, parts)
                    if error is not None:
                        error.copy_(parts["error"])
            tensors.M = errors if feedback else None
        if not complete:
            bucket.operations.orthogonalize_bases(self.step(1))

    def _fill(self, name: str, bases: Mapping[str, Tensor], earlier: Mapping[str, Tensor]) -> bool:
        """Take over what fits of a matrix's earlier bases; whether nothing is left random."""
        complete = True
        for key, basis in bases.items():
            saved = earlier.get(key, basis[:, :0])
            before, after = saved.shape[1], basis.shape[1]
            if after < before:
                saved = torch.stack([saved[:, k] for k in self.plan.kept_columns(name, before, after)], dim=1)
            basis[:, : saved.shape[1]] = saved.to(basis)
            complete &= before >= after
        return complete

    def buckets(self) -> list[BucketState]:
        """Those bound now, in the order of their first tensors' names."""
        return sorted(self._buckets.values(), key=lambda bucket: bucket.layout.segments[0].name)

    # The error --------------------------------------------------------------------------------------------------

    def materialize(self) -> None:
        """Turn every error buffer into E: without the product that is still to be subtracted, or loss scale.

        What a step has sent that is not closed is not subtracted: it is still owed if the step was interrupted.
        """
        self._materialize({matrix.bucket for matrix in self.matrices.values()})

    def _materialize(self, buckets: Iterable[BucketState]) -> None:
        for bucket in buckets:
            if bucket.applied is not None and bucket.applied is self._verdict:
                continue
            if bucket.applied is not None:
                bucket.operations.subtract_product()
                bucket.applied = None
            if bucket.scale is not None:
                for error in [error for group in bucket.groups for error in group.M or []]:
                    error.div_(bucket.scale)
                bucket.scale = None

    def error(self) -> dict[str, Tensor]:
        """{name: E [n, m]}, this worker's own, copied, not scaled by a loss scale; empty without error feedback."""
        if not self.config.error_feedback:
            return {}
        self.materialize()
        errors = {name: parts["error"].clone() for name, parts in self._restored.items()}
        errors |= {name: error.clone() for name, error in self._carried.outstanding(self._verdict).items()}
        return errors | {name: _owed(m.error, m.bucket) for name, m in self.matrices.items() if m.error is not None}

    def forget_errors(self) -> None:
        """Set every error to zero, also of matrices that a checkpoint brought and that are not bound yet."""
        self.materialize()
        for error in [matrix.error for matrix in self.matrices.values() if matrix.error is not None]:
            error.zero_()
        for parts in self._restored.values():
            if "error" in parts:
                parts["error"].zero_()
        self._carried = CarriedErrors()

    def measure(self) -> Measurement | None:
        """After a step: the energies from which ranks are to be planned, where it is time to and there are any."""
        if not self.plan.is_due(self.iteration):
            return None
        buckets = [bucket for bucket in self.buckets() if bucket.average and bucket.layout.compressed]
        return Measurement(buckets) if buckets else None

    def report(self, tensors: Mapping[str, Sequence[int]]) -> RankReport:
        """Ranks and bytes of tensors {name: shape}."""
        return RankReport.of(self.layout(tensors), self.config, self.plan.spectra)

    def layout(self, tensors: Mapping[str, Sequence[int]]) -> Layout:
        """Tensors {name: shape} in one layout, with the ranks that they have now."""
        return self.plan.ranked(Layout.build(tensors, self.config))

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self, mean: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Plain numbers and tensors. ``mean`` averages a tensor over workers (or returns it as it is)."""
        self.materialize()
        matrices = {name: {key: part.clone() for key, part in parts.items()} for name, parts in self._restored.items()}
        if self._restored_own:
            for name in sorted(name for name, parts in matrices.items() if "error" in parts):
                matrices[name]["error"] = mean(matrices[name]["error"])
        for name in sorted(self.matrices):
            matrix = self.matrices[name]
            matrices[name] = {key: basis.clone() for key, basis in matrix.bases.items()}
            if matrix.error is not None:
                # Sums of 16-bit values are no 16-bit values.
                wide = torch.promote_types(matrix.error.dtype, torch.float32)
                matrices[name]["error"] = mean(_owed(matrix.error.to(wide), matrix.bucket))
        for name, error in sorted(self._carried.outstanding(self._verdict).items()):
            matrices[name] = {"error": mean(error.clone())}
        # As they were compressed last, here or where the loaded state was saved.
        tensors = self._saved_tensors | self._bound_sizes() | {n: self._saved_tensors[n] for n in self._restored}
        return {
            "format_version": FORMAT_VERSION,
            "iteration": self.iteration,
            "config": self.config.to_dict(),
            "fingerprint": fingerprint(tensors),
            "tensors": {name: list(size) for name, size in sorted(tensors.items())},
            "matrices": matrices,
            **({"plan": self.plan.state_dict()} if self.config.planned else {}),
        }

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, Size] | None = None,
        *,
        own: bool = False,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> LoadReport:
        """Take over a saved state; matrices that are not bound yet take theirs when they are.

        Args:
            state: from ``state_dict``. Its rank may be another one.
            tensors: size of every tensor, where all are known; default those bound so far.
            own: whether the errors in it are this worker's own instead of the mean.
            strict: whether all matrices must be in both, the state and this model.
            rename: {saved name: name here}.

        Returns:
            What has become of the state's matrices.

        Raises:
            ValueError: the state is of another format, configuration or model. Nothing was changed.
        """
        feedback = self.config.error_feedback
        saved = SavedState.parse(state, needs_errors=feedback, rename=rename)
        complete = tensors is not None
        if tensors is None:
            tensors = self._bound_sizes()
        report = saved.compare(tensors, complete=complete, strict=strict, feedback=feedback)
        unused = {*report.unused, *report.added}
        self.plan.load_state_dict(saved.plan)
        self.iteration = saved.iteration
        self._forget_step()
        self._restored = {
            name: {key: part.clone() for key, part in parts.items()}
            for name, parts in saved.matrices.items()
            if name not in unused
        }
        self._restored_own, self._carried = own, CarriedErrors()
        self._strict = strict and bool(saved.matrices)
        self._saved_tensors = {name: size for name, size in saved.tensors.items() if name not in unused}
        # What is bound is bound anew, which takes over what was restored.
        self.matrices, self._homes, self._buckets = {}, {}, {}
        logger.info("Loaded PowerSGD state of step %s: %s", self.iteration, report)
        return report

    def _bound_sizes(self) -> dict[str, Size]:
        return {s.name: (s.n, s.m, s.rank) for layout in set(self._homes.values()) for s in layout.segments}


def _owed(error: Tensor, bucket: BucketState) -> Tensor:
    """A copy of a bucket's error buffer without loss scale."""
    return error.clone() if bucket.scale is None else error / bucket.scale
