"""One communication-hook step on the CPU: this package beside torch's hook and a plain copy."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_module

from benchmarks.buckets import Bucket
from benchmarks.shapes import GRADIENT_SETS
from powersgd_triton.integrations import ddp

Step = Callable[[Bucket], Any]


def _ours(rank: int) -> Step:
    state = ddp.PowerSGDState(None, rank, start_powerSGD_iter=0, batch_tensors_with_same_shape=True)
    return lambda bucket: ddp.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]


def _torch(rank: int, batched: bool) -> Step:
    state = torch_module.PowerSGDState(
        None, rank, start_powerSGD_iter=2, batch_tensors_with_same_shape=batched, orthogonalization_epsilon=1e-8
    )
    state.iter = 2
    return lambda bucket: torch_module.powerSGD_hook(state, bucket).wait()


def _copy() -> Step:
    target: dict[int, torch.Tensor] = {}
    return lambda bucket: target.setdefault(0, torch.empty_like(bucket.buffer())).copy_(bucket.buffer())


PROVIDERS: dict[str, Callable[[int], Step]] = {
    "ours": _ours,
    "torch": lambda rank: _torch(rank, batched=False),
    "torch batched": lambda rank: _torch(rank, batched=True),
    "copy": lambda rank: _copy(),  # noqa: ARG005
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("gradients", GRADIENT_SETS)
def test_hook_step(benchmark: Any, gradients: str, rank: int, provider: str) -> None:
    bucket = Bucket(GRADIENT_SETS[gradients])
    step = PROVIDERS[provider](rank)
    size = bucket.buffer().numel() * bucket.buffer().element_size()
    _return_freed_memory()
    before = _memory("VmRSS")
    for _ in range(2):
        bucket.refill()
        step(bucket)
    _return_freed_memory()
    _reset_peak()
    persistent = _memory("VmRSS") - before
    bucket.refill()
    step(bucket)
    peak = _memory("VmHWM") - before
    benchmark.group = f"{gradients}, rank {rank}"
    benchmark.extra_info.update(
        gradients=gradients, rank=rank, provider=provider, persistent=persistent / size, peak=peak / size
    )
    benchmark.pedantic(step, args=(bucket,), setup=bucket.refill, rounds=31)


def _memory(field: str) -> int:
    """Bytes of this process, current (VmRSS) or at most since the last reset (VmHWM)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def _return_freed_memory() -> None:
    """Make the C library give freed memory back, so that what is resident is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
