"""The orthonormal basis from the kernels, on every kind of input, and the two kernels beneath it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import gram, panels
from powersgd_triton.kernels.columns import ProgressRow
from powersgd_triton.kernels.gram import gram_triton
from powersgd_triton.kernels.orthogonalize import _orthogonalize_kernel, grams_numel, orthogonalize_triton
from powersgd_triton.kernels.random_device import WINDOW
from powersgd_triton.ops.orthogonalize import orthogonalize_reference, random_directions
from tests.support.bounds import assert_within
from tests.support.kernel_cases import GRADIENTS, INF, NAN, RANKS, RANKS_TO_64, Bucket, Memory
from tests.support.kernel_checks import compensate_project
from tests.support.orthonormal import (
    ORTHONORMAL,
    assert_basis_of,
    combined,
    conditioned,
    departure,
    hard_inputs,
    nearly_parallel,
)
from tests.support.thinned import thinned

U, U64 = 2.0**-24, 2.0**-53


@dataclasses.dataclass
class Result:
    """Bases in the inputs' order, whether the input was found finite, and how many columns were set to zero."""

    P: list[Tensor]
    finite: int
    zeroed: int


def factors_of(matrices: Sequence[Tensor], device: torch.device, keys: Sequence[int] = ()) -> Bucket:
    """A bucket whose first message holds these factors [n, r]; keys are 1, 2, 3 ... where none are given."""
    bucket = Bucket([(*A.shape, A.shape[1]) for A in matrices], device, bypass=[4])
    bucket.first.fill([*matrices, torch.zeros(4)])
    for index, key in enumerate(keys):
        bucket.table.P.records[index, 3] = key
    return bucket


def orthogonalize(
    matrices: Sequence[Tensor],
    device: torch.device,
    *,
    step: int = 0,
    epsilon: float = 0.0,
    keys: Sequence[int] = (),
    in_place: bool = False,
) -> Result:
    """Bases of matrices [n, r] in one bucket."""
    bucket = factors_of(matrices, device, keys)
    factors, panel = bucket.table.P, bucket.launches.orthogonalize.panel
    grams = Memory([grams_numel(factors, bucket.rank, panel)], torch.float64, device)
    # Within one panel no workspace of the factors' size is needed.
    X = bucket.rows(torch.float64) if bucket.rank > panel else Memory([1], torch.float64, device)
    out = bucket.first if in_place else bucket.rows()
    number = torch.tensor(step, device=device)
    orthogonalize_triton(
        factors, bucket.first.flat, bucket.rank, number, epsilon, bucket.launches.gram, bucket.launches.orthogonalize,
        X=X.flat, grams=grams.flat, finite=bucket.finite, out=out.flat,
    )  # fmt: skip
    assert all(memory.guarded() for memory in (bucket.first, X, grams, out))
    assert not factors.progress[:, ProgressRow._fields.index("arrived") :].any(), "a counter is not 0 again"
    assert in_place or out.views[-1].isnan().all()
    return Result([P.float() for P in bucket.row_factors(out)], int(bucket.finite), int(factors.zeroed.sum()))


def check(matrices: Sequence[Tensor], device: torch.device, **options: Any) -> list[Tensor]:
    result = orthogonalize(matrices, device, **options)
    assert (result.finite, result.zeroed) == (1, 0)
    for A, P in zip(matrices, result.P, strict=True):
        assert_basis_of(P[None], A[None])
    return result.P


def by_reference(A: Tensor, key: int, step: int = 0, epsilon: float = 0.0) -> Tensor:
    out = torch.full_like(A[None], NAN)
    orthogonalize_reference(A[None], keys=torch.tensor([key]), step=step, epsilon=epsilon, out=out)
    return out[0]


def assert_agrees(P: Tensor, expected: Tensor, condition: float) -> None:
    """Both are rounded to fp32 from fp64 bases, which differ by what fp64 rounding does to n r products, times κ."""
    n, r = P.shape
    bound = 2 * U * expected.double().abs() + condition * 2 * n * r * U64
    assert_within(P, expected.double(), bound)


def random(n: int, r: int, seed: int = 0) -> Tensor:
    return torch.randn(n, r, generator=torch.Generator().manual_seed(seed))


# Regular input ------------------------------------------------------------------------------------------------------


@thinned("rank, kappa", RANKS, (1.0, 1e6, 1e7), together=1)
def test_orthonormal_at_every_rank_and_condition(rank: int, kappa: float, device: torch.device):
    # 300 rows are two chunks, whose sums are added.
    heights = {1.0: [rank + 1], 1e6: [300] if rank > 32 else [rank, 300], 1e7: [rank]}[kappa]
    matrices = [conditioned(n, rank, kappa, seed=n)[0].float() for n in heights]
    for key, (A, P) in enumerate(zip(matrices, check(matrices, device), strict=True), start=1):
        # Where κ is 1e7 the two may disagree about what is dead.
        if kappa <= 1e6:
            assert_agrees(P, by_reference(A, key), kappa)


