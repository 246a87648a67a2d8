"""Each kernel on a GPU by itself, beside the reference and what torch.compile makes of it; and orthogonalization."""

import functools
from typing import Any

import pytest
import torch

from benchmarks.cases import DTYPES, FACTORS, Case
from benchmarks.difference_providers import PreparedDifferences
from benchmarks.kernel_providers import ORTHOGONALIZATIONS, Prepared, compile_for
from benchmarks.launches import bytes_of
from benchmarks.measuring import fits, record
from benchmarks.results_file import Results
from benchmarks.shapes import GRADIENT_SETS
from benchmarks.timing import Clock, Work
from benchmarks.wire_providers import PreparedWire

pytestmark = pytest.mark.gpu

ORTHONORMAL = 1e-5
"""The goal for the kernels, for any input; on random factors every provider is well below it."""


def test_orthogonalize(
    benchmark: Any, orthogonalize_case: Case, clock: Clock, results: Results, pytestconfig: pytest.Config
) -> None:
    case = orthogonalize_case
    with fits():
        generator = torch.Generator(clock.device).manual_seed(0)
        shape = (*FACTORS[pytestconfig.getoption("--dry")], case.rank)
        A = torch.randn(shape, generator=generator, device=clock.device)
        orthogonalize = ORTHOGONALIZATIONS[case.provider](A)
        basis = orthogonalize().double()
        identity = torch.eye(case.rank, dtype=torch.float64, device=clock.device)
        skew = float((basis.mT @ basis - identity).abs().max())
        assert skew <= ORTHONORMAL
        record(
            *(benchmark, clock, results, "orthogonalize", case, orthogonalize),
            capture=case.provider == "triton",
            bytes=2 * A.nbytes,
            skew=skew,
        )


def test_kernel(benchmark: Any, kernel_case: Case, clock: Clock, results: Results) -> None:
    case = kernel_case
    with fits():
        prepared = _prepared(case.gradients, case.rank, case.dtype, case.provider == "triton", clock.device)
        if case.provider == "triton":
            if case.phase not in prepared.phases:
                pytest.skip("this step does not launch it")
            launches: int | None = len(prepared.phases[case.phase])
            work = prepared.launch(case.phase)
        elif case.provider == "reference":
            launches, work = None, prepared.refer(case.phase)
        else:
            launches, work = None, _compiled(prepared, case.phase, clock.device)
        gradients = case.bucket(clock.device).buffer()
        record(
            *(benchmark, clock, results, "kernel", case, work),
            capture=case.provider == "triton",
            bytes=bytes_of(case.phase, prepared.problem.layout, gradients.itemsize),
            gradient_bytes=gradients.nbytes,
            launches=launches,
        )


def test_wire(benchmark: Any, wire_case: Case, clock: Clock, results: Results) -> None:
    case = wire_case
    phase, width = case.phase.split()
    with fits():
        prepared = _prepared_wire(case.gradients, case.rank, width, case.provider == "triton", clock.device)
        record(
            *(benchmark, clock, results, "kernel", case, prepared.work(phase)),
            capture=case.provider == "triton",
            bytes=prepared.bytes_of(phase),
            gradient_bytes=prepared.gradient_bytes,
            launches=1 if case.provider == "triton" else None,
        )


def test_differences(benchmark: Any, difference_case: Case, clock: Clock, results: Results) -> None:
    case = difference_case
    phase, width = case.phase.split()
    with fits():
        prepared = _prepared_differences(case.gradients, width, case.dtype, clock.device)
        record(
            *(benchmark, clock, results, "kernel", case, prepared.work(phase, case.provider)),
            capture=case.provider != "reference",
            bytes=prepared.bytes_of(phase),
            gradient_bytes=prepared.parameter_bytes,
            launches=1 if case.provider == "triton" else None,
        )


@functools.lru_cache(maxsize=1)
def _prepared_differences(gradients: str, width: str, dtype: str, device: torch.device) -> PreparedDifferences:
    return PreparedDifferences(GRADIENT_SETS[gradients], width, DTYPES[dtype], device)


@functools.lru_cache(maxsize=1)
def _prepared_wire(gradients: str, rank: int, width: str, kernels: bool, device: torch.device) -> PreparedWire:
    return PreparedWire(GRADIENT_SETS[gradients], rank, width, kernels, device)


@functools.lru_cache(maxsize=1)
def _prepared(gradients: str, rank: int, dtype: str, kernels: bool, device: torch.device) -> Prepared:
    bucket = Case(gradients, rank, dtype, "").bucket(device)
    return Prepared.of(bucket, rank, "triton" if kernels else "torch")


def _compiled(prepared: Prepared, phase: str, device: torch.device) -> Work:
    """torch.compile of the reference, compiled."""
    work = prepared.refer(phase, compile_for(device))
    try:
        work()
    except Exception as error:
        pytest.skip(f"torch.compile of the reference fails: {type(error).__name__}: {str(error).splitlines()[0]}")
    return work
