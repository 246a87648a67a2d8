"""Buckets that wait to be averaged together with the next ones, since their messages are small."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from powersgd_triton.layout.layout import Layout

Done = Callable[[], None]


class Waiting:
    """The waiting buckets of the open step. Together they are one bucket."""

    def __init__(self) -> None:
        self._buckets: list[tuple[Layout, Mapping[str, Tensor], Done]] = []
        # Joined layouts, so that the same buckets have the same layout in each step.
        self._layouts: dict[tuple[Layout, ...], Layout] = {}

    def add(self, layout: Layout, gradients: Mapping[str, Tensor], done: Done) -> None:
        """Add a bucket. ``done`` is called when its gradients are overwritten."""
        self._buckets.append((layout, gradients, done))

    def takes(self, gradients: Mapping[str, Tensor]) -> bool:
        """Return whether a bucket can be joined with those that wait: the kernels take gradients of one dtype."""
        return not self._buckets or _dtype(self._buckets[0][1]) == _dtype(gradients)

    @property
    def layout(self) -> Layout:
        """Layout of all of them."""
        layouts = tuple(layout for layout, _, _ in self._buckets)
        if layouts not in self._layouts:
            self._layouts[layouts] = Layout.joined(layouts)
        return self._layouts[layouts]

    def take(self) -> tuple[Layout, dict[str, Tensor], Done]:
        """Return all of them as one bucket, and forget them."""
        layout, buckets = self.layout, self._buckets
        self._buckets = []

        def done() -> None:
            for _, _, each in buckets:
                each()

        return layout, {name: tensor for _, gradients, _ in buckets for name, tensor in gradients.items()}, done

    def clear(self) -> None:
        """Forget the buckets, since their step is void."""
        self._buckets = []


def _dtype(gradients: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(gradients.values())).dtype
