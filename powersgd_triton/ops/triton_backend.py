"""The stages of a step in Triton kernels: at most twelve launches up to rank 32, for any number of matrices.

A message in which factors are narrower than fp32 takes three more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from powersgd_triton.kernels.backproject import backproject_triton
from powersgd_triton.kernels.commit import commit_triton
from powersgd_triton.kernels.compensate_backproject import compensate_backproject_triton
from powersgd_triton.kernels.compensate_project import compensate_project_triton
from powersgd_triton.kernels.configurations import architecture, select_configuration
from powersgd_triton.kernels.orthogonalize import orthogonalize_triton
from powersgd_triton.kernels.pack import average_triton, pack_and_average_triton, pack_triton
from powersgd_triton.kernels.reconstruct import reconstruct_triton
from powersgd_triton.kernels.table import BucketTable, FactorTable, Matrix, Pointers
from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.bucket import BucketState
from powersgd_triton.ops.operations import Message, Step
from powersgd_triton.ops.torch_backend import TorchOperations
from powersgd_triton.ops.triton_wire import TritonWire
from powersgd_triton.ops.wire import Wire


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
            for i, key in enumerate(tensors.seeds)
        ]  # fmt: skip
        launches = self._launches = select_configuration(architecture(device), max((x.r for x in matrices), default=1))
        bypass = zip(
            (segment.numel for segment in layout.bypass),
            layout.bypass_offsets(layout.p_numel),
            layout.bypass_offsets(layout.q_numel),
            strict=True,
        )
        self._table = BucketTable(
            matrices, list(bypass), launches.compensate_project.tile, launches.backproject.tile, device,
            any_rank=bucket.ranks_change,
        )  # fmt: skip
        self._names = [segment.name for group in layout.groups for segment in group.segments]
        self._names += [segment.name for segment in layout.bypass]
        self._finite = torch.ones((), dtype=torch.int32, device=device)
        self._never, self._same = torch.zeros((), device=device), torch.ones((), device=device)

    def exchange(self, gradients: Mapping[str, Tensor], step: Step, verdict: Tensor) -> Iterator[Message]:
        bucket, table = self._bucket, self._table
        G = self._pointers(gradients)
        self._project(G, step, own=None)
        yield Message(bucket.message_P, left=True, own=None)
        self._orthogonalize(table.P, bucket.message_P, step, out=bucket.P_hat)
        parts = self._get("parts", table.q_parts_numel)
        backproject_triton(table, self._errors() or G, bucket.P_hat, self._launches.backproject, out=parts)
        pack_and_average_triton(
            table, parts, bucket.message_P, step.workers, self._finite, own=bucket.Q, message=bucket.message_Q
        )  # fmt: skip
        yield Message(bucket.message_Q, left=False, own=bucket.Q)
        # Also without warm start: this is what finds values that are not finite.
        self._commit(G, table.Q, bucket.message_Q, bucket.basis, step, verdict)
        self._finish((bucket.P_hat, bucket.Q), (bucket.P_hat, bucket.message_Q), verdict)

    def _project(self, G: Pointers, step: Step, *, own: Tensor | None) -> None:
        """M ← G + growth · (M − product), P = M · basis, packed with the bypass tensors."""
        bucket, table = self._bucket, self._table
        parts = self._get("parts", table.p_parts_numel)
        compensate_project_triton(
            table, G, self._errors(), *self._pending(step), bucket.basis, self._launches.compensate_project, out=parts
        )  # fmt: skip
        pack_triton(table.pack_P, parts, G, self._finite, own=own, message=bucket.message_P)
        bucket.bypass_means = bucket.message_P[bucket.layout.p_numel :]
        bucket.applied = None

    def _pending(self, step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(L, R, applied, growth): the product that M still holds, and what M is to be multiplied by."""
        bucket = self._bucket
        growth = self._same if step.growth is None else step.growth
        if bucket.applied is None:
            return bucket.P_hat, bucket.Q, self._never, growth
        return *bucket.product[0], bucket.applied, growth

    def _commit(
        self, G: Pointers, factors: FactorTable, mean: Tensor, basis: Tensor, step: Step, verdict: Tensor
    ) -> None:
        """The sums become means, and their orthonormal basis what the next product starts from."""
        following = self._get("following", mean.numel())
        self._orthogonalize(factors, mean, step, out=following)
        commit_triton(
            self._table, G, self._errors(), following if step.warm_start else None, step.workers, self._finite,
            basis=basis, message=mean, verdict=verdict,
        )  # fmt: skip

    def _finish(self, product: tuple[Tensor, Tensor], average: tuple[Tensor, Tensor], verdict: Tensor) -> None:
        bucket = self._bucket
        bucket.product, bucket.average = [product], [average]
        bucket.applied = verdict if any(group.M is not None for group in bucket.groups) else None

    def reconstruct(self, out: Mapping[str, Tensor], verdict: Tensor) -> None:
        bucket, table = self._bucket, self._table
        dtypes = {tensor.dtype for tensor in out.values()}
        if len(dtypes) > 1 or torch.float64 in dtypes:
            self._reference.reconstruct(out, verdict)
            return
        behind_P = bucket.bypass_means.untyped_storage().data_ptr() == bucket.message_P.untyped_storage().data_ptr()
        reconstruct_triton(
            table,
            *bucket.average[0],
            bucket.message_P if behind_P else bucket.message_Q,
            table.pack_P if behind_P else table.pack_left,
            self._launches.reconstruct,
            out=self._pointers(out),
            verdict=verdict,
        )

    def subtract_product(self) -> None:
        self._reference.subtract_product()

    def redraw_bases(self, step: Step) -> None:
        # Of columns that carry nothing every one is replaced by a random direction.
        for _, basis in self._bases():
            basis.zero_()
        self.orthogonalize_bases(step)

    def orthogonalize_bases(self, step: Step) -> None:
        for factors, basis in self._bases():
            self._orthogonalize(factors, basis, step, out=basis)

    def wire(self, plan: WirePlan) -> Wire:
        assert self._bucket.message_P.dtype == torch.float32, "the kernels are not chosen for fp64 gradients"
        return TritonWire(plan, self._launches.wire, self._device)

    def _bases(self) -> list[tuple[FactorTable, Tensor]]:
        """What steps start from."""
        return [(self._table.Q, self._bucket.basis)]

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


