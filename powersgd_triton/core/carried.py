"""Errors of tensors that are no longer compressed: added once to their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class CarriedErrors:
    """What a checkpoint owes to tensors that another configuration, or another mesh, does not compress.

    Attributes:
        owed: {name: E [n, m]}.
    """

    def __init__(self) -> None:
        self.owed: dict[str, Tensor] = {}
        # What a step was given, with its verdict, which only a later step may look at.
        self._given: list[tuple[Tensor, dict[str, Tensor]]] = []

    def names(self, candidates: Iterable[str]) -> list[str]:
        """Those for which something is owed."""
        return [name for name in candidates if name in self.owed]

    def add(
        self, names: Iterable[str], gradients: Mapping[str, Tensor], verdict: Tensor, scale: Tensor | None
    ) -> dict[str, Tensor]:
        """Copies of all gradients, in fp32 or fp64, with the errors of some of them added.

        Args:
            names: those whose errors are added.
            gradients: {name: tensor}, not changed.
            verdict: scalar of the step; where it becomes 0 the errors are owed again.
            scale: the gradients' loss scale, a scalar; None for 1.
        """
        given = {name: self.owed.pop(name) for name in names}
        self._given.append((verdict, given))
        # All of them, since a bucket's gradients are of one dtype.
        sums = {name: g.to(torch.promote_types(g.dtype, torch.float32)) for name, g in gradients.items()}
        for name, error in given.items():
            sums[name] = sums[name] + (error if scale is None else error * scale).view(sums[name].shape)
        return sums

    def settle(self, current: Tensor | None = None) -> None:
        """Take back what was given to steps that were not finite. The host looks at each verdict once.

        Args:
            current: the verdict of a step that is still under way.
        """
        for verdict, given in self._given:
            if verdict is not current and not verdict:
                self.owed.update(given)
        self._given = [(verdict, given) for verdict, given in self._given if verdict is current]

    def outstanding(self, current: Tensor | None) -> dict[str, Tensor]:
        """{name: E}: what is owed, with what was given to the step of verdict ``current``, which is not closed."""
        self.settle(current)
        given = {name: error for verdict, errors in self._given if verdict is current for name, error in errors.items()}
        return self.owed | given
