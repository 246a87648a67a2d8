"""The stages of a step in Triton kernels: at most twelve launches up to rank 32, for any number of matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from powersgd_triton.kernels.backproject import backproject_triton
from powersgd_triton.kernels.commit import commit_triton
from powersgd_triton.kernels.compensate_project import compensate_project_triton
from powersgd_triton.kernels.configurations import architecture, select_configuration
from powersgd_triton.kernels.orthogonalize import orthogonalize_triton
from powersgd_triton.kernels.pack import pack_first_triton, pack_second_triton
from powersgd_triton.kernels.reconstruct import reconstruct_triton
from powersgd_triton.kernels.table import BucketTable, FactorTable, Matrix, Pointers
from powersgd_triton.ops.bucket import BucketState
from powersgd_triton.ops.operations import Step
from powersgd_triton.ops.torch_backend import TorchOperations


class Workspace:
    """Memory that a stage uses and leaves behind; one for all buckets of a model, since stages never overlap."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.device], Tensor] = {}

    def get(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """At least ``numel`` elements; the same ones for the same name."""
        memory = self._memory.get((name, device))
        if memory is None or memory.numel() < numel:
            memory = self._memory[name, device] = torch.empty(numel, dtype=dtype, device=device)
        return memory


class TritonOperations:
    """The standard algorithm on one bucket. What is rare is left to the reference: the same memory, the same result."""

    def __init__(self, bucket: BucketState, workspace: Workspace) -> None:
        layout, device = bucket.layout, bucket.message_P.device
        self._bucket, self._workspace, self._device = bucket, workspace, device
        self._reference = TorchOperations(bucket)
        matrices = [
            Matrix(group.n, group.m, group.rank, group.p_offset + i * group.n * group.rank,
                   group.q_offset + i * group.m * group.rank, key)
            for group, tensors in zip(layout.groups, bucket.groups, strict=True)
            for i, key in enumerate(tensors.keys.tolist())
        ]  # fmt: skip
        launches = self._launches = select_configuration(architecture(device), max((x.r for x in matrices), default=1))
        self._table = BucketTable(
            matrices, [segment.numel for segment in layout.bypass], layout.p_numel, layout.q_numel,
            launches.compensate_project.tile, launches.backproject.tile, device,
        )  # fmt: skip
        self._names = [segment.name for group in layout.groups for segment in group.segments]
        self._names += [segment.name for segment in layout.bypass]
        self._finite = torch.ones((), dtype=torch.int32, device=device)
        self._never = torch.zeros((), device=device)

    def exchange(self, gradients: Mapping[str, Tensor], step: Step, verdict: Tensor) -> Iterator[Tensor]:
        bucket, table = self._bucket, self._table
        G = self._pointers(gradients)
        self._compensate_project(G, bucket.message_P)
        yield bucket.message_P
        self._orthogonalize(table.P, bucket.message_P, step, out=bucket.P_hat)
        parts = self._get("parts", table.q_parts_numel)
        backproject_triton(table, self._errors() or G, bucket.P_hat, self._launches.backproject, out=parts)
        means_triton(table, bucket.message_P, table.bypass_P, step.workers, self._finite)
        pack_triton(table, table.pack_Q, parts, None, self._finite, own=bucket.Q, message=bucket.message_Q)
        yield bucket.message_Q
        following = self._get("following", bucket.layout.q_numel)
        # Also without warm start: it is what finds values that are not finite.
        self._orthogonalize(table.Q, bucket.message_Q, step, out=following)
        commit_triton(
            table, G, self._errors(), following if step.warm_start else None,
            step.workers, self._finite, basis=bucket.basis, message=bucket.message_Q, verdict=verdict,
        )  # fmt: skip
        self._finish([(bucket.P_hat, bucket.Q)], [(bucket.P_hat, bucket.message_Q)], verdict)

    def reconstruct(self, out: Mapping[str, Tensor]) -> None:
        bucket = self._bucket
        dtypes = {tensor.dtype for tensor in out.values()}
        if len(dtypes) > 1 or torch.float64 in dtypes:
            self._reference.reconstruct(out)
            return
        reconstruct_triton(
            self._table, bucket.P_hat, bucket.message_Q, bucket.message_P, self._launches.reconstruct,
            out=self._pointers(out),
        )  # fmt: skip

    def subtract_product(self) -> None:
        self._reference.subtract_product()

    def redraw_bases(self, step: Step) -> None:
        # Of columns that carry nothing every one is replaced by a random direction.
        self._bucket.basis.zero_()
        self.orthogonalize_bases(step)

    def orthogonalize_bases(self, step: Step) -> None:
        self._orthogonalize(self._table.Q, self._bucket.basis, step, out=self._bucket.basis)

    def _orthogonalize(self, factors: FactorTable, A: Tensor, step: Step, *, out: Tensor) -> None:
        launch, rank = self._launches.orthogonalize, self._table.rank
        panels, places = -(-rank // launch.panel), max(len(factors.chunks), len(factors.records))
        numel = (panels + 2) * places * launch.panel**2
        orthogonalize_triton(
            factors, A, rank, step.iteration, step.epsilon, self._launches.gram, launch,
            X=self._get("X", A.numel() if panels > 1 else 1, torch.float64),
            grams=self._get("grams", numel, torch.float64)[:numel].view(panels + 2, places, launch.panel**2),
            finite=self._finite, out=out,
        )  # fmt: skip

    def _errors(self) -> Pointers | None:
        """The error buffers; None without error feedback."""
        errors: list[Tensor] = []
        for group in self._bucket.groups:
            if group.M is None:
                return None
            errors += group.M
        return self._table.pointers(errors, bypass=False) if errors else None

    def _pointers(self, tensors: Mapping[str, Tensor]) -> Pointers:
        return self._table.pointers([tensors[name] for name in self._names])

    def _get(self, name: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._workspace.get(name, numel, dtype, self._device)
