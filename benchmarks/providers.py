"""Who takes a communication-hook step: this package, torch's hook, and a plain copy."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_module

from benchmarks.buckets import FilledBucket
from powersgd_triton.integrations import ddp

Step = Callable[[FilledBucket], Any]


def ours(rank: int, backend: str = "auto") -> Step:
    state = ddp.PowerSGDState(None, rank, start_powerSGD_iter=0, backend=backend)
    return lambda bucket: ddp.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]


def torch_hook(rank: int, batched: bool) -> Step:
    state = torch_module.PowerSGDState(
        None, rank, start_powerSGD_iter=2, batch_tensors_with_same_shape=batched, orthogonalization_epsilon=1e-8
    )
    state.iter = 2
    return lambda bucket: torch_module.powerSGD_hook(state, bucket).wait()


def copy() -> Step:
    target: dict[int, torch.Tensor] = {}
    return lambda bucket: target.setdefault(0, torch.empty_like(bucket.buffer())).copy_(bucket.buffer())


STEP_PROVIDERS: dict[str, Callable[[int], Step]] = {
    "ours": lambda rank: ours(rank, "triton"),
    "torch": lambda rank: torch_hook(rank, batched=False),
    "torch batched": lambda rank: torch_hook(rank, batched=True),
    "reference": lambda rank: ours(rank, "torch"),
    "copy": lambda _: copy(),
}
"""By name, for a device on which the kernels run. "reference" is this package's backend "torch"."""
