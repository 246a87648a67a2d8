"""The public ``Compressor`` over one set of tensors: compress and decompress."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.handle import Handle
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.layout.layout import Layout, sizes
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.reference import subtract_product_reference
from powersgd_triton.ops.torch_backend import TorchBackend

Gradients = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
GRADIENT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class Compressed:
    """The averaged factors of one step: views of the compressor's memory, valid until its next ``compress``.

    Attributes:
        backend: of the bucket that holds the factors.
        iteration: number of the step, from 1.
        verdict: scalar, 1 where the step was finite, else 0. Known once the averages are written, see ``decompress``.
    """

    backend: Backend
    iteration: int
    verdict: Tensor

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{name: (left [n, r], right [m, r])}, views, with Ĝ = left · rightᵀ. Bypass tensors have none.

        That is P̂ and Q̄, or P̄ and Q̂ in every second step of the alternating algorithm. With several iterations they
        are copies with iterations · r columns.
        """
        bucket = self.backend.bucket
        return {
            segment.name: (left[index], right[index])
            for group, (left, right) in zip(bucket.layout.groups, bucket.joined(bucket.average), strict=True)
            for index, segment in enumerate(group.segments)
        }


class Compressor(Handle):
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
        self._compressing = Layout.build(shapes, config)
        self._exact = Layout.build(shapes, config, compress=False)
        super().__init__(Engine(config, Communicator(group), lambda: shapes))
        # Whether the averages of the last step were written once.
        self._written = False

    @property
    def layout(self) -> Layout:
        """Which tensors are compressed, and as which matrices."""
        return self._engine.plan.layout(self._compressing)

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
        engine, step = self._engine, self._engine.step
        device = next((tensor.device for tensor in named.values()), torch.device("cpu"))
        layout = self._compressing if engine.begin(self._compressing, device, last=True) else self._exact
        if not layout.segments:
            engine.end_step()
            nothing = TorchBackend(Bucket(layout, torch.float32, device, self.config))
            return Compressed(nothing, step.iteration, torch.ones(()))
        found: list[Compressed] = []
        # What ``decompress`` reconstructs.
        engine.average(
            layout,
            {name: tensor.detach().contiguous() for name, tensor in named.items()},
            write=lambda backend: found.append(Compressed(backend, step.iteration + 1, step.verdict(device))),
        )
        self._written = False
        return found[0]

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
            dtype = compressed.backend.bucket.message_P.dtype
            out = {
                segment.name: torch.empty(segment.shape, dtype=kind[0], device=kind[1])
                for segment in self._compressing.segments
                for kind in [self._kinds.get(segment.name, (dtype, compressed.verdict.device))]
            }
        named = self._named(out, same_dtype=False)
        contiguous = {name: tensor.detach().contiguous() for name, tensor in named.items()}
        if named:
            decides = self._engine.step.loss_scale is not None and not self._written
            compressed.backend.reconstruct(contiguous, compressed.verdict if decides else None)
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
        bucket, verdict = compressed.backend.bucket, compressed.verdict
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
        if compressed.iteration != self._engine.step.iteration:
            raise RuntimeError(
                f"factors are valid until the next compress; these are of step {compressed.iteration}, "
                f"the last step was {self._engine.step.iteration}"
            )

    def error(self) -> dict[str, Tensor]:
        """{name: E}: what this worker has not sent yet, of the gradients' shapes and without loss scale; copies.

        Empty without error feedback.
        """
        shapes = {segment.name: segment.shape for segment in self._compressing.segments}
        return {name: error.view(shapes[name]) for name, error in super().error().items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers: the mean error over workers, the bases, the step. Collective: all workers call it.

        Any worker's result can be loaded on all workers of any world size: only the mean error enters the trajectory.
        """
        return self._engine.state_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> LoadReport:
        """Go on from a saved state, of any world size and rank.

        When a tensor is no longer compressed, its remaining error is added to its next gradient.

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
        return self._engine.load_state_dict(
            state_dict, sizes(self._engine.tensors(), self.config), strict=strict, rename=rename
        )

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
