"""The public ``Compressor``: compress and decompress one set of tensors."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.checkpoint import StateDict
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import NodeGroup
from powersgd_triton.config import PowerSGDConfig, whole_number
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.core.scheme import FlatAverage
from powersgd_triton.elastic.managed import Managed
from powersgd_triton.handle import Handle
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.gradients import (
    Gradients,
    Kind,
    allocate,
    as_real,
    by_name,
    check_dense,
    check_writable,
    in_form,
    real_shape,
    write_back,
)
from powersgd_triton.ops.products import subtract_product
from powersgd_triton.ops.torch_backend import TorchBackend
from powersgd_triton.schemes import new_engine


@dataclasses.dataclass(frozen=True, eq=False)
class Compressed:
    """The averaged factors of one step: views of the compressor's memory, valid until its next ``compress``.

    Attributes:
        backend: ``Backend`` of the bucket that holds the factors, or what has an average without factors.
        iteration: Number of the step, from 1.
        verdict: Scalar, 1 if the step was finite, else 0. It is final after ``decompress``.
    """

    backend: Any
    iteration: int
    verdict: Tensor

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return {name: (left [n, r], right [m, r])} with Ĝ = left · rightᵀ, as views. Bypass tensors have no factors.

        Those of a batch of matrices, such as experts, are [batch, n, r] and [batch, m, r].

        ValueError: Gradients are quantized, or a worker of a manager's quorum was lost, so that there are none.

        The factors are P̂ and Q̄, or P̄ and Q̂ in every second step of the alternating algorithm. With several
        iterations they are copies with iterations · r columns.
        """
        if not hasattr(self.backend, "bucket"):
            raise ValueError("quantized gradients have no factors, nor has a step that lost a worker")
        bucket = self.backend.bucket
        return {
            segment.name: (P, Q) if segment.batch > 1 else (P[0], Q[0])
            for group, (left, right) in zip(bucket.layout.groups, bucket.joined(bucket.average), strict=True)
            for segment, P, Q in zip(group.segments, left.split(group.counts), right.split(group.counts), strict=True)
        }


