"""The DDP hook on several gloo workers, against DDP's own averaging."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.distributed import run

FULL_RANK = {"matrix_approximation_rank": 64, "min_compression_rate": 0}


def model(layers: int = 24, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def train(
    worker: int, *, hook: dict[str, Any] | None, steps: int = 10, accumulate: int = 1, uneven: bool = False,
    half: bool = False, overflow_at: int | None = None, group: Any = None, **options: Any,
) -> tuple[list[Tensor], PowerSGDState | None]:  # fmt: skip
    """Gradients of each step, flat, and the hook's state."""
    net = model()
    width = 64
    replica = DistributedDataParallel(net, bucket_cap_mb=0.05, process_group=group, **options)
    state = None
    if hook is not None:
        state = PowerSGDState(group, start_powerSGD_iter=0, module=net, **hook)
        replica.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook) if half else powerSGD_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    seen = []
    with replica.join(enable=uneven):
        for step in range(steps + (2 * worker if uneven else 0)):
            optimizer.zero_grad()
            for micro in range(accumulate):
                generator = torch.Generator().manual_seed(1000 * step + 10 * micro + worker)
                inputs = torch.randn(8, width, generator=generator)
                last = micro == accumulate - 1
                with contextlib.nullcontext() if last else replica.no_sync():
                    loss = (replica(inputs) - inputs.roll(1, -1)).square().mean()
                    if overflow_at == step and worker == 0:
                        loss = loss * float("inf")
                    loss.backward()
            gradients = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
            seen.append(gradients)
            if gradients.isfinite().all():
                optimizer.step()
    return seen, state


def same_on_all_workers(tensor: Tensor) -> bool:
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
    return len(set(digests)) == 1


def compare_with_ddp(worker: int, world_size: int) -> dict[str, float]:
    """Largest relative difference of a step's gradient, for each way of using DDP."""
    cases: dict[str, dict[str, Any]] = {
        "default": {},
        "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
        "static_graph": {"static_graph": True},
        "find_unused_parameters": {"find_unused_parameters": True},
        "no_sync": {"accumulate": 2},
    }
    if world_size != 2:
        cases = {"default": {}}
    worst = {}
    for name, case in cases.items():
        expected, _ = train(worker, hook=None, **case)
        got, _ = train(worker, hook=FULL_RANK, **case)
        worst[name] = max(float((a - b).norm() / a.norm()) for a, b in zip(expected, got, strict=True))
        assert same_on_all_workers(got[-1])
    return worst


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_full_rank_equals_ddp(world_size: int) -> None:
    for worst in run(compare_with_ddp, world_size):
        assert max(worst.values()) <= 1e-5, worst


def exercise(worker: int, world_size: int) -> dict[str, Any]:
    """What two workers see in situations that are not the ordinary step."""
    found: dict[str, Any] = {}
    expected, _ = train(worker, hook=None, uneven=True, steps=4)
    got, _ = train(worker, hook=FULL_RANK, uneven=True, steps=4)
    found["join"] = max(float((a - b).norm() / a.norm()) for a, b in zip(expected, got, strict=True))
    expected, _ = train(worker, hook=None, steps=4)
    got, _ = train(worker, hook=FULL_RANK, half=True, steps=4)
    found["half"] = max(float((a - b).norm() / a.norm()) for a, b in zip(expected, got, strict=True))
    got, state = train(worker, hook={"matrix_approximation_rank": 4}, overflow_at=3, steps=8)
    assert state is not None
    found["finite"] = [bool(gradients.isfinite().all()) for gradients in got]
    found["rate"] = state.compression_stats()
    mean = {name: error.clone() for name, error in state.error().items()}
    for error in mean.values():
        dist.all_reduce(error)
    saved = state.state_dict()
    found["mean error"] = max(
        float((saved["matrices"][name]["error"] - error / world_size).abs().max()) for name, error in mean.items()
    )
    calls: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        train(worker, hook={"matrix_approximation_rank": 4}, steps=1)
    found["all-reduces"] = len(calls)
    return found


def test_join_half_overflow_and_checkpoint() -> None:
    for found in run(exercise, 2):
        assert found["join"] <= 1e-5
        # One rounding to fp16 on the way in and one on the way out, relative to the largest element.
        assert found["half"] <= 2**-9
        assert found["finite"] == [True] * 3 + [False] + [True] * 4
        assert found["mean error"] <= 1e-6
        assert found["rate"][0] > 2
        # 24 matrices of 16 KiB in buckets of 50 kB, before DDP rebuilds them: two all-reduces each.
        assert found["all-reduces"] % 2 == 0


def subgroup(worker: int, world_size: int) -> bool:
    group = dist.new_group([0, 2])
    if worker == 1:
        return True
    expected, _ = train(worker, hook=None, group=group, steps=3)
    got, _ = train(worker, hook=FULL_RANK, group=group, steps=3)
    return all(float((a - b).norm() / a.norm()) <= 1e-5 for a, b in zip(expected, got, strict=True))


def test_process_group_of_some_workers() -> None:
    assert all(run(subgroup, 3))
