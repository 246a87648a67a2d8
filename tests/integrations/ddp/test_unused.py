"""Parameters that no worker uses in a step: DDP discards their average, and the error keeps what it contained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.support.distributed import run


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.side = nn.Linear(12, 12), nn.Linear(12, 12)
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return x + self.side(x) if self.use else x


def balance(worker: int, **options: Any) -> float:
    """Return the largest |Σ_w E + W Σ Ĝ − ΣΣ G| of both weights over all steps, as this worker's share of Σ_w."""
    torch.manual_seed(0)
    model = Branches()
    keep, view = options.pop("keep", False), options.pop("view", False)
    replica = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=view)
    state = PowerSGDState(None, 1, 0, min_compression_rate=0, module=replica, **options)
    state.attach(lambda: 8.0)
    replica.register_comm_hook(state, powerSGD_hook)
    owed, worst = torch.zeros(2, 12, 12), 0.0
    for step in range(9):
        model.use = (step % 3 == 0) or (step % 3 == 1 and worker == 0)
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(10 * step + worker))
        replica.zero_grad(set_to_none=not keep)
        weights = [model.trunk.weight, model.side.weight]
        own = torch.autograd.grad(8 * model(x).square().sum(), weights, allow_unused=True)
        torch.manual_seed(step)
        # A second forward pass before the backward pass.
        replica(x)
        (8 * replica(x).square().sum()).backward()
        pairs = zip(own, weights, strict=True)
        change = [(0 if g is None else g) - (0 if w.grad is None else w.grad) for g, w in pairs]
        owed = owed + torch.stack([torch.as_tensor(c).expand(12, 12) / 8 for c in change])
        errors = state.error() if step % 2 else {}
        if errors:
            total = owed - torch.stack([errors["trunk.weight"], errors["side.weight"]])
            torch.distributed.all_reduce(total)
            worst = max(worst, float(total.abs().max() / owed.abs().max()))
    return worst


CASES: dict[str, dict[str, Any]] = {
    "standard": {},
    "alternating": {"algorithm": "alternating"},
    "twice": {"iterations": 2},
    "view": {"view": True},
    "zeroed view": {"view": True, "keep": True},
    "zeroed": {"keep": True},
}
TRITON: dict[str, dict[str, Any]] = {
    "standard": {"backend": "triton"},
    "alternating": {"backend": "triton", "algorithm": "alternating"},
}


def conservation(worker: int, world_size: int, cases: dict[str, dict[str, Any]]) -> dict[str, float]:
    torch.set_num_threads(1)
    return {name: balance(worker, **options) for name, options in cases.items()}


@pytest.mark.parametrize("cases", [CASES, pytest.param(TRITON, marks=pytest.mark.slow)], ids=["torch", "triton"])
def test_error_keeps_what_ddp_discards(cases: dict[str, dict[str, Any]]):
    for results in run(conservation, 2, cases):
        assert max(results.values()) < 1e-5, results


def batched(worker: int, world_size: int) -> list[float]:
    torch.manual_seed(0)
    replica = DistributedDataParallel(Branches(), find_unused_parameters=True)
    state = PowerSGDState(None, 1, 2, module=replica)
    replica.register_comm_hook(state, batched_powerSGD_hook)
    for step in range(4):
        replica.zero_grad()
        replica(torch.randn(5, 12, generator=torch.Generator().manual_seed(10 * step + worker))).sum().backward()
    return [float(parameter.grad.sum()) for parameter in replica.parameters() if parameter.grad is not None]


def test_the_batched_hook_takes_the_ddp_model_as_module():
    first, second = run(batched, 2)
    assert first == second
    assert len(first) == 4
