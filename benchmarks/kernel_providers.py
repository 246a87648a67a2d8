"""Who does one phase of a step: the recorded launches of the kernels, the reference, or torch.compile of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.buckets import FilledBucket
from benchmarks.launches import Launch, Problem, record_step
from benchmarks.timing import Work
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.orthogonalize import orthogonalize_reference
from powersgd_triton.ops.reference import backproject_reference, compensate_project_reference, reconstruct_reference

REFERENCES: dict[str, Any] = {
    "compensate_project": compensate_project_reference,
    "orthogonalize P": orthogonalize_reference,
    "backproject": backproject_reference,
    "reconstruct": reconstruct_reference,
}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A bucket in the midst of its steps: everything that a phase reads is there.

    Attributes:
        problem: the compression.
        bucket: its memory.
        phases: the launches of each phase; empty for the backend "torch".
    """

    problem: Problem
    bucket: Bucket
    phases: dict[str, list[Launch]]

    @classmethod
    def of(cls, bucket: FilledBucket, rank: int, backend: str, **options: Any) -> "Prepared":
        gradients = {str(index): gradient for index, gradient in enumerate(bucket.gradients())}
        problem = Problem(gradients, rank, backend, **options)
        # The second step is the first with an error and a product to subtract.
        for _ in range(2):
            bucket.refill()
            problem.step(gradients)
        bucket.refill()
        state, phases = record_step(problem, gradients)
        bucket.refill()
        return cls(problem, state, phases)

    def launch(self, phase: str) -> Work:
        """The kernels' launches of a phase, again. In place as they are, they stay finite for thousands of rounds."""
        launches = self.phases[phase]

        def run() -> None:
            for launch in launches:
                launch()

        return run

    def refer(self, phase: str, transform: Callable[[Any], Any] = lambda function: function) -> Work:
        """The same by the reference, whose function goes through ``transform`` before."""
        bucket = self.bucket
        function = transform(REFERENCES[phase])
        gradients = bucket.matrices(self.problem.gradients)
        messages, lefts, owns = bucket.left(bucket.message_P), bucket.left(bucket.P_hat), bucket.right(bucket.Q)
        bases, means = bucket.right(bucket.basis), bucket.right(bucket.message_Q)
        assert bucket.M is not None
        parts = list(zip(bucket.M, bucket.keys, gradients, messages, lefts, owns, bases, means, strict=True))

        def compensate_project() -> None:
            for M, _, G, P, P_hat, Q, basis, _ in parts:
                function(G, M, None if bucket.applied is None else (P_hat, Q, bucket.applied), basis, out=P)

        def orthogonalize() -> None:
            for _, keys, _, P, P_hat, *_ in parts:
                function(P, keys=keys, step=1, out=P_hat)

        def backproject() -> None:
            for M, _, _, _, P_hat, Q, *_ in parts:
                function(M, P_hat, out=Q)

        def reconstruct() -> None:
            for _, _, G, _, P_hat, _, _, Q_mean in parts:
                function(P_hat, Q_mean, out=G)

        return {
            "compensate_project": compensate_project,
            "orthogonalize P": orthogonalize,
            "backproject": backproject,
            "reconstruct": reconstruct,
        }[phase]


def compile_for(device: torch.device) -> Callable[[Any], Any]:
    """torch.compile; on the CPU, for dry runs, without generating code."""
    backend = "inductor" if device.type == "cuda" else "eager"
    return lambda function: torch.compile(function, backend=backend, dynamic=False)


# Orthogonalization of a batch of factors ---------------------------------------------------------------------------

Orthogonalize = Callable[[], Tensor]


def _kernels(A: Tensor) -> Orthogonalize:
    count, rows, rank = A.shape
    bucket = FilledBucket([(rows, 2 * rank)] * count, A.device)
    prepared = Prepared.of(bucket, rank, "triton", min_compression_rate=0)
    (P,) = prepared.bucket.left(prepared.bucket.message_P)
    (P_hat,) = prepared.bucket.left(prepared.bucket.P_hat)
    P.copy_(A)
    run = prepared.launch("orthogonalize P")

    def orthogonalize() -> Tensor:
        run()
        return P_hat

    return orthogonalize


def _reference(A: Tensor) -> Orthogonalize:
    out, keys = torch.empty_like(A), torch.arange(len(A), device=A.device)

    def orthogonalize() -> Tensor:
        orthogonalize_reference(A, keys=keys, step=0, out=out)
        return out

    return orthogonalize


def _qr(A: Tensor) -> Orthogonalize:
    return lambda: torch.linalg.qr(A).Q


def _geqrf(A: Tensor) -> Orthogonalize:
    return lambda: torch.linalg.householder_product(*torch.geqrf(A))


ORTHOGONALIZATIONS: dict[str, Callable[[Tensor], Orthogonalize]] = {
    "triton": _kernels,
    "reference": _reference,
    "torch.linalg.qr": _qr,
    "geqrf + orgqr": _geqrf,
}
