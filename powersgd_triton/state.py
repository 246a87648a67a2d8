"""What lives from step to step: error buffers and bases, by parameter name, and the factors of each bucket."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout import Layout, first_turn
from powersgd_triton.loss_scale import LossScale, LossScaleSource
from powersgd_triton.ops import Backend, BucketState, Step, select_backend

logger = logging.getLogger("powersgd_triton")

FORMAT_VERSION = 1
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
    """

    def __init__(self, config: PowerSGDConfig) -> None:
        self.config = config
        self.iteration = 0
        self.matrices: dict[str, MatrixState] = {}
        self._backends: dict[tuple[str, str], Backend] = {}
        self._buckets: dict[Layout, BucketState] = {}
        # Where each tensor was last seen. A bucket that all its tensors have left is dropped.
        self._homes: dict[str, Layout] = {}
        self._verdict: Tensor | None = None
        self._verdicts: list[Tensor] = []
        self._loss_scale: LossScale | None = None
        # This step's, and the quotients in use: one for each scale that a bucket's M may have.
        self._scale: Tensor | None = None
        self._growths: list[tuple[Tensor | None, Tensor]] = []
        self._restored: dict[str, dict[str, Tensor]] = {}
        self._restored_own = False

    # A step -----------------------------------------------------------------------------------------------------

    def verdict(self, device: torch.device) -> Tensor:
        """Scalar of the current step, shared by its buckets: 1, set to 0 by a bucket that is not finite."""
        if self._verdict is None:
            if not self._verdicts or self._verdicts[-1].device != device:
                self._verdicts = list(torch.ones(VERDICTS, device=device).unbind())
            self._verdict = self._verdicts.pop()
        return self._verdict

    @property
    def interrupted(self) -> bool:
        """Whether a step has begun that is not closed."""
        return self._verdict is not None

    def attach(self, source: LossScaleSource) -> None:
        """Let the error follow a loss scale, see ``LossScale``. It is read once a step, at its first bucket."""
        self._loss_scale = LossScale(source)

    def loss_scale(self, device: torch.device) -> Tensor | None:
        """This step's loss scale; None for 1."""
        if self._scale is None and self._loss_scale is not None:
            self._scale = self._loss_scale.read(device)
        return self._scale

    def rescale(self, bucket: BucketState) -> Tensor | None:
        """Note that a bucket's M gets this step's loss scale; what that multiplies it by, None for 1."""
        if self._loss_scale is None or not any(group.M for group in bucket.groups):
            return None
        before, bucket.scale = bucket.scale, self.loss_scale(bucket.message_P.device)
        if before is self._scale:
            return None
        for known, growth in self._growths:
            if known is before:
                return growth
        if self._scale is None:
            assert before is not None
            growth = before.reciprocal()
        else:
            growth = self._scale if before is None else self._scale / before
        self._growths.append((before, growth))
        return growth

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
        self._homes = {}

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
            if self._restored and segment.name not in self._restored and segment.name not in self.matrices:
                raise RuntimeError(
                    f"the loaded state has no matrix named {segment.name!r}; it has {_listing(self._restored)}. "
                    "Was it saved from another model or with another configuration?"
                )
        bucket = BucketState(layout, dtype, device, self.config, backend.operations)
        self._move_in(bucket, dtype, device)
        self._homes.update((segment.name, layout) for segment in layout.segments)
        homes = set(self._homes.values())
        self._buckets = {home: kept for home, kept in self._buckets.items() if home in homes}
        self._buckets[layout] = bucket
        return bucket

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
                if known is not None:
                    for key, basis in own.items():
                        basis.copy_(known.bases[key])
                matrix = self.matrices[segment.name] = MatrixState((group.n, group.m), error, own, bucket)
                if segment.name in self._restored:
                    self._restore(matrix, self._restored.pop(segment.name))
            tensors.M = errors if feedback else None

    # The error --------------------------------------------------------------------------------------------------

    def materialize(self) -> None:
        """Turn every error buffer into E: without the product that is still to be subtracted, or loss scale."""
        self._materialize({matrix.bucket for matrix in self.matrices.values()})

    def _materialize(self, buckets: Iterable[BucketState]) -> None:
        for bucket in buckets:
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
        return errors | {name: m.error.clone() for name, m in self.matrices.items() if m.error is not None}

    def forget_errors(self) -> None:
        """Set every error to zero, also of matrices that a checkpoint brought and that are not bound yet."""
        self.materialize()
        for error in [matrix.error for matrix in self.matrices.values() if matrix.error is not None]:
            error.zero_()
        for parts in self._restored.values():
            if "error" in parts:
                parts["error"].zero_()

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
                matrices[name]["error"] = mean(matrix.error.to(wide, copy=True))
        return {
            "format_version": FORMAT_VERSION,
            "iteration": self.iteration,
            "config": self.config.to_dict(),
            "matrices": matrices,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]] | None = None, *, own: bool = False
    ) -> None:
        """Take over a saved state; matrices that are not bound yet take theirs when they are.

        Args:
            state: from ``state_dict``. Its rank may be another one.
            shapes: (n, m) of every compressed matrix, where all are known; default those bound so far.
            own: whether the errors in it are this worker's own instead of the mean.

        Raises:
            ValueError: the state is of another format, configuration or model. Nothing was changed.
        """
        matrices = self._checked_matrices(state)
        complete = shapes is not None
        if shapes is None:
            shapes = {name: matrix.shape for name, matrix in self.matrices.items()}
        missing = shapes.keys() - matrices.keys()
        unexpected = matrices.keys() - shapes.keys() if complete else set()
        if matrices and (missing or unexpected):
            raise ValueError(
                "the saved state is not of this model or configuration; "
                f"matrices missing from it: {_listing(missing)}; only in it: {_listing(unexpected)}"
            )
        for name, (n, m) in shapes.items():
            saved = _saved_shape(matrices[name]) if matrices else (n, m)
            if saved != (n, m) and saved != (None, m):
                raise ValueError(f"matrix {name!r} is {n} × {m}; in the saved state it is {saved[0]} × {saved[1]}")
        self.iteration = state["iteration"]
        self._forget_step()
        self._restored = {name: {key: part.clone() for key, part in parts.items()} for name, parts in matrices.items()}
        self._restored_own = own
        # What is bound is bound anew, which takes over what was restored.
        self.matrices, self._homes, self._buckets = {}, {}, {}

    def _checked_matrices(self, state: Mapping[str, Any]) -> Mapping[str, dict[str, Tensor]]:
        """The matrices of a saved state.

        Raises:
            ValueError: it is not a saved state, or has no error buffers although this configuration needs them.
        """
        if not isinstance(state, Mapping) or not {"format_version", "iteration", "matrices"} <= state.keys():
            raise ValueError("expected a saved PowerSGD state with the keys format_version, iteration and matrices")
        if state["format_version"] != FORMAT_VERSION:
            raise ValueError(f"expected format_version {FORMAT_VERSION}; got {state['format_version']!r}")
        iteration, matrices = state["iteration"], state["matrices"]
        if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
            raise ValueError(f"expected a non-negative number of steps as iteration; got {iteration!r}")
        if not isinstance(matrices, Mapping) or not all(isinstance(parts, Mapping) for parts in matrices.values()):
            raise ValueError(f"expected matrices as {{name: {{part: tensor}}}}; got {type(matrices).__name__}")
        for name, parts in matrices.items():
            for key in {"basis", *parts, *(["error"] if self.config.error_feedback else [])}:
                part = parts.get(key)
                if not isinstance(part, Tensor) or part.dim() != 2 or not part.is_floating_point():
                    what = f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
                    raise ValueError(f"{key!r} of matrix {name!r} must be a two-dimensional float tensor; got {what}")
                if not part.isfinite().all():
                    raise ValueError(f"{key!r} of matrix {name!r} in the saved state is not finite")
            (n, m), r = _saved_shape(parts), parts["basis"].shape[1]
            left = parts["left_basis"].shape if "left_basis" in parts else None
            if (
                not 1 <= r <= m
                or ("error" in parts and (r > parts["error"].shape[0] or parts["error"].shape[1] != m))
                or (left is not None and left != (n or left[0], r))
            ):
                raise ValueError(f"matrix {name!r} of the saved state is {n} × {m} and its basis has {r} columns")
        return matrices

    def _restore(self, matrix: MatrixState, parts: dict[str, Tensor]) -> None:
        """Take over a matrix's error, and of its bases what was saved and fits; the rest stays random."""
        complete = True
        for key, basis in matrix.bases.items():
            saved = parts[key][:, : basis.shape[1]] if key in parts else basis[:, :0]
            basis[:, : saved.shape[1]] = saved.to(basis)
            complete &= saved.shape[1] == basis.shape[1]
        if not complete:
            matrix.bucket.operations.orthogonalize_bases(self.step(1))
        if matrix.error is not None:
            matrix.error.copy_(parts["error"])


def _saved_shape(parts: Mapping[str, Tensor]) -> tuple[int | None, int]:
    """(n, m) of a saved matrix; n is not known without its error."""
    return (parts["error"].shape[0] if "error" in parts else None), parts["basis"].shape[0]


def _listing(names: Iterable[str]) -> str:
    """The first few names, quoted."""
    ordered = sorted(names)
    shown = ", ".join(repr(name) for name in ordered[:5])
    return f"{shown} and {len(ordered) - 5} more" if len(ordered) > 5 else shown or "none"
