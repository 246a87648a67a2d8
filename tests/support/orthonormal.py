"""Whether a basis is orthonormal and spans what it should, and matrices that make that hard."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from powersgd_triton.layout.constants import DEAD_COLUMN

# What the design asks of the basis: max |PᵀP − I|.
ORTHONORMAL = 1e-5


def departure(P: Tensor) -> float:
    """max |PᵀP − I|, NaN where P is not finite."""
    P = P.double()
    return float((P.mT @ P - torch.eye(P.shape[-1], dtype=torch.float64)).abs().max())


def assert_basis_of(P: Tensor, A: Tensor, name: str = "") -> None:
    """P is orthonormal, and its span holds A's columns up to the share that counts as dead.

    A column that is replaced keeps at most DEAD_COLUMN of its norm outside the span; rounding P to its dtype moves
    its columns by u each, hence the span by 2 u √r. Twice DEAD_COLUMN, since what is left is itself rounded.
    """
    assert P.shape == A.shape
    assert P.isfinite().all()
    assert departure(P) <= ORTHONORMAL, name
    r = A.shape[-1]
    X = A.double()
    X = X / X.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    outside = (X - P.double() @ (P.double().mT @ X)).norm(dim=1)
    u = torch.finfo(P.dtype).eps / 2
    assert (outside <= (2 * DEAD_COLUMN + 2 * u * r**0.5) * X.norm(dim=1)).all(), (name, float(outside.max()))


def hard_inputs(r: int, heights: Sequence[int]) -> dict[str, Tensor]:
    """Named matrices [n, r] of each height n."""
    found: dict[str, Tensor] = {}
    info = torch.finfo(torch.float32)
    tiny = info.smallest_normal * info.eps * 1000
    for n in heights:
        generator = torch.Generator().manual_seed(n)

        def random(columns: int = r, n: int = n, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(n, columns, generator=generator)

        def put(name: str, A: Tensor, n: int = n) -> None:
            found[f"{name}, {n} rows"] = A

        put("zero", torch.zeros(n, r))
        zeros, copies, sums = random(), random(), random()
        zeros[:, [0, r // 2]] = 0
        put("zero columns", zeros)
        for factor in (1.0, -3.0, 1e-30, 1e30):
            copies[:, -1] = copies[:, r // 4] * factor
            put(f"a column {factor} times another", copies.clone())
        sums[:, -1] = sums[:, : r - 1].sum(dim=1)
        sums[:, r // 3] = sums[:, 0]
        put("a column that is a sum", sums)
        for values in ([1.0], [1.0, 1e-3], [1.0, 1e-6], [1.0, 1e-2, 1e-5], [1.0] * max(1, r // 2)):
            low = torch.randn(len(values), r, generator=generator)
            put(f"a product of rank {len(values)} to {values[-1]}", random(len(values)) * torch.tensor(values) @ low)
        for kappa in (1.0, 1e2, 1e4, 1e6, 1e7):
            put(f"condition {kappa}", conditioned(n, r, kappa, seed=n)[0].float())
        positive = random().abs().clamp(0.05, 0.95)
        for name, scale in {"1e30": 1e30, "largest": info.max, "denormal": tiny}.items():
            put(f"scale {name}", positive * scale)
        mixed = torch.tensor([info.max, 1.0, tiny, 1e-30]).repeat(r)[:r]
        put("mixed scales", positive * mixed)
        if r >= 3:
            # c = b − a with b = a + 2⁻ᵏ d, in fp32: rounding in the first pass leaves something of c.
            for exponent in range(1, 24, 3):
                A = random()
                A[:, 1] = A[:, 0] + 2.0**-exponent * A[:, 1]
                A[:, 2] = A[:, 1] - A[:, 0]
                put(f"a difference that dies in the second pass, 2^-{exponent}", A)
    return found


def conditioned(n: int, r: int, kappa: float, seed: int) -> Tensor:
    """Two random n × r matrices with singular values from 1 down to 1 / kappa."""
    generator = torch.Generator().manual_seed(seed)
    U = torch.linalg.qr(torch.randn(2, n, r, dtype=torch.float64, generator=generator))[0]
    V = torch.linalg.qr(torch.randn(2, r, r, dtype=torch.float64, generator=generator))[0]
    A: Tensor = U * torch.logspace(0, -math.log10(kappa), r, dtype=torch.float64) @ V
    return A


def nearly_dependent(parallel: int, combined: int) -> Iterator[Tensor]:
    """Matrices whose columns differ from one another by 1 to 2⁻²⁵ of their norm, at all scales, some of integers.

    Then random columns of different scales, of which sums and differences are taken.
    """
    generator = torch.Generator().manual_seed(5)

    def scales(lowest: int, r: int) -> Tensor:
        return torch.exp2(torch.randint(lowest, 1, (1, r), generator=generator).double())

    for index in range(parallel):
        n, r = [(6, 4), (16, 8), (5, 3)][index % 3]
        if index % 4 == 3:
            rest = torch.randint(-3, 4, (n, r), generator=generator).double()
            A = torch.randint(-9, 10, (n, 1), generator=generator) / scales(-17, 1) + rest / scales(-5, r)
        else:
            first, rest = (torch.randn(n, k, dtype=torch.float64, generator=generator) for k in (1, r))
            A = (first + rest * scales(-25, r)) * scales(-60, r) * 2.0**30
        yield A.float()
    for index in range(combined):
        n, r = [(6, 4), (16, 8)][index % 2]
        columns = torch.randn(n, r, dtype=torch.float64, generator=generator) * scales(-23, r)
        yield (columns @ torch.randint(-1, 2, (r, r), generator=generator).double()).float()
