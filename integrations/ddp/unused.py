"""Parameters that no worker uses in a step, whose averages DDP discards."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.core.engine import Engine
from powersgd_triton.ops.bucket import Product


class UnusedParameters:
    """Takes back what a step has sent of parameters that no worker used in it (``find_unused_parameters=True``).

    DDP knows these parameters when the backward pass is done. Its reducer is locked while it calls a communication
    hook, so the counts are read before the next forward pass, and before the errors are read or saved.

    A pickle or a copy of the DDP model contains this object as a hook of the model. There it does nothing.

    Args:
        engine: Engine whose errors keep what DDP discards.
        module: The module given to ``PowerSGDState``.
        names: {parameter: name}.
    """

    def __init__(self, engine: Engine, module: nn.Module | None, names: dict[Tensor, str]) -> None:
        self._places: dict[str, int] = {}
        if not isinstance(module, DistributedDataParallel) or not module.find_unused_parameters or module.static_graph:
            return
        if not hasattr(module.reducer, "_get_local_used_map"):
            return
        self._engine, self._reducer, self._names = engine, module.reducer, names
        # Products that were looked at. Each belongs to one step, and only the counts of that step decide about it.
        self._seen: list[Product] = []
        # Parameters whose gradients are views of the bucket. DDP cannot discard what is written there.
        self._views: set[str] = set()
        self._places = {names[p]: index for index, p in enumerate(module._build_params_for_reducer()[0])}
        module.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        """Take back what the last step has sent of unused parameters, unless that was done."""
        if not self._places:
            return
        step, residuals = self._engine.step, self._engine.residuals
        # Whether an open step is applied is not known, and its backward pass may not be done.
        buckets = [b for b in residuals.buckets() if b.applied is not None and not step.decides(b.applied)]
        fresh = [bucket for bucket in buckets if not any(bucket.product is seen for seen in self._seen)]
        if fresh:
            with residuals.streams.everywhere():
                counts = self._reducer._get_local_used_map()
                # On the CPU the host may look. Usually some worker uses each parameter.
                if counts.device.type != "cpu" or not counts.all():
                    for bucket in fresh:
                        bucket.take_back(self._kept(counts))
        self._seen = [bucket.product for bucket in buckets]

    def note_views(self, places: list[Tensor], parameters: list[Tensor]) -> None:
        """Note which gradients of a bucket are views of it in this step."""
        if not self._places:
            return
        for place, parameter in zip(places, parameters, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() == place.data_ptr():
                self._views.add(self._names[parameter])
            else:
                self._views.discard(self._names[parameter])

    def _kept(self, counts: Tensor) -> dict[str, Tensor]:
        """Return {name: scalar bool, whether DDP discarded the average}."""
        unused = (counts == 0).unbind()
        return {name: unused[place] for name, place in self._places.items() if name not in self._views}

    def __reduce__(self) -> tuple[Any, ...]:
        return UnusedParameters, (None, None, {})
