"""States of DDP's hook whose model has layers that are frozen, or unfrozen later."""

import copy
from pathlib import Path

import pytest
from torch import nn

from tests.support.training import linear_stack, state_for, training

pytestmark = pytest.mark.usefixtures("one_worker")


def test_a_state_is_loaded_after_a_layer_was_frozen(tmp_path: Path) -> None:
    model = linear_stack()
    state = state_for(model)
    training(model, 0, state, range(3))
    next(model.parameters()).requires_grad_(False)
    state.save(tmp_path)
    for continued in (state, state_for(model)):
        report = continued.load(tmp_path)
        assert report is not None
        assert report.loaded
    saved = {f"net.{name}": name for name, _ in model.named_parameters()}
    wrapped = nn.ModuleDict({"net": model})
    report = state_for(wrapped).load_state_dict(state.state_dict(), rename={old: new for new, old in saved.items()})
    assert report.loaded


def test_a_layer_is_unfrozen_after_a_state_was_loaded() -> None:
    """It starts without an error. Names of frozen parameters may be among those that are renamed."""
    model = linear_stack()
    name, weight = next(model.named_parameters())
    weight.requires_grad_(False)
    state, wrapped = state_for(model), nn.ModuleDict({"net": model})
    training(model, 0, state, range(2))
    renamed = {name: f"net.{name}" for name, _ in model.named_parameters()}
    assert state_for(wrapped).load_state_dict(state.state_dict(), rename=renamed).loaded
    state.load_state_dict(state.state_dict())
    assert name not in state.error()
    copied = copy.deepcopy(state)
    weight.requires_grad_(True)
    for continued in (copied, state):
        training(model, 0, continued, range(2, 4))
        assert continued.error()[name].any()


def test_parameters_without_a_module_keep_their_numbers_when_others_are_unfrozen() -> None:
    model = linear_stack()
    first, *others = model.parameters()
    first.requires_grad_(False)
    state = state_for(None)
    training(model, 0, state, range(2))
    numbers = dict(state._names.names)
    assert numbers.keys() == {*others}
    first.requires_grad_(True)
    training(model, 0, state, range(2, 4))
    assert state._names.names == {**numbers, first: str(len(numbers))}
