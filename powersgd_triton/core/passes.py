"""Backward passes that use other parts of a model by turns: each pass is one step."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from powersgd_triton.core.engine import Engine


class Passes:
    """Tells the backward passes of a model apart, where its last bucket is not known.

    A step ends when one of its buckets comes again. If it ended no earlier, buckets that only the next pass has would
    belong to the step before.

    Args:
        modules: Modules of which one's forward pass comes before each backward pass.
        engines: What averages its parameters, each some of them.
    """

    def __init__(self, modules: Iterable[nn.Module], engines: Sequence[Engine]) -> None:
        self._engines, self._forward = engines, False
        for module in modules:
            module.register_forward_pre_hook(torch.compiler.disable(self.note))

    def note(self, *_: object) -> None:
        """Note that a part of the model is computed."""
        # Without gradients no backward pass follows, and a worker may evaluate alone. With activation checkpointing, a
        # backward pass runs forward passes.
        self._forward |= torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0

    def begin(self) -> None:
        """End the steps of the last pass if a new one has begun. Call it before each bucket. Collective."""
        if self._forward:
            self._forward = False
            self.finish()

    def finish(self) -> None:
        """End the steps of the last pass. They count together, or not at all. Collective."""
        steps = [(e, e.step.verdict(e.buckets.device)) for e in self._engines if e.step.keys and e.buckets.device]
        if len(steps) > 1:
            least = torch.stack([verdict for _, verdict in steps]).amin(dim=0)
            for engine, verdict in steps:
                verdict.copy_(least)
                # Workers that average with each other may differ in what they average with others.
                engine.step.uneven = True
        for engine, _ in steps:
            engine.finish()
