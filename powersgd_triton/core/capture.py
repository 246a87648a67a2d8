"""Steps that are captured in a CUDA graph and replayed."""

from __future__ import annotations

import torch

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.memory import Memory
from powersgd_triton.core.streams import is_captured
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.step import Step


def start(config: PowerSGDConfig, memory: Memory, step: Step, layout: Layout, device: torch.device) -> None:
    """Start a step, or a further bucket of it, which may be captured. ``layout`` is the bucket's.

    Raises:
        RuntimeError: The step is captured, and its replays would not do what further steps do. Nothing was changed.
    """
    captured = is_captured(device)
    obstacle = _obstacle(config, memory, step, layout) if captured else None
    if obstacle is not None:
        raise RuntimeError(f"this step cannot be captured in a CUDA graph: {obstacle}")
    if not step.keys:
        memory.note_capture(captured=captured)
        with memory.streams.everywhere():
            renewed = step.start(captured=captured)
        if renewed is not None:
            memory.renew_verdict(*renewed)


def _obstacle(config: PowerSGDConfig, memory: Memory, step: Step, layout: Layout) -> str | None:
    """Return why further steps would not do the same on the device, or would need the host."""
    if config.algorithm == "alternating":
        return "the alternating algorithm does something else in every second step"
    if config.planned and config.replan_every:
        return "the host plans ranks; set replan_every=0"
    if config.check_every:
        return "the host compares workers; set check_every=0"
    if step.loss_scale is not None:
        return "the error follows a loss scale"
    if step.iteration < config.start_iter:
        return f"the first {config.start_iter} steps are exact"
    if not memory.is_settled(layout):
        return "its gradients must be compressed in the same bucket in the step before it"
    return None
