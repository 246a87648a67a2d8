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
        # {layouts of buckets that came one after the other: their joined layout, or None if they waited for the next}.
        # The first decision stays in force: if it followed planned ranks, each plan could need other buckets.
        self._joined: dict[tuple[Layout, ...], Layout | None] = {}

    def add(self, layout: Layout, gradients: Mapping[str, Tensor], done: Done) -> None:
        """Add a bucket. ``done`` is called when its gradients are overwritten."""
        self._buckets.append((layout, gradients, done))

    def takes(self, gradients: Mapping[str, Tensor]) -> bool:
        """Return whether a bucket can be joined with those that wait: one device, and one dtype for the kernels."""
        return not self._buckets or _kind(self._buckets[0][1]) == _kind(gradients)

    def ready(self, is_large: Callable[[Layout], bool]) -> bool:
        """Return whether the buckets wait no longer: ``is_large`` of their joined layout when they first came."""
        layouts = self._layouts()
        if layouts not in self._joined:
            layout = Layout.joined(layouts)
            self._joined[layouts] = layout if is_large(layout) else None
        return self._joined[layouts] is not None

    def take(self) -> tuple[Layout, dict[str, Tensor], Done]:
        """Return all of them as one bucket, and forget them."""
        layouts, buckets = self._layouts(), self._buckets
        layout = self._joined.get(layouts) or Layout.joined(layouts)
        self._joined[layouts] = layout
        self._buckets = []

        def done() -> None:
            for _, _, each in buckets:
                each()

        return layout, {name: tensor for _, gradients, _ in buckets for name, tensor in gradients.items()}, done

    def clear(self) -> None:
        """Forget the buckets, since their step is void."""
        self._buckets = []

    def _layouts(self) -> tuple[Layout, ...]:
        return tuple(layout for layout, _, _ in self._buckets)


def _kind(gradients: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    first = next(iter(gradients.values()))
    return first.dtype, first.device
