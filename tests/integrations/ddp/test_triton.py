"""The DDP hook with the Triton backend on several workers, whose kernels run in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.distributed import run
from tests.support.training import LIMIT, check, linear_stack, state_for, step_differences, summary, train


def hook(worker: int, world_size: int) -> dict[str, Any]:
    """DDP alone, the hook at full rank, at rank 2 with either backend, and with 8 bits, in several buckets."""
    from tests.support.interpreter import make_faster

    make_faster()
    width = 8
    options: dict[str, Any] = {"steps": range(2), "bucket_cap_mb": 0.0003, "width": width}
    runs = {}
    for name, settings in (
        ("full", {"backend": "triton"}),
        ("triton", {"matrix_approximation_rank": 2, "backend": "triton"}),
        ("torch", {"matrix_approximation_rank": 2, "backend": "torch"}),
        ("narrow", {"matrix_approximation_rank": 2, "backend": "triton", "wire_dtype": "int8"}),
    ):
        model = linear_stack(3, width)
        runs[name] = train(model, worker, state_for(model, **settings), **options)
    exact = train(linear_stack(3, width), worker, None, **options)
    return {
        **summary(runs["full"], exact),
        "low rank": step_differences(runs["triton"].gradients, runs["torch"].gradients),
        "loss": step_differences(runs["triton"].gradients, exact.gradients),
        "low rank digests": runs["triton"].digests,
        "rounded": step_differences(runs["narrow"].gradients, runs["triton"].gradients),
        "narrow digests": runs["narrow"].digests,
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
        # With 8 bits something is rounded, by less than is left out.
        assert all(0 < x < y for x, y in zip(seen["rounded"], seen["loss"], strict=True))
        for digests in ("low rank digests", "narrow digests"):
            assert seen[digests] == found[0][digests], "workers hold different bits"
