"""Orthogonalization by Householder QR, in plain torch, which is its specification, and random directions."""

from typing import Any

import torch
from torch import Tensor

from powersgd_triton.layout.constants import DEAD_COLUMN, ORTHONORMAL

PASSES = 4
"""Decompositions after which no further column of a factor is found to be dead. Nearly always the first one finds all.
What is not found then is no loss: such a column is kept, and the basis is orthonormal with it."""


def orthogonalize_reference(
    A: Tensor, *, keys: Tensor, step: int | Tensor, epsilon: float = 0.0, out: Tensor
) -> Tensor:
    """out = orthonormal basis of A's columns, in their order: Gram–Schmidt as Householder QR in fp64.

    Dead columns are replaced first, see ``replace_dead_columns``. A finite A gives a finite, orthonormal result, whose
    span contains A's columns up to what is dead. A non-finite A gives a finite result.

    Householder QR is orthonormal for any finite matrix (Higham: "Accuracy and Stability of Numerical Algorithms",
    theorem 19.4). If that is not so after all, the columns concerned are zero. Then nothing of them is sent, and the
    error keeps it.

    Args:
        A, out: [B, n, r] with r ≤ n, A in fp32 or fp64. They may be the same.
        keys: [B] int64, a number for each matrix.
        step: Number of the step, also as an int64 scalar on the device.
        epsilon: Share of its norm up to which a column is dead, if that is more than 2⁻²².

    Return the number of columns that are zero since they would not be orthonormal, an int64 scalar.
    """
    Q, R = torch.linalg.qr(replace_dead_columns(A, keys=keys, step=step, epsilon=epsilon))
    # The diagonal of R is to be positive.
    Q = torch.where(R.diagonal(dim1=-2, dim2=-1).unsqueeze(1) < 0, -Q, Q)
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    orthonormal = (torch.bmm(Q.mT, Q) - identity).abs().amax(dim=1) <= ORTHONORMAL
    out.copy_(torch.where(orthonormal.unsqueeze(1), Q, 0))
    return (~orthonormal).sum()


def replace_dead_columns(A: Tensor, *, keys: Tensor, step: int | Tensor, epsilon: float = 0.0) -> Tensor:
    """Return A's columns in fp64, scaled if they were fp64 before, with random directions in the place of dead ones.

    A column is dead if at most max(epsilon, 2⁻²²) of its norm is left after projecting out the columns before it that
    are not dead, or if it is not finite.

    In X = Q R, |R_jj| is what is left of column j after projecting out all columns before it. These may include dead
    ones, which must not count. So a column is dead for certain only if it has no larger part in the directions of other
    columns that seem dead. Then it is moved behind all others, and R is decomposed again. A column of Q R is that of X
    up to rounding of this column, for any X (Higham, theorem 19.4). So rounding loses no direction.
    """
    # As rows instead of columns, in which order LAPACK wants them in memory.
    Xt = A.mT.to(torch.float64, memory_format=torch.contiguous_format)
    if A.dtype == torch.float64:
        # Squares of fp64 values may overflow, or vanish.
        largest = Xt.abs().amax(dim=2, keepdim=True)
        Xt = Xt / torch.where(largest > 0, largest, 1)
    norms = Xt.norm(dim=2)
    norms = torch.where(norms.isfinite(), norms, 0)
    # A column that is not finite is dead, and must not spread to others.
    Xt.masked_fill_((norms == 0).unsqueeze(2), 0)
    R = torch.linalg.qr(Xt.mT, mode="r").R
    dead = torch.zeros_like(norms, dtype=torch.bool)
    order = torch.arange(A.shape[2], device=A.device).expand_as(dead)
    on_host = A.device.type == "cpu"
    for _ in range(PASSES):
        little = max(epsilon, DEAD_COLUMN) * norms.gather(1, order)
        weak = R.diagonal(dim1=-2, dim2=-1).abs() <= little
        certain = weak & (torch.where(weak.unsqueeze(2), R, 0).norm(dim=1) <= little)
        if on_host and not (certain & ~dead.gather(1, order)).any():
            break
        dead = dead.scatter(1, order, dead.gather(1, order) | certain)
        if on_host and torch.equal(weak, certain):
            # The others are alive, whatever was projected out of them.
            break
        later = torch.argsort(dead.gather(1, order).byte(), dim=1, stable=True)
        R = torch.linalg.qr(R.gather(2, later.unsqueeze(1).expand_as(R)), mode="r").R
        order = order.gather(1, later)
    # The random numbers take longer than the rest, so the host draws only those that are needed.
    columns = dead.any(dim=0).nonzero().squeeze(1) if on_host else torch.arange(A.shape[2], device=A.device)
    random = random_directions(keys, step, A.shape[1], A.shape[2], columns).mT.double()
    Xt[:, columns] = torch.where(dead[:, columns].unsqueeze(2), random, Xt[:, columns])
    return Xt.mT


def random_directions(keys: Tensor, step: int | Tensor, n: int, r: int, columns: Tensor | None = None) -> Tensor:
    """Return uniform numbers in [−1, 1), [B, n, r] fp32, or only these of the r columns. Keys are [B] int64.

    They are a function of (key, step, row, column) on any device: no generator's state changes, and all workers draw
    the same.
    """
    columns = torch.arange(r, device=keys.device) if columns is None else columns
    counter = torch.arange(0, n * r, r, device=keys.device).view(1, n, 1) + columns
    # Keys are mixed separately from counters, so that no key's stream is a shifted copy of another key's stream.
    salt = (step * 0x9E3779B9 + 0x85EBCA6B) & 0xFFFFFFFF
    if keys.device.type == "cpu" and isinstance(salt, int):
        # On few numbers, calls take longer than Python.
        stream = keys.new_tensor([mix(mix(key & 0xFFFFFFFF) ^ salt) for key in keys.tolist()])
    else:
        stream = mix(mix(keys & 0xFFFFFFFF) ^ salt)
    numbers: Tensor = mix(mix(counter) ^ stream.view(-1, 1, 1))
    return ((numbers >> 8).float() * 2.0**-23).sub_(1.0)


def mix(x: Any) -> Any:
    """Map 32-bit integers, or tensors of them, one to one. Every input bit changes about half of the output bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = x ^ (x >> shift)
        x *= factor
        x &= 0xFFFFFFFF
    return x