class Compressor(Handle):
    """Averages one set of named gradients over a process group with PowerSGD (arXiv:1905.13727).

    Args:
        config: Configuration of the compression.
        tensors: {name: tensor or shape} in the order in which they lie in a flat buffer. Tensors also fix the dtype and
            device that gradients must have; they are not kept. A complex tensor [..., k] counts as a real tensor
            [..., 2k] wherever sizes or shapes matter.
        group: Process group. None uses the default group, or a single process if no group is initialized.
        node_group: "auto", or groups of the workers that share a node: gradients are then summed within the node, and
            only their sum is compressed. See docs/cluster.md.
        manager: A ``torchft.Manager``, whose quorums are averaged over in place of a group. A step in which a worker is
            lost is not committed, and its ``verdict`` is 0. See docs/guides/torchft.md.

    Raises:
        TypeError: A tensor does not have a floating-point or complex dtype, a name is not a string, a size is not an
            int, or an argument is something else.
        ValueError: A shape has a negative size, or ``manager`` comes with what it does not support, such as a group.
        RuntimeError: The group cannot be used.
    """

    def __init__(
        self,
        config: PowerSGDConfig,
        tensors: Mapping[str, Tensor | Sequence[int]],
        group: dist.ProcessGroup | None = None,
        *,
        node_group: NodeGroup = None,
        manager: Any = None,
    ) -> None:
        if manager is not None and group is not None:
            raise ValueError("give either group= or manager=, whose quorums say who the workers are")
        if not isinstance(tensors, Mapping):
            raise TypeError(f"tensors must be {{name: tensor or shape}}; got a {type(tensors).__name__}")
        shapes: dict[str, tuple[int, ...]] = {}
        # What is known of the gradients: their own shapes, before complex ones count as real, dtypes and devices.
        self._kinds: dict[str, Kind] = {}
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise TypeError(f"expected names of tensors as strings; got {name!r}")
            if isinstance(tensor, Tensor):
                check_dense(name, tensor)
                self._kinds[name] = (tensor.shape, tensor.dtype, tensor.device)
                shapes[name] = real_shape(tensor.shape, tensor.dtype)
            else:
                shapes[name] = tuple(whole_number(f"a size of {name!r}", size) for size in tensor)
        device = next((device for *_, device in self._kinds.values()), None)
        super().__init__(new_engine(config, Communicator(group, node_group=node_group), lambda: shapes, device))
        self._exact = Layout.build(shapes, config, compress=False)
        # Whether the averages of the last step have been written. Only the first ``decompress`` may change the verdict.
        self._written = False
        if manager is not None:
            self._managed = Managed(manager, self._engine)

    @property
    def layout(self) -> Layout:
        """The tensors that are compressed, and their shapes as matrices."""
        return self._layout()

    def compress(self, gradients: Gradients) -> Compressed:
        """Average this step's gradients over the workers, and return them in compressed form. Collective.

        Args:
            gradients: {name: tensor}, a sequence in the order of the names, or one flat buffer with all gradients.
                They are not changed.

        Raises:
            TypeError, ValueError: The gradients do not match the compressor's tensors. Nothing was changed.
            DisagreementError: In the first step, another worker has other tensors or another configuration.
        """
        managed = self._managed
        if managed is None:
            return self._compress(gradients)
        found: Compressed | None = managed.guarded(lambda: self._compress(gradients)) if managed.begin() else None
        if found is not None:
            return found
        zero = torch.zeros((), device=next((device for *_, device in self._known().values()), "cpu"))
        return Compressed(FlatAverage(self._exact, zero.expand(self._exact.numel)), self._step.iteration, zero)

    def _compress(self, gradients: Gradients) -> Compressed:
        named = self._examined(lambda: by_name(gradients, self._exact, self._kinds))
        kinds = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in named.items()}
        # A flat buffer does not show which tensors are complex.
        self._kinds = kinds | self._kinds if isinstance(gradients, Tensor) else kinds
        engine, step, compress = self._engine, self._step, self._engine.compressing
        device = next((tensor.device for tensor in named.values()), torch.device("cpu"))
        bucket = engine.begin(compress, lambda: self._exact.shapes, device, last=False, compress=compress)
        if not bucket.layout.segments:
            engine.end_step()
            nothing = TorchBackend(Bucket(bucket.layout, torch.float32, device, self.config))
            return Compressed(nothing, step.iteration, torch.ones((), device=device))
        found: list[Compressed] = []

        def keep(backend: Any) -> None:
            # Instead of reconstructing the averages, keep the factors: ``decompress`` reconstructs them later.
            found.append(Compressed(backend, step.iteration + 1, step.verdict(device)))

        engine.average(bucket, {name: as_real(tensor.detach()) for name, tensor in named.items()}, write=keep)
        # With a loss scale, ``decompress`` decides. (With a manager, the workers' votes do; see ``Unsettled``.)
        step.undecided, self._written = step.loss_scale is not None, False
        engine.end_step()
        return found[0]

    def decompress(self, compressed: Compressed, out: Gradients | None = None) -> Gradients:
        """Write the averaged gradients Ĝ, and return ``out``, or the new tensors.

        If an average does not fit its dtype, it becomes infinite. If a loss scale is attached, ``compressed.verdict``
        then becomes 0 and the error keeps the whole step, or stays as it was with ``quantize``; do not apply it. Only
        the first call sets the verdict.

        Args:
            compressed: Result of the last ``compress``.
            out: Tensors to write to, of any float dtype, in any of the forms that ``compress`` takes. None creates new
                tensors {name: tensor} with the gradients' dtypes.

        Raises:
            RuntimeError: ``compressed`` belongs to an earlier step.
            TypeError, ValueError: ``out`` does not have the compressor's shapes and device. Nothing was changed.
        """
        self._check_valid(compressed)
        if out is None:
            out = allocate(self._known())
        named = self._writable(out, same_dtype=False)
        contiguous = {name: as_real(tensor) for name, tensor in named.items()}
        if named:
            decides = self._step.loss_scale is not None and not self._written
            with self._residuals.streams.on(compressed.verdict.device):
                compressed.backend.reconstruct(contiguous, compressed.verdict if decides else None)
                self._step.undecided &= self._managed is not None
                self._residuals.whole.settle(self._step)
            self._written = True
        for name, tensor in named.items():
            write_back(contiguous[name], tensor)
        return out

    def leave_error(self, compressed: Compressed, gradients: Gradients) -> Tensor:
        """Replace the compressed gradients by their errors, M − L Rᵀ with this worker's own factors L and R.

        Use it with ``error_feedback=False`` if you keep the error yourself and add the next gradient to it. Call it
        after ``decompress``, which sets the verdict. Tensors that are not compressed become zero. If the step was not
        finite, only non-finite elements become zero, so that all else is sent in the next step.

        Returns:
            The number of non-finite elements, as a scalar on the gradients' device.

        Raises:
            RuntimeError: ``compressed`` belongs to an earlier step.
            TypeError, ValueError: The gradients do not match the compressor's tensors, sums take two levels, so that
                no worker has errors of its own, gradients are quantized, or the compressor keeps errors itself. Nothing
                was changed.
        """
        self._check_valid(compressed)
        if self._managed is not None:
            raise ValueError("leave_error needs steps that are known to be applied, and with manager= they are not yet")
        if self.config.quantize is not None:
            raise ValueError("leave_error needs factors, and quantized gradients have none: set error_feedback=True")
        if self.config.error_feedback:
            raise ValueError("leave_error is for errors that you keep yourself: set error_feedback=False")
        bucket, verdict = compressed.backend.bucket, compressed.verdict
        if bucket.shared:
            raise ValueError("leave_error needs errors of each worker, and with node_group a node has them together")
        named = self._writable(gradients)
        contiguous = {name: as_real(tensor) for name, tensor in named.items()}
        for matrices, (P, Q) in zip(bucket.matrices(contiguous), bucket.joined(bucket.product), strict=True):
            subtract_product(matrices, P, Q, verdict)
        dropped = torch.zeros((), dtype=torch.int64, device=verdict.device)
        on_host = verdict.device.type == "cpu"
        for segment in bucket.layout.segments:
            error = contiguous[segment.name]
            # If the sums were finite, so are this worker's gradients. On a device the host would have to wait for that.
            if not (on_host and verdict):
                finite = error.isfinite()
                dropped += error.numel() - finite.sum()
                error.masked_fill_(~finite, 0)
            if not segment.rank:
                error.masked_fill_(verdict > 0, 0)
            write_back(error, named[segment.name])
        return dropped

    def _check_valid(self, compressed: Compressed) -> None:
        if not isinstance(compressed, Compressed):
            raise TypeError(f"expected the result of compress(); got {type(compressed).__name__}")
        if compressed.iteration != self._step.iteration:
            steps = f"step {compressed.iteration}, but the last step was {self._step.iteration}"
            raise RuntimeError(f"factors are valid until the next compress; these belong to {steps}")

    def error(self) -> dict[str, Tensor]:
        """Return copies {name: E} of this worker's errors, with the gradients' shapes and without the loss scale.

        E is what this worker has not sent yet. The result is empty without error feedback.
        """
        kinds = self._known()
        return {name: in_form(error, *kinds[name][:2]) for name, error in super().error().items()}

    def _known(self) -> dict[str, Kind]:
        """Return {name: kind}. Until gradients come, tensors given as shapes are fp32 on the CPU."""
        new = torch.float32, torch.device("cpu")
        return {n: self._kinds.get(n, (torch.Size(s), *new)) for n, s in self._exact.shapes.items()}

    def load_state_dict(
        self, state_dict: StateDict, *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> LoadReport:
        """Continue from a saved state of any world size and rank, and return what was used of it. Collective.

        When a tensor is no longer compressed, its remaining error is added to its next gradient.

        Args:
            state_dict: Result of ``state_dict``, or the path of a file that ``checkpoint.save`` has written. A file
                that one worker cannot read is an error on all workers.
            strict: Refuse a state that has other matrices or lacks some. Otherwise load what fits.
            rename: {name in the state: name here}.

        Raises:
            ValueError: A worker's state belongs to another model, or has another format. Nothing was changed.
            DisagreementError: Workers load different states, or do not all load one. Nothing was changed.
        """
        return self._loading(state_dict, strict=strict, rename=rename)()

    def _writable(self, gradients: Gradients, *, same_dtype: bool = True) -> dict[str, Tensor]:
        """Return gradients by name, detached. Check that they are known and can be written."""
        found = by_name(gradients, self._exact, self._kinds, same_dtype=same_dtype)
        named = {name: tensor.detach() for name, tensor in found.items()}
        for name, tensor in named.items():
            check_writable(name, tensor)
        return named
