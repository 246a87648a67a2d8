"""Backward passes of DDP: one that is interrupted before another wrapper's, and parameters that DDP leaves out."""

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.integrations.ddp import PowerSGDState
from tests.support.distributed import make_test
from tests.support.training import hooked, relative
from tests.support.wrappers import means

WIDTH = 600
"""Of layers with more than 1 MB each, which have a bucket of their own."""


class HeadFirst(nn.Module):
    """Registers the layer first that it uses last, so that buckets in the order of registration have another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.middle, self.first = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.first(x)))  # type: ignore[no-any-return]


def interrupted(worker: int, _world_size: int) -> None:
    """A pass that ends with an exception is not joined by that of another wrapper."""
    model = HeadFirst()
    state = PowerSGDState(PowerSGDConfig(rank=2), module=model)
    torch.manual_seed(worker)
    x = torch.randn(8, WIDTH)
    applied = {name: torch.zeros(WIDTH, WIDTH) for name, _ in model.named_parameters()}

    def train(replica: DistributedDataParallel, steps: int) -> None:
        for _ in range(steps):
            model.zero_grad()
            replica(x).square().mean().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                applied[name] += parameter.grad

    def stop(*_: object) -> None:
        raise RuntimeError("stopped")

    twin = copy.deepcopy(model)
    twin(x).square().mean().backward()
    gradients = means({name: p.grad for name, p in twin.named_parameters() if p.grad is not None})
    replica = hooked(model, state, bucket_cap_mb=1)
    train(replica, 2)
    handle = model.middle.register_full_backward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        train(replica, 1)
    handle.remove()
    # It has hooks of its own.
    del replica
    gc.collect()
    # Its first buckets do not have the head, which was sent before.
    train(hooked(model, state, bucket_cap_mb=1, find_unused_parameters=True), 2)
    assert state.iteration == 4
    for name, error in means(state.error()).items():
        assert relative(applied[name] + error, (5 if "head" in name else 4) * gradients[name]) < 1e-5, name


def left_out(_worker: int, _world_size: int) -> None:
    """What DDP ignores, and what it averages itself at the end of a backward pass, is not planned for."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    late: dict[str, Any] = {
        "delay_all_reduce_named_params": [("2.weight", model[2].weight)],
        "param_to_hook_all_reduce": model[0].weight,
    }
    replica = DistributedDataParallel(model, **late)
    state = attach(replica, compression=4)
    replica(torch.randn(8, 64)).square().mean().backward()
    assert [tensor.name for tensor in state.report().tensors] == ["0.weight", "0.bias", "1.bias", "2.bias"]
    assert state.error().keys().isdisjoint({"1.weight", "2.weight"})
    state.load_state_dict(state.state_dict())


def earlier_gradients(worker: int, _world_size: int) -> None:
    """They are not sent again: DDP copies them into the bucket of a pass in which no worker uses their parameters."""

    def run(config: PowerSGDConfig | None, together: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20))
        replica = DistributedDataParallel(layers, find_unused_parameters=True)
        if config is not None:
            attach(replica, config)
        found = list[Tensor]()
        for step in range(8):
            trained, frozen = (layers[0], layers[2]) if step % 2 else (layers[2], layers[0])
            frozen.requires_grad_(False)
            if step % 4 < 2:
                trained.zero_grad()
            inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + worker))
            if together and step % 2 == 0:
                with replica.no_sync():
                    replica(inputs)
            loss = (layers if together else replica)(inputs).square().mean()
            if together:
                replica.reducer.prepare_for_backward([loss])
            loss.backward()
            frozen.requires_grad_(True)
            found += [parameter.grad.clone() for parameter in trained.parameters() if parameter.grad is not None]
        return found

    # Full rank loses nothing. Lightning has one forward pass of DDP for several backward passes.
    for algorithm, together in itertools.product(("standard", "alternating"), (False, True)):
        full_rank = PowerSGDConfig(rank=999, min_compression_rate=0, error_dtype="fp32", algorithm=algorithm)
        torch.testing.assert_close(run(full_rank, together), run(None, together), rtol=0, atol=1e-6)


test_on_two_workers = make_test([interrupted, left_out, earlier_gradients], 2)