class TritonAlternating(TritonOperations):
    """The alternating algorithm on one bucket: eight launches a step up to rank 32."""

    def exchange(self, gradients: Mapping[str, Tensor], step: Step, verdict: Tensor) -> Iterator[Message]:
        bucket, table = self._bucket, self._table
        G = self._pointers(gradients)
        if step.multiplies_left(0):
            parts = self._get("parts", table.q_parts_numel)
            compensate_backproject_triton(
                table, G, self._errors(), *self._pending(step), bucket.P_hat,
                self._launches.compensate_backproject, self._launches.backproject, out=parts,
            )  # fmt: skip
            pack_triton(table.pack_left, parts, G, self._finite, own=bucket.Q, message=bucket.message_Q)
            bucket.bypass_means = bucket.message_Q[bucket.layout.q_numel :]
            bucket.applied = None
            yield Message(bucket.message_Q, left=False, own=bucket.Q)
            average_triton(table, table.pack_left, bucket.message_Q, step.workers, self._finite)
            mean = bucket.message_Q[: bucket.layout.q_numel]
            self._commit(G, table.Q, mean, bucket.basis, step, verdict)
            self._finish((bucket.P_hat, bucket.Q), (bucket.P_hat, mean), verdict)
        else:
            self._project(G, step, own=bucket.P)
            yield Message(bucket.message_P, left=True, own=bucket.P)
            average_triton(table, table.pack_P, bucket.message_P, step.workers, self._finite)
            mean = bucket.message_P[: bucket.layout.p_numel]
            self._commit(G, table.P, mean, bucket.P_hat, step, verdict)
            self._finish((bucket.P, bucket.basis), (mean, bucket.basis), verdict)

    def _bases(self) -> list[tuple[FactorTable, Tensor]]:
        return [(self._table.P, self._bucket.P_hat), (self._table.Q, self._bucket.basis)]
