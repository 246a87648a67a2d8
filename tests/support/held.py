"""What an engine holds and owes, exactly, without anything being written down for it; and what it should, in fp64."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from powersgd_triton.core.engine import Engine
from powersgd_triton.layout.layout import Segment
from powersgd_triton.ops.bucket import Bucket
from tests.support.lockstep import BucketRun

TINY = 2.0**-126
"""What an operation on fp32 numbers may lose where they are denormal."""


def owed(engine: Engine, segment: Segment) -> tuple[Tensor, Tensor]:
    """(E, size) in fp64, exactly as the engine holds it, without writing anything down.

    Size is the sum of absolute values of what E is the sum of: the buffer and the product still to be subtracted.
    """
    matrix = engine.residuals.matrices.get(segment.name)
    if matrix is None:
        restored = engine.residuals.loaded.matrices.get(segment.name, {}).get("error")
        E = torch.zeros(segment.rows, segment.m, dtype=torch.float64) if restored is None else restored.double().clone()
        return E, E.abs()
    E, bucket = torch.zeros(segment.rows, segment.m, dtype=torch.float64), matrix.bucket
    first, behind = matrix.rows[bucket.worker]
    assert (matrix.error is None) == (first == behind)
    if matrix.error is not None:
        E[first:behind] = matrix.error
    size = E.abs()
    if bucket.applied is not None and bucket.applied > 0:
        for left, right in [pair(bucket, *factors, segment) for factors in bucket.product]:
            # Other workers of the node subtract it from their rows.
            E[first:behind] -= (left @ right.mT).flatten(0, 1)[first:behind]
            size[first:behind] += (left.abs() @ right.abs().mT).flatten(0, 1)[first:behind]
    return E, size


def pair(bucket: Bucket, left: Tensor, right: Tensor, segment: Segment) -> tuple[Tensor, Tensor]:
    """Left [batch, n, r] and right factors [batch, m, r] of a tensor, in fp64."""
    for group, L, R in zip(bucket.layout.groups, bucket.left(left), bucket.right(right), strict=True):
        for other, P, Q in zip(group.segments, L.split(group.counts), R.split(group.counts), strict=True):
            if other.name == segment.name:
                return P.double(), Q.double()
    raise AssertionError(segment)


def fits(run: BucketRun) -> bool:
    """Whether every average that was written is finite in its gradient's dtype."""
    return all(bool(tensor.isfinite().all()) for tensor in run.written[0].values())


def gamma(operations: int, dtype: torch.dtype) -> float:
    """Relative error of a sum of that many terms in any order; twice for fp64, in which the model rounds too."""
    u = torch.finfo(dtype).eps / 2
    return (2 if dtype == torch.float64 else 1) * operations * u


def check_memory(engines: Sequence[Engine]) -> None:
    """Nothing that is kept is not finite, also once it is written down."""
    for engine in engines:
        for name, matrix in engine.residuals.matrices.items():
            tensors = [*matrix.bases.values(), *([] if matrix.error is None else [matrix.error])]
            assert all(tensor.isfinite().all() for tensor in tensors), f"{name}: what is remembered is not finite"


def mean_in_range(engines: Sequence[Engine]) -> bool:
    """Whether the sum of the workers' errors is, of which a saved state holds the mean."""
    held = [matrix.error for engine in engines for matrix in engine.residuals.matrices.values()]
    return sum(float(E.double().abs().amax()) for E in held if E is not None) < torch.finfo(torch.float32).max / 4


def check_read(engine: Engine, segments: Sequence[Segment]) -> None:
    """What is said of errors is what is owed."""
    held = {s.name: owed(engine, s) for s in segments if s.name in engine.residuals.matrices}
    for name, E in engine.residuals.error(engine.step).items():
        if name in held:
            exact, size = held[name]
            tolerance = 2 * (torch.finfo(E.dtype).eps + gamma(64, torch.float32)) * size + TINY
            assert E.isfinite().all(), f"{name}: error() is not finite"
            overflowed = size >= torch.finfo(E.dtype).max
            assert ((E.double() - exact).abs() <= tolerance)[~overflowed].all(), f"{name}: error() is not what is owed"


# The method for one matrix and any number of workers, written apart from the product --------------------------------


def follow(
    given: Sequence[Tensor],
    errors: Sequence[Tensor],
    sizes: Sequence[Tensor],
    bases: tuple[Tensor, Tensor],
    turns: Iterable[tuple[bool, bool]],
    choose: Callable[[int, Tensor, Tensor], Tensor],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One step of Vogels et al.'s Algorithm 1, or of the follow-up's alternating one, with eager error feedback.

    Everything depends on the bases by their span only, so a run can be followed with the bases that it chose itself.

    Args:
        given: each worker's G [n, m].
        errors: each worker's E [n, m].
        sizes: what bounds the roundings of E: the sum of absolute values of whatever E is the sum of.
        bases: (left [n, r], right [m, r]) before the step.
        turns: for each repetition, whether M is multiplied by the right basis, and then by the left one.
        choose: returns the basis of a side, 0 for left, given the sum over workers of which it has the span, and the
            size of that.

    Returns:
        Ĝ, what is left of each worker's M, and what bounds the roundings of that.
    """
    left, right = bases
    rests = [G.double() + E for G, E in zip(given, errors, strict=True)]
    sizes = [G.double().abs() + size for G, size in zip(given, sizes, strict=True)]
    average = torch.zeros_like(rests[0])
    for projects, backprojects in turns:
        if projects:
            own, spread = [rest @ right for rest in rests], [size @ right.abs() for size in sizes]
            left = choose(0, total(own), total(spread))
            products, added = [P @ right.T for P in own], [size @ right.abs().T for size in spread]
        if backprojects:
            own, spread = [rest.T @ left for rest in rests], [size.T @ left.abs() for size in sizes]
            right = choose(1, total(own), total(spread))
            products, added = [left @ Q.T for Q in own], [left.abs() @ size.T for size in spread]
        rests = [rest - product for rest, product in zip(rests, products, strict=True)]
        sizes = [size + more for size, more in zip(sizes, added, strict=True)]
        average += total(products) / len(given)
    return average, rests, sizes


def total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)
