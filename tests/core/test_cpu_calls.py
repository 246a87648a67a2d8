"""How many operations torch is asked for in a step on the CPU: on a small model, they take longer than arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.buckets import FilledBucket
from benchmarks.shapes import SMALL_GRADIENT_SETS
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from powersgd_triton.shapes import Shapes, gpt2


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More threads divide large products into more parts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def calls(shapes: Shapes) -> int:
    """Return the operations of a step, those that they ask for themselves included."""
    bucket = FilledBucket(shapes)
    state = PowerSGDState(None, 16, start_powerSGD_iter=0, batch_tensors_with_same_shape=True, explore_every=0)

    def step() -> None:
        bucket.refill()
        powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return sum(event.name.startswith("aten::") for event in seen.events())


def test_calls_of_a_small_models_step(one_thread: None, one_worker: None) -> None:
    """Matrices of equal shape share their operations. Each tensor has a view, and some are copied."""
    few = calls(SMALL_GRADIENT_SETS["demo"])
    assert few <= 600, few
    more_layers = gpt2(layers=8, width=128, vocabulary=96, context=128)
    more_tensors = len(more_layers) - len(SMALL_GRADIENT_SETS["demo"])
    assert calls(more_layers) - few <= 2.5 * more_tensors
