"""Names of parameters, and copies of a state, in a process group of one worker."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.small import complaint

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Compiled(nn.Module):
    """A module that ``torch.compile`` wraps, as far as names are concerned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, inputs: Tensor) -> Any:
        return self._orig_mod(inputs)


def network(compiled: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
    return nn.Sequential(Compiled(inner) if compiled else inner, nn.Linear(10, 8))


def state_for(model: nn.Module | None, rank: Any = 2, **options: Any) -> PowerSGDState:
    settings = {"start_powerSGD_iter": 0, "min_compression_rate": 0, **options}
    return (
        PowerSGDState(None, module=model, **settings)
        if rank is None
        else PowerSGDState(None, rank, module=model, **settings)
    )


def train(model: nn.Module, state: PowerSGDState, steps: range = range(3)) -> list[Tensor]:
    """Averaged gradients of each step."""
    replica = DistributedDataParallel(model)
    replica.register_comm_hook(state, powerSGD_hook)
    found = []
    for step in steps:
        model.zero_grad()
        replica(torch.randn(7, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return found


# Names ----------------------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_model_that_was_compiled() -> None:
    model = network(compiled=True)
    state = state_for(model)
    train(model, state)
    saved = state.state_dict()
    assert sorted(saved["matrices"]) == ["0.0.weight", "1.weight"]
    other = network()
    resumed = state_for(other)
    resumed.load_state_dict(saved)
    for ours, theirs in zip(train(other, resumed, range(3, 5)), train(model, state, range(3, 5)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_renaming_takes_the_names_of_compiled_modules() -> None:
    model = network()
    state = state_for(model)
    train(model, state)
    renamed = state_for(nn.Sequential(nn.Sequential(nn.Linear(6, 10)), nn.Tanh(), nn.Linear(10, 8)))
    report = renamed.load_state_dict(
        state.state_dict(), rename={"0._orig_mod.0.weight": "0.0.weight", "1.weight": "2.weight", "1.bias": "2.bias"}
    )
    assert report.loaded == ("0.0.weight", "2.weight")


def test_shapes_in_the_record_are_compared_with_the_model() -> None:
    model = network()
    state = state_for(model)
    train(model, state)
    saved = state.state_dict()
    fresh = state_for(network())
    for forged in ((10, 3, 2), (6, 10), (5, 12), (60,)):
        bad = copy.deepcopy(saved)
        bad["buckets"] = [[(n, forged if n == "0.0.weight" else s) for n, s in bucket] for bucket in bad["buckets"]]
        with pytest.raises(ValueError, match=r"'0\.0\.weight' has the shape \(10, 6\)"):
            fresh.load_state_dict(bad)
    assert fresh.iter == 0
    fresh.load_state_dict(saved)


def test_a_layer_that_was_added_later_is_named() -> None:
    model = network()
    state = state_for(model)
    model.append(nn.Linear(8, 4))
    said = complaint(train, model, state)
    assert said.startswith("RuntimeError")
    assert "'2." in said
    assert "was added to the model after PowerSGDState was created" in said
    assert "module=" not in said


def test_a_module_that_is_another_one_is_blamed() -> None:
    assert "module=" in complaint(train, network(), state_for(network()))


# What a rank function and a configuration may give --------------------------------------------------------------------


def test_ranks_of_numpy() -> None:
    model, other = network(), network()
    ours = train(model, state_for(model, lambda *_: np.int64(2), check_every=1))
    assert all(torch.equal(a, b) for a, b in zip(ours, train(other, state_for(other)), strict=True))
    config = PowerSGDConfig(rank=np.int32(3), start_iter=np.int64(1), seed=np.uint8(2))
    assert config == PowerSGDConfig(rank=3, start_iter=1, seed=2)
    assert [type(value) for value in (config.rank, config.start_iter, config.seed)] == [int] * 3
    budget = PowerSGDConfig(bytes_per_step=np.int64(1000))
    assert type(budget.bytes_per_step) is int
    for rank in (np.bool_(True), np.float64(2.0), torch.tensor(2.5)):
        with pytest.raises(TypeError, match="rank must be an int or a function"):
            PowerSGDConfig(rank=rank)  # type: ignore[arg-type]


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    "options", [{}, {"rank": None, "compression": 1.1}, {"rank": lambda *_: 2}], ids=["rank", "budget", "function"]
)
def test_a_deep_copy_goes_on_by_itself(named: bool, steps: int, options: dict[str, Any]) -> None:
    if not named and "compression" in options:
        pytest.skip("a budget needs names")
    model = network()
    state = state_for(model if named else None, **options)
    scale = torch.ones(())
    state.attach(lambda: scale)
    state.process_group = dist.new_group([0])
    train(model, state, range(steps))
    copied = copy.deepcopy(state)
    before = {name: error.clone() for name, error in state.error().items()}
    assert copied.config == state.config
    assert copied.iter == state.iter == steps
    assert copied.compression_stats() == state.compression_stats()
    assert copied.process_group is state.process_group
    assert copied._engine.step.loss_scale is not state._engine.step.loss_scale
    ours = train(model, copied, range(steps, steps + 2))
    assert state.iter == steps
    for name, error in state.error().items():
        assert torch.equal(error, before[name])
    for one, other in zip(ours, train(model, state, range(steps, steps + 2)), strict=True):
        torch.testing.assert_close(one, other)
    assert copied._engine.step.loss_scale is not None
    assert copied._engine.step.loss_scale.source is state._engine.step.loss_scale.source  # type: ignore[union-attr]
