"""The orthonormal basis from the kernels, on every kind of input, and the two kernels beneath it."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import gram
from powersgd_triton.kernels.orthogonalize import grams_numel, orthogonalize_triton
from powersgd_triton.kernels.random_device import WINDOW
from powersgd_triton.kernels.table_device import ProgressRow
from powersgd_triton.ops.orthogonalize import orthogonalize_reference, random_directions
from tests.support.device import INTERPRETED
from tests.support.kernel_cases import INF, NAN, RANKS, Bucket, Memory, assert_within
from tests.support.orthonormal import (
    ORTHONORMAL,
    assert_basis_of,
    conditioned,
    departure,
    hard_inputs,
    nearly_dependent,
)
from tests.support.thinned import slow, thinned

U, U64 = 2.0**-24, 2.0**-53
# 40 ends within a second panel of columns.
QUICK = [1, 4, 17, 40]


class Result(NamedTuple):
    """Bases in the inputs' order, whether the input was found finite, and how many columns were set to zero."""

    P: list[Tensor]
    finite: int
    zeroed: int


def orthogonalize(
    matrices: Sequence[Tensor],
    device: torch.device,
    *,
    step: int = 0,
    epsilon: float = 0.0,
    keys: Sequence[int] = (),
    in_place: bool = False,
) -> Result:
    """Bases of matrices [n, r] in one bucket; keys are 1, 2, 3 ... where none are given."""
    bucket = Bucket([(*A.shape, A.shape[1]) for A in matrices], device, bypass=[4])
    bucket.first.fill([*matrices, torch.zeros(4)])
    for index, key in enumerate(keys):
        bucket.table.P.records[index, 3] = key
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


@thinned("rank, kappa", RANKS, (1.0, 1e6, 1e7), together=1)
def test_orthonormal_at_every_rank_and_condition(rank: int, kappa: float, device: torch.device):
    # 300 rows are two chunks, whose sums are added.
    heights = {1.0: [rank + 1], 1e6: [rank, 300] if rank <= 32 else [300 if rank == 40 else rank], 1e7: [rank]}[kappa]
    # Where κ is 1e7 the two may disagree about what is dead.
    check_agreement([conditioned(n, rank, kappa, seed=n)[0].float() for n in heights], device, kappa <= 1e6)


def check_agreement(matrices: Sequence[Tensor], device: torch.device, agree: bool = True) -> None:
    for key, (A, P) in enumerate(zip(matrices, check(matrices, device), strict=True), start=1):
        if agree:
            assert_agrees(P, by_reference(A, key), float(torch.linalg.cond(A.double())))


def test_many_chunks_and_different_ranks_in_one_bucket(device: torch.device):
    check_agreement([random(1100, 1), random(600, 5)], device)
    matrices = [random(60, 40), random(3, 1), random(1, 1), random(50, 17), random(300, 33), random(8, 8)]
    check_agreement(matrices, device)
    check([*nearly_dependent(4, 8)], device)


