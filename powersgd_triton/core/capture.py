"""Steps that are captured in a CUDA graph and replayed."""

from __future__ import annotations

import torch
from torch import Tensor

from powersgd_triton.core.memory import Memory
from powersgd_triton.core.streams import is_captured
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.bucket import Bucket, Product
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan


class Capture:
    """Starts steps so that a captured one can be replayed, and takes back what was noted for a capture that failed."""

    def __init__(self, plan: RankPlan, memory: Memory, step: Step) -> None:
        self._plan, self._memory, self._step = plan, memory, step
        # What was pending before the open step, if it is captured.
        self._before: dict[Bucket, tuple[Tensor | None, Product]] = {}

    def start(self, layout: Layout, device: torch.device, *, reported: bool = False) -> None:
        """Start a step, or a further bucket of it.

        Args:
            layout: The bucket's layout.
            device: Device of its gradients.
            reported: Whether telemetry is on.

        Raises:
            RuntimeError: The step is captured, and replays would not do what further steps do. Nothing was changed.
        """
        step, memory, captured = self._step, self._memory, is_captured(device)
        obstacle = self._obstacle(layout, reported) if captured else None
        if obstacle is not None:
            raise RuntimeError(f"this step cannot be captured in a CUDA graph: {obstacle}")
        if step.keys:
            return
        buckets = {matrix.bucket for matrix in memory.matrices.values()} if captured else set()
        self._before = {bucket: (bucket.applied, bucket.product) for bucket in buckets}
        with memory.streams.everywhere():
            renewed = step.start(captured=captured)
        if renewed is not None:
            memory.renew_verdict(*renewed)

    def undo(self) -> bool:
        """Restore what was pending if the open step is captured, since nothing has run. Return whether it is."""
        before, self._before = self._before, {}
        for bucket, (applied, product) in before.items():
            bucket.applied, bucket.product = applied, product
        return bool(before)

    def _obstacle(self, layout: Layout, reported: bool) -> str | None:
        """Return why further steps would not do the same on the device, or would need the host."""
        config = self._plan.config
        if reported:
            return "telemetry is on, and the host does not see replays; call telemetry(every=0)"
        if config.algorithm == "alternating":
            return "the alternating algorithm does something else in every second step"
        if config.planned and config.replan_every:
            return "the host plans ranks; set replan_every=0"
        if self._plan.measures:
            return "the host measures the first steps"
        if self._plan.exact:
            return "compression='auto' chose an all-reduce; capture DDP's own"
        if config.check_every:
            return "the host compares workers; set check_every=0"
        if self._step.loss_scale is not None:
            return "the error follows a loss scale"
        if self._step.iteration < config.start_iter:
            return f"the first {config.start_iter} steps are exact"
        if not self._memory.is_settled(layout):
            return "its gradients must be compressed in the same bucket in the step before it"
        return None
