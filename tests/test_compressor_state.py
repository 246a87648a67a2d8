"""Saved states: what goes on from them, at which rank, and which are refused without a trace."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import COMPRESSED, SHAPES, everything, gradients, same_bits, step

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
Saved = dict[str, Any]


def trained(steps: int = 5, config: PowerSGDConfig | None = None, dtype: torch.dtype = torch.float32) -> Compressor:
    compressor = Compressor(config or everything(), SHAPES)
    for seed in range(steps):
        step(compressor, gradients(seed, dtype=dtype))
    return compressor


def through_a_file(state: Saved) -> Saved:
    """Saved with torch.save and read by its safe loader."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: Saved = torch.load(file, weights_only=True)
    return loaded


def trajectory(compressor: Compressor, first: int, steps: int = 6, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Results of further steps, and the error after them."""
    results = [
        t for seed in range(first, first + steps) for t in step(compressor, gradients(seed, dtype=dtype)).values()
    ]
    return [*results, *compressor.error().values()]


def identical(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in (key, *leaves(inner))]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [value]


# Round trips --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"batch_by_shape": False}, {"error_feedback": False}, {"warm_start": False}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_resumed_run_continues_with_the_same_bits(dtype: torch.dtype, fields: dict[str, bool]):
    config = everything(**fields)
    uninterrupted = trained(config=config, dtype=dtype)
    saved = through_a_file(trained(config=config, dtype=dtype).state_dict())
    resumed = Compressor(config, SHAPES)
    resumed.load_state_dict(saved)
    assert resumed.iteration == 5
    assert identical(trajectory(resumed, 5, dtype=dtype), trajectory(uninterrupted, 5, dtype=dtype))


def test_saving_does_not_disturb_the_run():
    one, other = trained(), trained()
    one.state_dict()
    assert identical(trajectory(one, 5), trajectory(other, 5))


def test_loading_into_a_running_compressor_replaces_its_state():
    expected = trained()
    saved = through_a_file(expected.state_dict())
    running = trained(steps=9)
    running.load_state_dict(saved)
    assert running.iteration == 5
    assert identical(trajectory(running, 5), trajectory(expected, 5))


def test_loading_the_state_of_a_fresh_run_starts_again():
    saved = through_a_file(Compressor(everything(), SHAPES).state_dict())
    running = trained()
    running.load_state_dict(saved)
    assert running.iteration == 0
    assert identical(trajectory(running, 0), trajectory(Compressor(everything(), SHAPES), 0))


def test_saved_within_the_exact_steps():
    config = everything(start_iter=8)
    uninterrupted = trained(config=config)
    resumed = Compressor(config, SHAPES)
    resumed.load_state_dict(through_a_file(trained(config=config).state_dict()))
    assert identical(trajectory(resumed, 5), trajectory(uninterrupted, 5))


def test_state_loaded_but_not_used_is_saved_again():
    saved = trained().state_dict()
    between = Compressor(everything(), SHAPES)
    between.load_state_dict(saved)
    again = between.state_dict()
    assert again["iteration"] == saved["iteration"]
    for name, parts in saved["matrices"].items():
        assert same_bits(again["matrices"][name], parts)


def test_state_is_plain_and_a_copy():
    compressor, untouched = trained(), trained()
    state = compressor.state_dict()
    assert {type(leaf) for leaf in leaves(state)} <= {str, int, float, bool, type(None), Tensor}
    assert set(state["matrices"]) == set(COMPRESSED)
    assert same_bits({n: p["error"].view(SHAPES[n]) for n, p in state["matrices"].items()}, compressor.error())
    for parts in state["matrices"].values():
        for tensor in parts.values():
            tensor.fill_(7)
    assert identical(trajectory(compressor, 5), trajectory(untouched, 5))


def test_loading_does_not_keep_the_callers_tensors():
    saved = trained().state_dict()
    resumed, expected = Compressor(everything(), SHAPES), Compressor(everything(), SHAPES)
    expected.load_state_dict(copy.deepcopy(saved))
    resumed.load_state_dict(saved)
    first = step(resumed, gradients(5))
    assert same_bits(first, step(expected, gradients(5)))
    for parts in saved["matrices"].values():
        for tensor in parts.values():
            tensor.fill_(7)
    assert identical(trajectory(resumed, 6), trajectory(expected, 6))


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 5, 1000])
def test_other_rank_keeps_the_error_and_the_directions_it_has_room_for(rank: int, running: bool):
    saved = through_a_file(trained(config=everything(3)).state_dict())
    resumed = trained(steps=2 if running else 0, config=everything(rank))
    resumed.load_state_dict(saved)
    state = resumed.state_dict()
    assert state["iteration"] == 5
    step(resumed, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    # The next step's gradient was zero: what arrived and what is left is the error that was saved.
    other = Compressor(everything(rank), SHAPES)
    other.load_state_dict(saved)
    got = step(other, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    for name, left in other.error().items():
        owed = saved["matrices"][name]["error"].view(SHAPES[name]).double()
        n, m = saved["matrices"][name]["error"].shape
        # P̂ Q̄ᵀ of r terms rounded twice, and the subtraction; columns of P̂ Q̄ᵀ are no longer than the error's.
        bound = 2.0**-24 * (2 * min(rank, n, m) + 6) * owed.norm()
        assert (got[name].double() + left.double() - owed).norm() <= bound, name
    for seed in range(3):
        compressed = resumed.compress(gradients(seed))
        for P, _ in compressed.factors().values():
            assert (P.double().mT @ P.double() - torch.eye(P.shape[1])).abs().max() <= 1e-5


@pytest.mark.parametrize("rank", [2, 6])
def test_other_rank_spans_the_saved_directions(rank: int):
    saved = trained(config=everything(4)).state_dict()
    resumed = Compressor(everything(rank), SHAPES)
    resumed.load_state_dict(saved)
    # Bases move in when gradients come; this step's has no warm start to spoil them, since it is flagged.
    spoiled = gradients(5)
    spoiled["bias"][0] = float("nan")
    step(resumed, spoiled)
    for name, parts in resumed.state_dict()["matrices"].items():
        new, old = parts["basis"].double(), saved["matrices"][name]["basis"].double()
        assert new.shape[1] == min(rank, old.shape[0], SHAPES[name][0])
        kept = old[:, : new.shape[1]]
        # Two bases rounded to fp32.
        outside = (kept - new @ (new.mT @ kept)).norm(dim=0)
        assert (outside <= 4 * 2.0**-24 * new.shape[1] ** 0.5).all(), name


def test_without_error_feedback_saved_errors_are_ignored():
    saved = trained().state_dict()
    resumed = Compressor(everything(error_feedback=False), SHAPES)
    resumed.load_state_dict(saved)
    step(resumed, gradients(5))
    assert resumed.error() == {}


# Refused ------------------------------------------------------------------------------------------------------------


def put(name: str, key: str, value: Any) -> Callable[[Saved], Any]:
    return lambda state: state["matrices"][name].__setitem__(key, value)


def replace(key: str, value: Any) -> Callable[[Saved], Any]:
    return lambda state: state.__setitem__(key, value)


CORRUPTIONS: dict[str, Callable[[Saved], Any]] = {
    "a later version": replace("format_version", 99),
    "an earlier version": replace("format_version", 2),
    "no version": lambda state: state.pop("format_version"),
    "no iteration": lambda state: state.pop("iteration"),
    "no matrices": lambda state: state.pop("matrices"),
    "iteration is text": replace("iteration", "x"),
    "iteration is None": replace("iteration", None),
    "iteration is negative": replace("iteration", -3),
    "iteration is a fraction": replace("iteration", 2.5),
    "matrices is None": replace("matrices", None),
    "matrices is a list": replace("matrices", [1, 2]),
    "matrix is None": lambda state: state["matrices"].__setitem__("linear", None),
    "matrix missing": lambda state: state["matrices"].pop("linear"),
    "matrix too many": lambda state: state["matrices"].__setitem__("other", state["matrices"]["linear"]),
    "matrix renamed": lambda state: state["matrices"].__setitem__("other", state["matrices"].pop("linear")),
    "no basis": lambda state: state["matrices"]["linear"].pop("basis"),
    "no error": lambda state: state["matrices"]["linear"].pop("error"),
    "basis is not a tensor": put("twin", "basis", [1.0]),
    "basis of one dimension": put("twin", "basis", torch.zeros(18)),
    "basis with other rows": put("twin", "basis", torch.zeros(17, 2)),
    "basis without columns": put("twin", "basis", torch.zeros(18, 0)),
    "basis of integers": put("twin", "basis", torch.ones(18, 2, dtype=torch.int64)),
    "basis complex": put("twin", "basis", torch.ones(18, 2, dtype=torch.complex64)),
    "basis not finite": put("twin", "basis", torch.full((18, 2), float("nan"))),
    "basis of 8 bits": put("twin", "basis", torch.ones(18, 2).to(torch.float8_e5m2)),
    "basis sparse": put("twin", "basis", torch.ones(18, 2).to_sparse()),
    "basis without memory": put("twin", "basis", torch.ones(18, 2, device="meta")),
    "basis expanded": put("twin", "basis", torch.ones(1, 2).expand(18, 2)),
    "error expanded": put("twin", "error", torch.ones(()).expand(24, 18)),
    "error of overlapping rows": put("twin", "error", torch.ones(60).as_strided((24, 18), (1, 1))),
    "sizes have numbers as names": lambda state: state["tensors"].update({3: [1, 1, 0]}),
    "error with other rows": put("twin", "error", torch.zeros(23, 18)),
    "error with other columns": put("twin", "error", torch.zeros(24, 17)),
    "error that would broadcast": put("twin", "error", torch.ones(24, 1)),
    "error of integers": put("twin", "error", torch.ones(24, 18, dtype=torch.int64)),
    "error not finite": put("twin", "error", torch.full((24, 18), float("inf"))),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_state_is_refused_and_the_run_goes_on(name: str):
    running, untouched = trained(), trained()
    state = copy.deepcopy(trained(steps=3).state_dict())
    CORRUPTIONS[name](state)
    with pytest.raises(ValueError, match=r"."):
        running.load_state_dict(state)
    assert running.iteration == 5
    assert identical(trajectory(running, 5), trajectory(untouched, 5))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_state_is_refused_before_the_first_step(name: str):
    fresh = Compressor(everything(), SHAPES)
    state = copy.deepcopy(trained(steps=3).state_dict())
    CORRUPTIONS[name](state)
    with pytest.raises(ValueError, match=r"."):
        fresh.load_state_dict(state)
    assert identical(trajectory(fresh, 0), trajectory(Compressor(everything(), SHAPES), 0))


def test_parts_that_require_gradients_and_have_strides_are_loaded():
    saved = trained(steps=3).state_dict()
    spread = copy.deepcopy(saved)
    for parts in spread["matrices"].values():
        for key, part in parts.items():
            parts[key] = part.mT.contiguous().mT.requires_grad_()
    ours, theirs = Compressor(everything(), SHAPES), Compressor(everything(), SHAPES)
    ours.load_state_dict(spread)
    theirs.load_state_dict(saved)
    assert identical(trajectory(ours, 3), trajectory(theirs, 3))
    assert not any(part.requires_grad for parts in ours.state_dict()["matrices"].values() for part in parts.values())


@pytest.mark.parametrize("state", [{}, {"model": {"w": torch.zeros(2)}}, [1], None])
def test_foreign_object_is_refused(state: Any):
    running, untouched = trained(), trained()
    with pytest.raises((ValueError, TypeError)):
        running.load_state_dict(state)
    assert identical(trajectory(running, 5), trajectory(untouched, 5))


def test_state_of_another_model_names_the_difference():
    other = Compressor(everything(), {"linear": (24, 18), "head": (9, 18)})
    step(other, {"linear": torch.ones(24, 18), "head": torch.ones(9, 18)})
    with pytest.raises(ValueError, match="'conv'") as caught:
        trained().load_state_dict(other.state_dict())
    assert "'head'" in str(caught.value)


def test_matrix_of_another_size_is_named_with_both_sizes():
    other = Compressor(everything(), {**SHAPES, "linear": (20, 18)})
    step(other, gradients(0, {**SHAPES, "linear": (20, 18)}))
    with pytest.raises(ValueError, match="'linear'") as caught:
        trained().load_state_dict(other.state_dict())
    assert "24 × 18" in str(caught.value)
    assert "20 × 18" in str(caught.value)
