"""The method in fp64 for one matrix and any number of workers, written apart from the product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Basis = Callable[[Tensor, Tensor], Tensor]
"""Given the sum over workers A [k, r] and the size of what was added up for it [k, r], orthonormal columns [k, r]."""


def orthonormal(A: Tensor, _: Tensor) -> Tensor:
    Q: Tensor = torch.linalg.qr(A)[0]
    return Q


class Model:
    """Vogels et al.'s Algorithm 1, or the follow-up's alternating one, with eager error feedback.

    Everything depends on the bases by their span only, so a run can be followed with the bases that it chose itself.

    ``errors`` are each worker's E [n, m], ``left`` and ``right`` bases [n, r] and [m, r]. There are ``repetitions``
    products of rank r in a step. If ``alternating``, M is multiplied from the left and the right by turns, the even
    ones from the left; ``turn`` is the number of turns before. ``sizes`` are for each worker what bounds its roundings:
    the sum of absolute values of whatever made up an element of the last step's M and products [n, m].
    """

    def __init__(
        self, errors: Sequence[Tensor], left: Tensor, right: Tensor, repetitions: int, alternating: bool, turn: int = 0
    ) -> None:
        self.errors = [error.double() for error in errors]
        self.sizes = [error.abs() for error in self.errors]
        self.left, self.right = left.double(), right.double()
        self.repetitions, self.alternating, self.turn = repetitions, alternating, turn

    def step(
        self, given: Sequence[Tensor], basis: Basis = orthonormal, sizes: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Ĝ; then ``errors`` are what is left.

        ``basis`` makes a sum orthonormal; it is called in the order in which the bases are needed. ``sizes`` are those
        of the errors, where they are sums themselves; by default their absolute values.
        """
        rests = [G.double() + E for G, E in zip(given, self.errors, strict=True)]
        sizes = [
            G.double().abs() + size for G, size in zip(given, sizes or [E.abs() for E in self.errors], strict=True)
        ]
        average = torch.zeros_like(rests[0])
        for _ in range(self.repetitions):
            if not self.alternating:
                self.left = basis(total(rests) @ self.right, total(sizes) @ self.right.abs())
            if self.alternating and self.turn % 2:
                own = [rest @ self.right for rest in rests]
                spread = [size @ self.right.abs() for size in sizes]
                products = [P @ self.right.T for P in own]
                added = [size @ self.right.abs().T for size in spread]
                self.left = basis(total(own), total(spread))
            else:
                own = [rest.T @ self.left for rest in rests]
                spread = [size.T @ self.left.abs() for size in sizes]
                products = [self.left @ Q.T for Q in own]
                added = [self.left.abs() @ size.T for size in spread]
                self.right = basis(total(own), total(spread))
            rests = [rest - product for rest, product in zip(rests, products, strict=True)]
            sizes = [size + more for size, more in zip(sizes, added, strict=True)]
            average += total(products) / len(given)
            self.turn += 1
        self.errors, self.sizes = rests, sizes
        return average


def total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)
