"""Ranks under a byte budget, in training: bytes, conservation, agreement, checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ranks.plan import RankPlan
from powersgd_triton.ranks.planner import Spectrum, budget, sent_bytes
from powersgd_triton.ranks.report import RankReport
from tests.support.lockstep import Fleet, Values
from tests.support.thinned import thinned

# Spectra of different steepness, so that ranks have reasons to change.
SHAPES = {"steep": (60, 80), "flat": (60, 80), "tall": (200, 30), "bias": (33,), "tiny": (2, 3)}
DECAY = {"steep": 0.3, "flat": 0.98, "tall": 0.8, "bias": 1.0, "tiny": 1.0}


def spectral(seed: int, workers: int) -> list[Values]:
    """Gradients whose singular values decay, with directions of their own in each step."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Values] = []
    for _ in range(workers):
        values: Values = {}
        for name, shape in SHAPES.items():
            if len(shape) == 1:
                values[name] = torch.randn(shape, generator=generator)
                continue
            k = min(shape)
            left, right = (torch.randn(size, k, generator=generator) for size in shape)
            values[name] = (left * DECAY[name] ** torch.arange(k)) @ right.T / k
        found.append(values)
    return found


def planned(**fields: Any) -> PowerSGDConfig:
    return PowerSGDConfig(**{"compression": 4, "replan_every": 3, "wire_dtype": "fp32", **fields})


def train(compressor: Compressor, steps: range) -> list[Tensor]:
    """Averages of steps of one worker."""
    runs = (compressor.decompress(compressor.compress(spectral(step, 1)[0])) for step in steps)
    return [average for found in runs for average in dict(found).values()]  # type: ignore[arg-type]


# One process --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"algorithm": "alternating"}, {"wire_dtype": "int4", "compression": 12}, {"iterations": 2}], ids=str
)
def test_every_step_keeps_to_the_budget(fields: dict[str, Any]):
    config = planned(**fields)
    compressor = Compressor(config, SHAPES)
    plans = []
    before = 0
    for step in range(12):
        compressor.compress(spectral(step, 1)[0])
        plans.append({s.name: s.rank for s in compressor.layout.segments})
        sent = compressor.compression_stats()[2] - before
        before += sent
        if config.algorithm == "standard":
            # What an alternating step sends is the budget only on average of two.
            assert 4 * sent <= budget(SHAPES, config) + 4
        ranks = {name: rank for name, rank in plans[-1].items() if rank}
        assert sent_bytes(SHAPES, ranks, config) <= budget(SHAPES, config)
    assert before * 4 <= 12 * budget(SHAPES, config) + 12 * 4
    changes = [step for step in range(1, 12) if plans[step] != plans[step - 1]]
    # Measured after steps 3, 6, 9; in force a step later.
    assert changes
    assert set(changes) <= {3, 6, 9}


def test_more_columns_go_to_what_lags_behind():
    compressor = Compressor(planned(), SHAPES)
    train(compressor, range(13))
    ranks = {s.name: s.rank for s in compressor.layout.segments}
    assert ranks["flat"] > ranks["steep"]
    assert ranks["bias"] == ranks["tiny"] == 0


def test_without_replanning_ranks_stay_as_they_begin():
    compressor = Compressor(planned(replan_every=0), SHAPES)
    first = compressor.layout.segments
    train(compressor, range(5))
    assert compressor.layout.segments == first


def test_planning_waits_for_the_start():
    compressor = Compressor(planned(start_iter=4), SHAPES)
    first = compressor.layout.segments
    train(compressor, range(7))
    assert compressor.layout.segments == first
    train(compressor, range(7, 8))
    assert compressor.layout.segments != first


def test_zero_and_overflowing_gradients_keep_the_ranks():
    compressor = Compressor(planned(replan_every=2), SHAPES)
    first = compressor.layout.segments
    for value in (0.0, float("inf")):
        for _ in range(4):
            compressor.compress({name: torch.full(shape, value) for name, shape in SHAPES.items()})
    assert compressor.layout.segments == first


def test_a_budget_that_cannot_be_kept_is_refused():
    for fields in ({"compression": 1e4}, {"compression": None, "bytes_per_step": 100}):
        with pytest.raises(ValueError, match=r"at rank 1 this model sends .* expected bytes_per_step of at least that"):
            Compressor(planned(**fields), SHAPES)


