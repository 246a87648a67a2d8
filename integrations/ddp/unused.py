"""Parameters that no worker uses in a step, whose averages DDP discards."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.core.residuals import Residuals
from powersgd_triton.ops.bucket import Product
from powersgd_triton.ops.step import Step


class UnusedParameters:
    """Takes back what a step has sent of parameters that no worker used in it (``find_unused_parameters=True``).

    DDP knows these parameters when the backward pass is done. Its reducer is locked while it calls a communication
    hook, so the counts are read before the next forward pass, and before the errors are read or saved.
    The errors of the engine with ``residuals`` and ``step`` keep what DDP discards. ``names`` are {parameter: name}.
    """

    def __init__(self, residuals: Residuals, step: Step, module: Any, names: Mapping[Tensor, str]) -> None:
        self._residuals, self._step, self._reducer, self._names = residuals, step, module.reducer, names
        # Products that were looked at. Each belongs to one step, and only the counts of that step decide about it.
        self._seen: list[Product] = []
        # {name: whether the gradient is a view of the bucket}. DDP cannot discard what is written there.
        self._is_view: dict[str, bool] = {}
        self._places = {names[p]: index for index, p in enumerate(module._build_params_for_reducer()[0])}
        module.register_forward_pre_hook(self)

    @staticmethod
    def are_discarded(module: nn.Module | None) -> bool:
        """Return whether DDP looks for unused parameters of a module, and this version tells which they are."""
        if not isinstance(module, DistributedDataParallel) or not module.find_unused_parameters or module.static_graph:
            return False
        return hasattr(module.reducer, "_get_local_used_map")

    def __call__(self, *_: Any) -> None:
        """Take back what the last step has sent of unused parameters, unless that was done."""
        # Whether an open step is applied is not known, and its backward pass may not be done.
        buckets = [b for b in self._residuals.buckets() if b.applied is not None and not self._step.decides(b.applied)]
        fresh = [bucket for bucket in buckets if not any(bucket.product is seen for seen in self._seen)]
        if fresh:
            with self._residuals.streams.everywhere():
                counts = self._reducer._get_local_used_map()
                # On the CPU the host may look. Usually some worker uses each parameter.
                if counts.device.type != "cpu" or not counts.all():
                    unused = (counts == 0).unbind()
                    kept = {name: unused[place] for name, place in self._places.items() if not self._is_view.get(name)}
                    for bucket in fresh:
                        bucket.take_back(kept)
        self._seen = [bucket.product for bucket in buckets]

    def note_views(self, places: list[Tensor], parameters: list[Tensor]) -> None:
        """Note which gradients of a bucket are views of it in this step."""
        for place, parameter in zip(places, parameters, strict=True):
            gradient = parameter.grad
            self._is_view[self._names[parameter]] = gradient is not None and gradient.data_ptr() == place.data_ptr()

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle or a copy of the DDP model contains this hook. There it does nothing.
        return functools.partial, (_nothing,)


def _nothing(*_: Any) -> None: ...