@pytest.mark.parametrize("rank", [1, 5, 40])
def test_many_chunks(rank: int, device: torch.device):
    heights = [600] if rank > 32 else [257, 3001 // rank]
    matrices = [random(n, rank) for n in heights]
    for key, (A, P) in enumerate(zip(matrices, check(matrices, device), strict=True), start=1):
        assert_agrees(P, by_reference(A, key), float(torch.linalg.cond(A.double())))


def test_different_ranks_in_one_bucket(device: torch.device):
    matrices = [random(60, 40), random(3, 1), random(1, 1), random(50, 17), random(300, 33), random(8, 8)]
    for key, (A, P) in enumerate(zip(matrices, check(matrices, device), strict=True), start=1):
        assert_agrees(P, by_reference(A, key), float(torch.linalg.cond(A.double())))


@thinned("rank, gradient", (1, 4, 17, 40), GRADIENTS, together=1)
def test_gradients_of_16_bits_give_as_good_factors(rank: int, gradient: torch.dtype, device: torch.device):
    bucket = Bucket([(rank + 9, rank + 5, rank)], device, gradient=gradient)
    P = bucket.row_factors(compensate_project(bucket, applied=1.0))[0].float()
    check([P], device)


@pytest.mark.parametrize("rank", [3, 33])
def test_same_input_same_bits_also_in_place_and_beside_others(rank: int, device: torch.device):
    A, zero = random(260, rank), torch.zeros(5, 5)
    A[:, rank // 2] = 0
    first = orthogonalize([A, zero], device).P
    again = orthogonalize([A, zero], device, in_place=True).P
    assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))
    assert torch.equal(orthogonalize([A], device).P[0], first[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("rank", [4, 32, 64])
def test_the_last_program_sees_what_all_others_wrote(rank: int):
    """Programs run in another order each time. What one of them does not see yet would change bits."""
    device = torch.device("cuda", torch.cuda.current_device())
    matrices = [random(n, rank, seed=n).to(device) for n in (64, 768, 2304, 3072, 50257)]
    first = orthogonalize(matrices, device).P
    for _ in range(200):
        again = orthogonalize(matrices, device).P
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


# Dead columns -------------------------------------------------------------------------------------------------------


SLOW_RANKS = [pytest.param(rank, marks=pytest.mark.slow) for rank in (2, 8, 32, 40, 64)]


@pytest.mark.parametrize("rank", [1, 3, 4, 17, 33, *SLOW_RANKS])
def test_hard_inputs(rank: int, device: torch.device):
    """In one bucket; also from one panel of columns to the next."""
    inputs = hard_inputs(rank, heights=(rank + 9,))
    if rank > 16:
        # Each takes long in the interpreter.
        inputs = dict(list(inputs.items())[:: rank // 8])
    elif rank in (4, 8):
        # The directions that replace what dies in the second pass have fewer rows than these.
        tall = hard_inputs(rank, heights=(int(WINDOW.value) + 188,))
        inputs |= {name: A for name, A in tall.items() if name.startswith("a product")}
    for name, A, P in zip(inputs, inputs.values(), check(list(inputs.values()), device), strict=True):
        assert_basis_of(P[None], A[None], name)


@pytest.mark.parametrize("share", [1.6e-3, 6e-4])
def test_what_one_pass_leaves_does_not_grow_in_further_panels(share: float, device: torch.device):
    """The last column of the first panel is weak, and the next panel lies almost in its direction."""
    W = torch.linalg.qr(torch.randn(48, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(10)))[0]
    A = W.clone()
    A[:, 31] = W[:, 0] + 1.8e-4 * W[:, 31]
    direction = torch.linalg.qr(A[:, :32].float().double())[0][:, 31]
    A[:, 32] = 1.8e-4 * (direction + share * W[:, 32])
    check([A.float()], device)


@pytest.mark.parametrize("rank", [2, 40])
def test_columns_before_a_dead_one_keep_their_bits(rank: int, device: torch.device):
    A = random(50, rank)
    dead = A.clone()
    dead[:, -1] = dead[:, 0]
    one, other = (orthogonalize([x], device).P[0] for x in (A, dead))
    assert torch.equal(one[:, :-1], other[:, :-1])


@pytest.mark.parametrize("epsilon", [0.0, 1e-4, 1e-2])
def test_epsilon_decides_what_is_dead(epsilon: float, device: torch.device):
    A = torch.zeros(10, 2)
    A[0, 0], A[0, 1], A[1, 1] = 1.0, 1.0, 1e-3
    P = orthogonalize([A], device, epsilon=epsilon).P[0]
    assert departure(P[None]) <= ORTHONORMAL
    # The second direction is e_1 only where a share of 1e-3 is enough to be alive.
    assert (abs(float(P[1, 1])) > 0.99) == (epsilon < 1e-3)
    assert_agrees(P, by_reference(A, 1, epsilon=epsilon), 1e3)


def test_real_directions_that_look_like_rounding_errors_are_kept(device: torch.device):
    """Little is left of a column after one that is nearly parallel, but it is no rounding error."""
    matrices = [*nearly_parallel(8), *combined(32)]
    check(matrices, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiled kernel's number of passes is fixed")
@pytest.mark.parametrize("rank", [8, 40])
def test_what_the_last_pass_finds_dead_is_zero_and_counted(rank: int, device: torch.device):
    """Columns that depend on a weak direction die in the second pass, which is made the last one."""
    weak = random(60, 2, rank) * torch.tensor([1, 1e-3]) @ random(2, rank, 9)
    with mock.patch.object(panels, "PASSES", tl.constexpr(2)), mock.patch.object(gram, "PASSES", tl.constexpr(2)):
        result = orthogonalize([weak, random(60, rank)], device)
    P, healthy = result.P
    zero = (P == 0).all(dim=0)
    assert 0 < int(zero.sum()) == result.zeroed
    assert departure(P[None, :, ~zero]) <= ORTHONORMAL
    assert_basis_of(healthy[None], random(60, rank)[None])


# Random directions --------------------------------------------------------------------------------------------------


def first_pass(matrices: Sequence[Tensor], device: torch.device, step: int, keys: Sequence[int]) -> list[Tensor]:
    """What the first pass puts in the place of zero matrices, before it is made orthogonal."""
    bucket = factors_of(matrices, device, keys)
    launch, factors, out = bucket.launches.orthogonalize, bucket.table.P, bucket.rows()
    A, number, progress = bucket.first.flat, torch.tensor(step, device=device), factors.progress
    work = torch.zeros(grams_numel(factors, bucket.rank, launch.panel), dtype=torch.float64, device=device)
    parts, squares = work[: len(factors.chunks) * launch.panel**2], work[len(factors.chunks) * launch.panel**2 :]
    gram_triton(
        factors, A, number, 0.0, 0, 0, 1, bucket.launches.gram, X=A, parts=parts, squares=squares, finite=bucket.finite
    )
    _orthogonalize_kernel[(len(factors.chunks), 1)](
        A, A, out.flat, squares, progress, factors.records, factors.chunks, number, 0, 1,
        **launch.of_factors,
    )  # fmt: skip
    assert out.guarded()
    return bucket.row_factors(out)[: len(matrices)]


@pytest.mark.parametrize(("rank", "step"), [(1, 0), (3, 1), (3, 10**6), (16, 3), (17, 2**40 + 3), (32, 7)])
def test_random_directions_are_the_reference_s_bit_for_bit(rank: int, step: int, device: torch.device):
    keys = [0, 2**31 + 5, 2**32 - 1]
    results = first_pass([torch.zeros(n, rank) for n in (rank, 41, 257)], device, step, keys)
    for key, X in zip(keys, results, strict=True):
        assert torch.equal(X, random_directions(torch.tensor([key]), step, *X.shape)[0].double())


@pytest.mark.parametrize("rank", RANKS_TO_64)
def test_basis_of_a_zero_matrix_is_the_reference_s(rank: int, device: torch.device):
    P = check([torch.zeros(rank + 4, rank)], device, step=3, keys=[77])[0]
    condition = float(torch.linalg.cond(random_directions(torch.tensor([77]), 3, rank + 4, rank)[0].double()))
    assert_agrees(P, by_reference(torch.zeros(rank + 4, rank), 77, step=3), condition)


def test_replacement_depends_on_key_and_step_only(device: torch.device):
    zero = torch.zeros(30, 2)
    one, twin, other = orthogonalize([zero, zero, zero], device, step=3, keys=[5, 5, 6]).P
    assert torch.equal(one, twin)
    assert not torch.equal(one, other)
    assert torch.equal(one, orthogonalize([zero], device, step=3, keys=[5]).P[0])
    assert not torch.equal(one, orthogonalize([zero], device, step=4, keys=[5]).P[0])


# Input that is not finite -------------------------------------------------------------------------------------------


@functools.lru_cache
def undisturbed(n: int, rank: int, device: torch.device) -> Tensor:
    return orthogonalize([random(n, rank)], device).P[0]


NON_FINITE = [("element", NAN), ("element", INF), ("element", -INF), ("row", -INF), ("column", INF), ("all", NAN)]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(
    ("n", "rank", "where", "value"),
    [
        *((n, rank, *case) for n, rank in ((1, 1), (5, 3)) for case in NON_FINITE),
        # Of several chunks, and of several panels.
        *((280, 4, *case) for case in (("element", NAN), ("column", INF))),
        (36, 33, "element", NAN),
        pytest.param(36, 33, "column", INF, marks=pytest.mark.slow),
    ],
)
def test_non_finite_input_gives_finite_output(n: int, rank: int, value: float, where: str, device: torch.device):
    A, B = random(n, rank), random(n + 1, rank)
    index: Any = {"element": (n - 1, rank - 1), "row": (n // 2,), "column": (slice(None), rank // 2), "all": ()}[where]
    A[index] = value
    result = orthogonalize([B, A], device)
    assert result.finite == 0
    assert result.P[1].isfinite().all()
    # The matrix beside it is none the worse.
    assert torch.equal(result.P[0], undisturbed(n + 1, rank, device))