def test_report():
    compressor = Compressor(planned(), SHAPES)
    train(compressor, range(5))
    report = compressor.report()
    assert report.compression >= 4
    assert [tensor.name for tensor in report.tensors] == list(SHAPES)
    shares = {tensor.name: tensor.energy_sent for tensor in report.tensors}
    assert shares["bias"] is shares["tiny"] is None
    assert 0 < shares["flat"] < shares["steep"] <= 1 + 1e-6  # type: ignore[operator]
    lines = str(report).splitlines()
    assert len(lines) == 1 + len(SHAPES) + 1
    assert "exact" in lines[-2]
    assert lines[-1].endswith("x fewer")


# A rank for each matrix by a function -------------------------------------------------------------------------------


def by_name(name: str, shape: tuple[int, ...]) -> int:
    assert shape == SHAPES[name]
    return {"steep": 1, "flat": 7, "tall": 0}.get(name, 2)


def test_a_function_gives_ranks():
    compressor = Compressor(PowerSGDConfig(rank=by_name), SHAPES)
    gradients = spectral(0, 1)[0]
    compressed = compressor.compress(gradients)
    assert {name: P.shape[1] for name, (P, _) in compressed.factors().items()} == {"steep": 1, "flat": 7}
    averages = compressor.decompress(compressed)
    assert isinstance(averages, dict)
    assert torch.equal(averages["tall"], gradients["tall"])
    saved = compressor.state_dict()
    other = Compressor(PowerSGDConfig(rank=by_name), SHAPES)
    other.load_state_dict(saved)
    assert other.iteration == 1


@pytest.mark.parametrize(("given", "error"), [(2.5, TypeError), (None, TypeError), (True, TypeError), (-1, ValueError)])
def test_what_a_function_gives_is_checked(given: Any, error: type[Exception]):
    with pytest.raises(error, match=r"the rank of 'steep', \(60, 80\), must be .*; got"):
        Compressor(PowerSGDConfig(rank=lambda *_: given), SHAPES).report()


# Several workers ----------------------------------------------------------------------------------------------------


@thinned("width, fields, workers", ("fp32", "int4"), ({}, {"algorithm": "alternating"}, {"iterations": 2}), (1, 2, 3))
def test_nothing_is_lost_when_ranks_change(width: str | None, fields: dict[str, Any], workers: int):
    """Σ_w E_T + W Σ_t Ĝ_t = Σ_w Σ_t G_t over several plans; workers hold the same bits (``Fleet`` asserts it)."""
    compression = 4 if width == "fp32" else 12
    fleet = Fleet(planned(wire_dtype=width, compression=compression, **fields), SHAPES, workers)
    owed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    size = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    layouts = set()
    for step in range(14):
        given = spectral(step, workers)
        for run in fleet.step(given, [["steep", "bias"], ["tall", "flat", "tiny"]]):
            layouts.add(tuple((s.name, s.rank) for s in run.layout.segments))
            for key, average in run.averages[0].items():
                owed[key] += sum(own[key].double() for own in given) - workers * average.double()
                size[key] += sum(own[key].double().abs() for own in given) + workers * average.double().abs()
    assert len(layouts) > 2
    for key, shape in SHAPES.items():
        errors = [error[key].double().view(shape) for error in fleet.errors() if key in error]
        left = sum(errors, torch.zeros(shape, dtype=torch.float64))
        bound = 8 * 2.0**-24 * (size[key].norm() + 14 * left.norm())
        assert (owed[key] - left).norm() <= bound, key


def test_the_columns_of_the_highest_energy_stay():
    config = planned()
    plan = RankPlan(config)
    plan.begin(SHAPES)
    plan.spectra = {"flat": Spectrum((3.0, 1.0, 4.0, 1.5, 5.0), 20.0)}
    assert plan.kept_columns("flat", 5, 3) == [0, 2, 4]
    # Of a checkpoint whose rank is another one, and of what was not measured, the first ones.
    assert plan.kept_columns("flat", 6, 2) == [0, 1]
    assert plan.kept_columns("tall", 5, 2) == [0, 1]


def test_a_matrix_keeps_its_error_and_basis_when_its_rank_changes():
    compressor = Compressor(planned(), SHAPES)
    train(compressor, range(4))
    engine = compressor._engine
    before = {name: matrix.bases["basis"].clone() for name, matrix in engine.memory.matrices.items()}
    after = {name: basis.shape[1] for name, basis in before.items()} | engine.plan.ranks
    errors = compressor.error()
    gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    engine.memory.bind(compressor.layout, gradients, engine.step)
    assert {name: matrix.bases["basis"].shape[1] for name, matrix in engine.memory.matrices.items()} == after
    assert any(after[name] < basis.shape[1] for name, basis in before.items())
    assert any(after[name] > basis.shape[1] for name, basis in before.items())
    for name, basis in before.items():
        new = engine.memory.matrices[name].bases["basis"]
        assert torch.allclose(new.T @ new, torch.eye(after[name]), atol=1e-6)
        smaller, larger = sorted((basis, new), key=lambda tensor: tensor.shape[1])
        # What one spans the other does too.
        assert torch.allclose(larger @ (larger.T @ smaller), smaller, atol=1e-5), name
    assert all(torch.equal(error, errors[name]) for name, error in compressor.error().items())


# Checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"algorithm": "alternating"}], ids=str)
@pytest.mark.parametrize("at", [2, 3, 4, 7])
def test_resuming_goes_on_with_the_same_bits_also_between_measuring_and_planning(at: int, fields: dict[str, Any]):
    config = planned(**fields)
    through, first, second = (Compressor(config, SHAPES) for _ in range(3))
    train(through, range(at))
    expected = train(through, range(at, 12))
    train(first, range(at))
    saved = first.state_dict()
    json.dumps(saved["plan"])
    second.load_state_dict(saved)
    found = train(second, range(at, 12))
    # The error is written down when it is saved, which rounds it once.
    assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in zip(expected, found, strict=True))
    assert second._engine.plan.ranks == through._engine.plan.ranks
    assert through.layout.segments != Compressor(config, SHAPES).layout.segments


def test_a_saved_plan_beyond_the_budget_is_not_used():
    rich, poor = (Compressor(planned(compression=compression), SHAPES) for compression in (3, 9))
    train(rich, range(5))
    poor.load_state_dict(rich.state_dict())
    assert poor.report().compression >= 9
    poor.compress(spectral(5, 1)[0])
    errors = rich.error()
    assert errors.keys() == poor.error().keys()


def test_a_state_of_a_fixed_rank_goes_on_under_a_budget_and_back():
    fixed, budgeted = Compressor(PowerSGDConfig(rank=2), SHAPES), Compressor(planned(), SHAPES)
    fixed.compress(spectral(0, 1)[0])
    budgeted.load_state_dict(fixed.state_dict())
    assert all(torch.equal(error, budgeted.error()[name]) for name, error in fixed.error().items())
    train(budgeted, range(1, 6))
    fixed.load_state_dict(budgeted.state_dict())
    fixed.compress(spectral(6, 1)[0])
    assert {segment.rank for segment in fixed.layout.compressed} == {2}


EMPTY: dict[str, Any] = {"ranks": {}, "demands": {}, "spectra": {}, "pending": {}}
DAMAGED: list[Any] = [
    [],
    {"ranks": {"flat": 2}},
    {**EMPTY, "ranks": {"flat": "2"}},
    {**EMPTY, "ranks": [1]},
    {**EMPTY, "ranks": {"flat": 0}},
    {**EMPTY, "demands": {"flat": float("nan")}},
    {**EMPTY, "demands": {"flat": float("inf")}},
    {**EMPTY, "spectra": {"flat": 3.0}},
    {**EMPTY, "spectra": {"flat": [3.0, float("nan")]}},
    {**EMPTY, "pending": {"flat": [float("inf"), 1.0]}},
    {**EMPTY, "pending": {"flat": [3.0, "4"]}},
    {**EMPTY, "others": {}},
]


@pytest.mark.parametrize("plan", DAMAGED, ids=str)
def test_a_damaged_plan_is_refused(plan: Any):
    compressor = Compressor(planned(), SHAPES)
    compressor.compress(spectral(0, 1)[0])
    with pytest.raises(ValueError, match="expected a plan of ranks"):
        compressor.load_state_dict({**compressor.state_dict(), "plan": plan})


def test_a_plan_that_was_saved_after_a_step_that_was_not_finite_is_loaded():
    """Such a step is measured, but no plan is made from it."""
    through, resumed = (Compressor(planned(replan_every=2), SHAPES) for _ in range(2))
    train(through, range(1))
    spoiled = spectral(1, 1)[0]
    spoiled["flat"][0, 0] = float("inf")
    through.compress(spoiled)
    assert through._engine.plan.pending is not None
    resumed.load_state_dict(through.state_dict())
    assert resumed._engine.plan.ranks == through._engine.plan.ranks


def test_the_report_says_how_messages_travel():
    config = PowerSGDConfig(rank=2, wire_dtype="int4")
    layout = Layout.build({"a": (64, 64)}, config)
    assert "Messages" not in str(RankReport.of(layout, config, {}))
    report = str(RankReport.of(layout, config, {}, {"all-to-all": 2, "all-reduce": 1}, 8))
    assert "Messages in a step: 2 by all-to-all, 1 by all-reduce; the 8 workers of a node share them" in report
