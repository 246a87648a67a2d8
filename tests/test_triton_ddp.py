"""The DDP hook with the Triton backend on several workers, whose kernels run in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run
from tests.training import LIMIT, check, linear_stack, state_for, step_differences, summary, train


def hook(worker: int, world_size: int) -> dict[str, Any]:
    """DDP alone, the hook at full rank, and the hook at rank 2 with either backend, in several buckets."""
    width = 8
    options: dict[str, Any] = {"steps": range(2), "bucket_cap_mb": 0.0003, "width": width}
    runs = {}
    for name, settings in (
        ("full", {"backend": "triton"}),
        ("triton", {"matrix_approximation_rank": 2, "backend": "triton"}),
        ("torch", {"matrix_approximation_rank": 2, "backend": "torch"}),
    ):
        model = linear_stack(3, width)
        runs[name] = train(model, worker, state_for(model, **settings), **options)
    exact = train(linear_stack(3, width), worker, None, **options)
    return {
        **summary(runs["full"], exact),
        "low rank": step_differences(runs["triton"].gradients, runs["torch"].gradients),
        "loss": step_differences(runs["triton"].gradients, exact.gradients),
        "low rank digests": runs["triton"].digests,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo workers, whose kernels run in the interpreter")
def test_ddp_hook_on_two_workers():
    found = run(hook, 2)
    check(found, steps=2)
    for seen in found:
        assert len(seen["buckets"][-1]) > 1
        assert max(seen["low rank"]) <= LIMIT
        # At rank 2 something is left out.
        assert min(seen["loss"]) > 0.01
        assert seen["low rank digests"] == found[0]["low rank digests"], "workers hold different bits"