@pytest.mark.parametrize("rank", [3, *slow([33, 128])])
def test_same_input_same_bits_also_in_place_and_beside_others(rank: int, device: torch.device):
    A, zero = random(260, rank), torch.zeros(5, 5)
    A[:, rank // 2] = 0
    first = orthogonalize([A, zero], device).P
    again = orthogonalize([A, zero], device, in_place=True).P
    assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))
    assert torch.equal(orthogonalize([A], device).P[0], first[0])
    # Of columns before a dead one the bits stay.
    alive = torch.where(A == 0, random(260, rank), A)
    assert torch.equal(orthogonalize([alive], device).P[0][:, : rank // 2], first[0][:, : rank // 2])


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


@pytest.mark.parametrize("rank", [1, 4, *slow([2, 3, 8, 17, 32, 33, 40, 64])])
def test_hard_inputs(rank: int, device: torch.device):
    """In one bucket; also from one panel of columns to the next."""
    inputs = hard_inputs(rank, heights=(rank + 9,))
    if rank > 16:
        # Each takes long in the interpreter.
        inputs = dict(list(inputs.items())[:: rank // 8])
    elif rank in (4, 8):
        # The directions that replace what dies in the second pass have fewer rows than these.
        tall = hard_inputs(rank, heights=(int(WINDOW.value) + 188,))
        inputs |= {name: A for name, A in tall.items() if re.match("a product .* to 1.0", name)}
    check(list(inputs.values()), device)


@pytest.mark.parametrize("share", [1.6e-3, 6e-4])
def test_what_one_pass_leaves_does_not_grow_in_further_panels(share: float, device: torch.device):
    """The last column of the first panel is weak, and the next panel lies almost in its direction."""
    W = torch.linalg.qr(torch.randn(48, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(10)))[0]
    A = W.clone()
    A[:, 31] = W[:, 0] + 1.8e-4 * W[:, 31]
    direction = torch.linalg.qr(A[:, :32].float().double())[0][:, 31]
    A[:, 32] = 1.8e-4 * (direction + share * W[:, 32])
    check([A.float()], device)


@pytest.mark.parametrize("epsilon", [0.0, 1e-4, 1e-2])
def test_epsilon_decides_what_is_dead(epsilon: float, device: torch.device):
    A = torch.zeros(10, 2)
    A[0, 0], A[0, 1], A[1, 1] = 1.0, 1.0, 1e-3
    P = orthogonalize([A], device, epsilon=epsilon).P[0]
    assert departure(P[None]) <= ORTHONORMAL
    # The second direction is e_1 only where a share of 1e-3 is enough to be alive.
    assert (abs(float(P[1, 1])) > 0.99) == (epsilon < 1e-3)
    assert_agrees(P, by_reference(A, 1, epsilon=epsilon), 1e3)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel's number of passes is fixed")
@pytest.mark.parametrize("rank", [8, 40])
def test_what_the_last_pass_finds_dead_is_zero_and_counted(rank: int, device: torch.device):
    """Columns that depend on a weak direction die in the second pass, which is made the last one."""
    weak = random(60, 2, rank) * torch.tensor([1, 1e-3]) @ random(2, rank, 9)
    with mock.patch.object(gram, "PASSES", tl.constexpr(2)):
        result = orthogonalize([weak, random(60, rank)], device)
    P, healthy = result.P
    zero = (P == 0).all(dim=0)
    assert 0 < int(zero.sum()) == result.zeroed
    assert departure(P[None, :, ~zero]) <= ORTHONORMAL
    assert_basis_of(healthy[None], random(60, rank)[None])


@pytest.mark.parametrize("rank", [*QUICK, *slow([2, 3, 8, 16, 32, 64, 128])])
def test_basis_of_a_zero_matrix_is_the_reference_s(rank: int, device: torch.device):
    zero, keys, step = torch.zeros(rank + 4, rank), [77, 0, 2**32 - 1] if rank <= 17 else [77], 2**40 + 3
    for key, P in zip(keys, check([zero] * len(keys), device, step=step, keys=keys), strict=True):
        condition = float(torch.linalg.cond(random_directions(torch.tensor([key]), step, *zero.shape)[0].double()))
        assert_agrees(P, by_reference(zero, key, step=step), condition)


NON_FINITE = [("element", NAN), ("row", -INF), ("column", INF), ("all", NAN)]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(
    ("n", "rank", "where", "value"),
    # The last ones are of several chunks, and of several panels.
    [*((5, 3, *case) for case in NON_FINITE), (280, 4, "column", INF), (36, 33, "element", NAN)],
)
def test_non_finite_input_gives_finite_output(n: int, rank: int, value: float, where: str, device: torch.device):
    A, B = random(n, rank), random(n + 1, rank)
    index: Any = {"element": (n - 1, rank - 1), "row": (n // 2,), "column": (slice(None), rank // 2), "all": ()}[where]
    A[index] = value
    result = orthogonalize([B, A], device)
    assert result.finite == 0
    assert result.P[1].isfinite().all()
    # The matrix beside it is none the worse.
    assert_basis_of(result.P[0][None], B[None])
    assert_agrees(result.P[0], by_reference(B, 1), float(torch.linalg.cond(B.double())))
