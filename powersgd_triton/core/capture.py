"""Steps that are captured in a CUDA graph and replayed."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from powersgd_triton.core.residuals import Residuals
from powersgd_triton.core.streams import is_captured
from powersgd_triton.ops.bucket import Bucket, Product
from powersgd_triton.ops.step import Step


class Capture:
    """Starts steps so that a captured one can be replayed, and takes back what was noted for a capture that failed."""

    def __init__(self, residuals: Residuals, step: Step) -> None:
        self._plan, self._residuals, self._step = residuals.plan, residuals, step
        # What was pending before the open step, if it is captured.
        self._before: dict[Bucket, tuple[Tensor | None, Product]] = {}

    def start(self, device: torch.device, obstacles: Iterable[str | None], settled: Callable[[], bool]) -> None:
        """Start a step, or a further bucket of it.

        RuntimeError: The step is captured, and replays would not do what further steps do, because of the ``obstacles``
        of listeners, or since the bucket is not ``settled``. Nothing was changed.
        """
        step, residuals, captured = self._step, self._residuals, is_captured(device)
        if captured and (found := [*filter(None, obstacles), *self._obstacles(settled)]):
            raise RuntimeError(f"this step cannot be captured in a CUDA graph: {found[0]}")
        if step.keys:
            return
        self._before = {b: (b.applied, b.product) for b in residuals.buckets()} if captured else {}
        with residuals.streams.everywhere():
            # If the adapter has not told that the last step's verdict was final.
            step.undecided = False
            residuals.whole.settle(step)
            renewed = step.start(captured=captured)
        if renewed is not None:
            # The step overwrites the verdict of the last one.
            verdict, copy = renewed
            for bucket in residuals.buckets():
                if bucket.applied is verdict:
                    bucket.applied = copy

    def undo(self) -> bool:
        """Restore what was pending if the open step is captured, since nothing has run. Return whether it is."""
        before, self._before = self._before, {}
        for bucket, (applied, product) in before.items():
            bucket.applied, bucket.product = applied, product
        return bool(before)

    def _obstacles(self, settled: Callable[[], bool]) -> list[str]:
        """Return why further steps would not do the same on the device, or would need the host."""
        config = self._plan.config
        obstacles = (
            (config.algorithm == "alternating", "the alternating algorithm does something else in every second step"),
            (config.whole_format, "the host chooses the random numbers of quantized tensors; give a rank alone"),
            (config.planned and config.replan_every, "the host plans ranks; set replan_every=0"),
            (self._plan.exact, "compression='auto' chose an all-reduce; capture DDP's own"),
            (config.check_every, "the host compares workers; set check_every=0"),
            (self._step.loss_scale is not None, "the error follows a loss scale"),
            (self._step.iteration < config.start_iter, f"the first {config.start_iter} steps are exact"),
            (not settled(), "its gradients must be compressed in the same bucket in the step before it"),
        )
        return [why for holds, why in obstacles if holds]
