"""Compress and decompress: one bucket's step in stages, and the public ``Compressor`` over one set of tensors."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.comm.agreement import Agreement
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.exchange import summed
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.loss_scale import LossScaleSource
from powersgd_triton.core.replanner import Replanner
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.core.state import State
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops import BucketState, TorchOperations, reconstruct_ranges
from powersgd_triton.ops.reference import subtract_product_reference
from powersgd_triton.ranks.report import RankReport

Gradients = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
GRADIENT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Compression:
    """One step of one bucket, cut where its messages travel.

    Args:
        state: the model's state.
        layout: the tensors of the bucket.
        gradients: {name: contiguous tensor of the layout's shape}, not changed before ``reconstruct``.
        communicator: whom to average with.
    """

    def __init__(
        self, state: State, layout: Layout, gradients: Mapping[str, Tensor], communicator: Communicator
    ) -> None:
        device = gradients[layout.segments[0].name].device
        self._state = state
        self._communicator = communicator
        self.verdict = state.verdict(device)
        self._step = state.step(communicator.world_size)
        self.bucket = state.bind(layout, {gradient.dtype for gradient in gradients.values()}, device)
        self._gradients = state.add_carried(layout, gradients)

    def run(self) -> Iterator[None]:
        """Do the step up to the averaged factors; each time this yields, a collective is under way.

        Every worker must advance all its buckets in the same order, since that is the order of the collectives.
        """
        operations = self.bucket.operations
        step = dataclasses.replace(self._step, growth=self._state.rescale(self.bucket))
        if not step.warm_start:
            operations.redraw_bases(step)
        for message in operations.exchange(self._gradients, step, self.verdict):
            yield from summed(self.bucket, message, self._communicator)

    def reconstruct(self, gradients: Mapping[str, Tensor]) -> None:
        """Ĝ, and the bypass tensors' means, into {name: contiguous tensor}.

        Where one does not fit its dtype the step is not finite, see ``State.verdict_on_averages``.
        """
        self.bucket.operations.reconstruct(gradients, self._state.verdict_on_averages(self.verdict))

    def reconstruct_ranges(self, out: Mapping[str, tuple[int, Tensor]]) -> None:
        """Parts of them, see ``ops.reconstruct_ranges``; for whole averages that do not fit ask all who hold a part."""
        reconstruct_ranges(self.bucket, out, self._state.verdict_on_averages(self.verdict))


@dataclasses.dataclass(frozen=True, eq=False)
class Compressed:
    """The averaged factors of one step: views of the compressor's memory, valid until its next ``compress``."""

    bucket: BucketState
    iteration: int
    verdict: Tensor
    """Scalar: 1 where the step was finite, else 0. Known once the averages are written, see ``decompress``."""

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{name: (left [n, r], right [m, r])}, views, with Ĝ = left · rightᵀ. Bypass tensors have none.

        That is P̂ and Q̄, or P̄ and Q̂ in every second step of the alternating algorithm. With several iterations they
        are copies with iterations · r columns.
        """
        factors = self.bucket.joined(self.bucket.average)
        return {
            segment.name: (left[index], right[index])
            for group, (left, right) in zip(self.bucket.layout.groups, factors, strict=True)
            for index, segment in enumerate(group.segments)
        }


class Compressor:
    """PowerSGD (arXiv:1905.13727) over one set of named gradients, averaged over a process group.

    Args:
        config: what to compress and how.
        tensors: {name: tensor or shape} in the order in which they lie in a flat buffer. Tensors also fix the dtype and
            device that gradients must have; they are not kept.
        group: process group; None for the default group, or for one process where none is initialised.

    Raises:
        TypeError: a tensor is not of a floating-point dtype.
        ValueError: a shape has a negative size.
        RuntimeError: the group cannot be used.
    """

    def __init__(
        self,
        config: PowerSGDConfig,
        tensors: Mapping[str, Tensor | Sequence[int]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(config, PowerSGDConfig):
            raise TypeError(f"config must be a PowerSGDConfig; got {type(config).__name__}")
        shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, tuple[torch.dtype, torch.device]] = {}
        for name, tensor in tensors.items():
            shapes[name] = tuple(tensor.shape if isinstance(tensor, Tensor) else tensor)
            if any(size < 0 for size in shapes[name]):
                raise ValueError(f"sizes must not be negative; {name!r} has shape {shapes[name]}")
            if isinstance(tensor, Tensor):
                _check_dtype(name, tensor)
                self._kinds[name] = (tensor.dtype, tensor.device)
        self.config = config
        self._communicator = Communicator(group)
        self._state = State(config)
        self._state.plan.begin(shapes)
        self._agreement = Agreement(self._state, [self._communicator])
        self._replanner = Replanner(self._state, self._communicator)
        self._compressing = Layout.build(shapes, config)
        self._exact = Layout.build(shapes, config, compress=False)
        self._before = self._after = 0
        self._written = False

    @property
    def iteration(self) -> int:
        """Number of steps done."""
        return self._state.iteration

    @property
    def layout(self) -> Layout:
        """Which tensors are compressed, and as which matrices."""
        return self._state.plan.layout(self._compressing)

    def compress(self, gradients: Gradients) -> Compressed:
        """Average this step's gradients over the workers, in compressed form. Collective.

        Args:
            gradients: {name: tensor}, a sequence in the order of the names, or one flat buffer with all of them.
                They are read only.

        Returns:
            The factors, and the means of the bypass tensors, equal on all workers; valid until the next call.

        Raises:
            TypeError, ValueError: the gradients are not those the compressor was made for. Nothing was changed.
            DisagreementError: in the first step, another worker has other tensors or another configuration.
        """
        named = self._named(gradients)
        self._kinds = {name: (tensor.dtype, tensor.device) for name, tensor in named.items()}
        if not self._agreement.begun:
            device = next((tensor.device for tensor in named.values()), torch.device("cpu"))
            self._agreement.begin({segment.name: segment.shape for segment in self._compressing.segments}, device)
        layout = self._exact if self._state.iteration < self.config.start_iter else self.layout
        if not layout.segments:
            self._end_step()
            nothing = BucketState(layout, torch.float32, torch.device("cpu"), self.config, TorchOperations)
            return Compressed(nothing, self._state.iteration, torch.ones(()))
        contiguous = {name: tensor.detach().contiguous() for name, tensor in named.items()}
        compression = Compression(self._state, layout, contiguous, self._communicator)
        try:
            collections.deque(compression.run(), maxlen=0)
        except BaseException:
            self._state.void_step()
            raise
        self._after += layout.sent_numel(self.config, self._state.iteration)
        self._written = False
        self._end_step()
        self._before += layout.numel
        return Compressed(compression.bucket, self._state.iteration, compression.verdict)

    def _end_step(self) -> None:
        self._state.end_step()
        self._agreement.end_step()
        self._replanner.end_step()

    def decompress(self, compressed: Compressed, out: Gradients | None = None) -> Gradients:
        """Write the averaged gradients Ĝ.

        Where one is too large for its dtype it becomes infinite, ``compressed.verdict`` becomes 0, and the error keeps
        all of the step, which must not be applied. The first call after ``compress`` decides; later ones only write.

        Args:
            compressed: from the last ``compress``.
            out: where to, in any of the forms ``compress`` takes, any float dtype; None for new tensors {name: tensor}
                of the gradients' dtypes.

        Returns:
            ``out``.

        Raises:
            RuntimeError: ``compressed`` is of an earlier step.
            TypeError, ValueError: ``out`` is not of the compressor's shapes and device. Nothing was changed.
        """
        self._check_valid(compressed)
        if out is None:
            bucket = compressed.bucket
            out = {
                segment.name: torch.empty(segment.shape, dtype=kind[0], device=kind[1])
                for segment in self._compressing.segments
                for kind in [self._kinds.get(segment.name, (bucket.message_P.dtype, bucket.message_P.device))]
            }
        named = self._named(out, same_dtype=False)
        contiguous = {name: tensor.detach().contiguous() for name, tensor in named.items()}
        if named:
            verdict = self._state.verdict_on_averages(compressed.verdict)
            verdict = torch.zeros_like(verdict) if self._written else verdict
            compressed.bucket.operations.reconstruct(contiguous, verdict)
            self._written = True
        for name, tensor in named.items():
            if contiguous[name].data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(contiguous[name])
        return out

    def leave_error(self, compressed: Compressed, gradients: Gradients) -> Tensor:
        """Turn the gradients that were compressed into the errors: gradients ← M − L Rᵀ, this worker's own product.

        For those who keep the error themselves, with ``error_feedback=False``, as what the next gradient is added to.
        Where the step was not finite nothing is subtracted, so that it is sent in the next step; whether it was is
        known after ``decompress``. Tensors that are not
        compressed become zero, and so does every element that is not finite.

        Returns:
            Scalar on the gradients' device: how many elements were not finite.

        Raises:
            RuntimeError: ``compressed`` is of an earlier step.
            TypeError, ValueError: these are not the compressor's gradients. Nothing was changed.
        """
        self._check_valid(compressed)
        named = {name: tensor.detach() for name, tensor in self._named(gradients).items()}
        bucket, verdict = compressed.bucket, compressed.verdict
        contiguous = {name: tensor.contiguous() for name, tensor in named.items()}
        for matrices, (P, Q) in zip(bucket.matrices(contiguous), bucket.joined(bucket.product), strict=True):
            subtract_product_reference(matrices, P, Q, verdict)
        dropped = torch.zeros((), dtype=torch.int64, device=verdict.device)
        on_host = verdict.device.type == "cpu"
        for segment in bucket.layout.segments:
            error = contiguous[segment.name]
            # Where the sums were finite, so is what this worker gave. On a device that is not known without waiting.
            if not (on_host and verdict):
                finite = error.isfinite()
                dropped += error.numel() - finite.sum()
                error.masked_fill_(~finite, 0)
            if not segment.rank:
                error.zero_()
            if error.data_ptr() != named[segment.name].data_ptr():
                named[segment.name].copy_(error)
        return dropped

    def _check_valid(self, compressed: Compressed) -> None:
        if compressed.iteration != self._state.iteration:
            raise RuntimeError(
                f"factors are valid until the next compress; these are of step {compressed.iteration}, "
                f"the last step was {self._state.iteration}"
            )

    def attach(self, scaler: LossScaleSource) -> None:
        """Let the error follow the loss scale of a ``torch.amp.GradScaler``, or one that a function returns.

        Raises:
            TypeError: it is neither.
        """
        self._state.attach(scaler)

    def error(self) -> dict[str, Tensor]:
        """{name: E}: what this worker still owes, of the gradients' shapes and without loss scale; copies.

        Empty without error feedback.
        """
        shapes = {segment.name: segment.shape for segment in self._compressing.segments}
        return {name: error.view(shapes[name]) for name, error in self._state.error().items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers: the mean error over workers, the bases, the step. Collective: all workers call it.

        Any worker's result can be loaded on all workers of any world size: only the mean error enters the trajectory.
        """
        return self._state.state_dict(self._communicator.mean)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> LoadReport:
        """Go on from a saved state, of any world size and rank.

        A tensor that is compressed no longer gets what it is owed with its next gradient.

        Args:
            state_dict: from ``state_dict``.
            strict: refuse a state that has errors of other tensors, or lacks matrices of these. Otherwise what fits is
                taken over.
            rename: {name in the state: name here}.

        Returns:
            What was and what was not used.

        Raises:
            ValueError: it is of another model or format. Nothing was changed.
        """
        tensors = {s.name: (s.n, s.m, s.rank) for s in self._compressing.segments}
        return self._state.load_state_dict(state_dict, tensors, strict=strict, rename=rename)

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, elements before, elements after) over all steps so far; rate 0 before the first."""
        return (self._before / self._after if self._after else 0.0, self._before, self._after)

    def report(self) -> RankReport:
        """Which tensors are compressed, at which rank, and the bytes of a step; ``print`` it."""
        return self._state.report({segment.name: segment.shape for segment in self._compressing.segments})

    def _named(self, gradients: Gradients, *, same_dtype: bool = True) -> dict[str, Tensor]:
        """Gradients by name, checked against the layout and, with ``same_dtype``, their dtypes."""
        layout = self._compressing
        if isinstance(gradients, Tensor):
            if gradients.dim() != 1 or gradients.numel() != layout.numel:
                raise ValueError(
                    f"a flat buffer must be one-dimensional with {layout.numel} elements; got {tuple(gradients.shape)}"
                )
            if not gradients.is_contiguous():
                raise ValueError(f"a flat buffer must be contiguous; got stride {gradients.stride()}")
            named = {s.name: gradients[s.offset : s.offset + s.numel].view(s.shape) for s in layout.segments}
        elif isinstance(gradients, Mapping):
            missing = [segment.name for segment in layout.segments if segment.name not in gradients]
            if missing:
                raise ValueError(f"gradients lack {missing[0]!r} ({len(missing)} of {len(layout.segments)} missing)")
            if len(gradients) > len(layout.segments):
                known = {segment.name for segment in layout.segments}
                raise ValueError(
                    f"gradients have unknown names, {next(n for n in gradients if n not in known)!r} first"
                )
            named = {segment.name: gradients[segment.name] for segment in layout.segments}
        else:
            if len(gradients) != len(layout.segments):
                raise ValueError(f"expected {len(layout.segments)} gradients; got {len(gradients)}")
            named = {segment.name: tensor for segment, tensor in zip(layout.segments, gradients, strict=True)}
        device = None
        for segment in layout.segments:
            tensor = named[segment.name]
            _check_dtype(segment.name, tensor)
            if tuple(tensor.shape) != segment.shape:
                raise ValueError(f"{segment.name!r} must have shape {segment.shape}; got {tuple(tensor.shape)}")
            kind = self._kinds.get(segment.name)
            if kind is not None and same_dtype and tensor.dtype != kind[0]:
                raise TypeError(f"{segment.name!r} must be of {kind[0]}; got {tensor.dtype}")
            device = device or (kind[1] if kind is not None else tensor.device)
            if tensor.device != device:
                raise ValueError(f"{segment.name!r} must be on {device}; got {tensor.device}")
        return named


def _check_dtype(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name!r} must be a tensor; got {type(tensor).__name__}")
    if tensor.dtype not in GRADIENT_DTYPES:
        raise TypeError(f"{name!r} must be of a floating-point dtype of 16 bits or more; got {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name!r} must be dense; got {tensor.layout}")
