"""Ranks under a byte budget, in training: bytes, conservation, agreement, checkpoints."""

import json
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.core.buckets import Part
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ranks.plan import RankPlan
from powersgd_triton.ranks.planner import Spectrum, budget, sent_bytes
from powersgd_triton.ranks.report import RankReport
from tests.support.checks import gradients, same_bits, step

# Spectra of different steepness, so that ranks have reasons to change.
SHAPES = {"steep": (60, 80), "flat": (60, 80), "tall": (200, 30), "bias": (33,), "tiny": (2, 3)}
DECAY = {"steep": 0.3, "flat": 0.98, "tall": 0.8, "bias": 1.0, "tiny": 1.0}


def spectral(seed: int) -> dict[str, Tensor]:
    """Gradients whose singular values decay, with directions of their own in each step."""
    values, generator = gradients(seed, SHAPES), torch.Generator().manual_seed(seed)
    for name, shape in SHAPES.items():
        if len(shape) > 1:
            left, right = (torch.randn(size, min(shape), generator=generator) for size in shape)
            values[name] = (left * DECAY[name] ** torch.arange(min(shape))) @ right.T / min(shape)
    return values


def planned(**fields: Any) -> PowerSGDConfig:
    return PowerSGDConfig(**{"compression": 4, "replan_every": 3, "wire_dtype": "fp32", **fields})


def train(compressor: Compressor, numbers: range) -> list[Tensor]:
    """Averages of steps of one worker."""
    return [average for number in numbers for average in step(compressor, spectral(number)).values()]


@pytest.mark.parametrize(
    "fields", [{}, {"algorithm": "alternating"}, {"wire_dtype": "int4", "compression": 12}, {"iterations": 2}], ids=str
)
def test_every_step_keeps_to_the_budget(fields: dict[str, Any]):
    """Ranks change, more columns go to what lags behind, and nothing is lost."""
    config = planned(**fields)
    compressor = Compressor(config, SHAPES)
    plans = []
    before = 0
    owed = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for number in range(12):
        given = spectral(number)
        for name, average in step(compressor, given).items():
            owed[name] += given[name] - average
        plans.append({s.name: s.rank for s in compressor.layout.segments})
        sent = compressor.compression_stats()[2] - before
        before += sent
        if config.algorithm == "standard":
            # What an alternating step sends is the budget only on average of two.
            assert 4 * sent <= budget(SHAPES, config) + 4
        ranks = {name: rank for name, rank in plans[-1].items() if rank}
        assert sent_bytes(SHAPES, ranks, config) <= budget(SHAPES, config)
    assert before * 4 <= 12 * budget(SHAPES, config) + 12 * 4
    changes = {number for number in range(1, 12) if plans[number] != plans[number - 1]}
    # Measured after steps 3, 6, 9; in force a step later.
    assert changes
    assert changes <= {3, 6, 9}
    assert plans[-1]["flat"] > plans[-1]["steep"]
    assert plans[-1]["bias"] == 0
    for name, error in compressor.error().items():
        assert torch.allclose(owed.pop(name), error, rtol=0, atol=1e-4), name
    assert not any(rest.any() for rest in owed.values())


@pytest.mark.parametrize(
    ("fields", "last"), [({"replan_every": 0}, 12), ({"start_iter": 4}, 6), ({"replan_every": 2}, 4)], ids=str
)
def test_ranks_stay_as_they_begin(fields: dict[str, Any], last: int):
    """Without replanning, until compressed steps were measured, and where these were zero or not finite."""
    compressor = Compressor(planned(**fields), SHAPES)
    first = compressor.layout.segments
    if fields == {"replan_every": 2}:
        for value in (0.0, 0.0, math.inf, math.inf, math.inf):
            compressor.compress({name: torch.full(shape, value) for name, shape in SHAPES.items()})
            assert compressor.layout.segments == first
    else:
        train(compressor, range(last + 1))
        assert compressor.layout.segments == first
    train(compressor, range(7, 10))
    assert (compressor.layout.segments == first) == (fields == {"replan_every": 0})


def test_report():
    compressor = Compressor(planned(), SHAPES)
    train(compressor, range(5))
    report = compressor.report()
    assert report.compression >= 4
    assert [tensor.name for tensor in report.tensors] == list(SHAPES)
    shares = {tensor.name: tensor.energy_sent for tensor in report.tensors}
    assert shares["bias"] is shares["tiny"] is None
    assert 0 < shares["flat"] < shares["steep"] <= 1 + 1e-6  # type: ignore[operator]
    kept = 4 * sum(math.prod(tensor.shape) for tensor in report.tensors if tensor.rank)
    assert re.search(rf"exact.*\n.*x fewer\nErrors take {kept:,} bytes on each worker between steps$", str(report))
    # How messages travel.
    config = PowerSGDConfig(rank=2, wire_dtype="int4")
    layout = Layout.build({"a": (64, 64)}, config)
    assert "Messages" not in str(RankReport.of(layout, config, {}))
    said = str(RankReport.of(layout, config, {}, exchanges={"all-to-all": 2, "all-reduce": 1}, node_workers=8))
    assert "Messages in a step: 2 by all-to-all, 1 by all-reduce; the 8 workers of a node share them" in said
    assert f"Errors take {4 * 64 * 64 // 8:,} bytes" in said


def test_report_says_what_errors_take():
    cases: list[tuple[dict[str, Any], int]] = [
        ({"rank": 2, "error_dtype": "bf16"}, 2 * 64 * 64), ({"rank": 2, "error_feedback": False}, 0),
        ({"quantize": "int4"}, 4 * (64 * 64 + 64)), *(({"quantize": name}, 0) for name in ("bf16", "fp8", "int8")),
        ({"quantize": "int8", "error_feedback": True}, 4 * (64 * 64 + 64)),
    ]  # fmt: skip
    for fields, errors in cases:
        config = PowerSGDConfig(**fields)
        report = RankReport.of(Layout.build({"a": (64, 64), "b": (64,)}, config), config, {})
        assert report.error_bytes == errors
        assert f"Errors take {errors:,} bytes on each worker between steps" in str(report)


def by_name(name: str, shape: tuple[int, ...]) -> int:
    assert shape == SHAPES[name]
    return {"steep": 1, "flat": 7, "tall": 0}.get(name, 2)


def test_a_function_gives_ranks():
    compressor, given = Compressor(PowerSGDConfig(rank=by_name), SHAPES), spectral(0)
    compressed = compressor.compress(given)
    assert {name: P.shape[1] for name, (P, _) in compressed.factors().items()} == {"steep": 1, "flat": 7}
    assert torch.equal(dict(compressor.decompress(compressed))["tall"], given["tall"])  # type: ignore[arg-type]
    other = Compressor(PowerSGDConfig(rank=by_name), SHAPES)
    other.load_state_dict(compressor.state_dict())
    assert other.iteration == 1
    for wrong, error in ((2.5, TypeError), (None, TypeError), (True, TypeError), (-1, ValueError)):
        with pytest.raises(error, match=r"the rank of 'steep', \(60, 80\), must be .*; got"):
            Compressor(PowerSGDConfig(rank=lambda *_: wrong), SHAPES).report()  # type: ignore[arg-type]  # noqa: B023
    for fields in ({"compression": 1e4}, {"compression": None, "bytes_per_step": 100}):
        with pytest.raises(ValueError, match=r"at rank 1 this model sends .* expected bytes_per_step of at least that"):
            Compressor(planned(**fields), SHAPES)


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
    before = {name: matrix.bases["basis"].clone() for name, matrix in engine.residuals.matrices.items()}
    after = {name: basis.shape[1] for name, basis in before.items()} | engine.plan.ranks
    errors = compressor.error()
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    bucket = engine.begin(True, lambda: SHAPES, torch.device("cpu"))
    engine.buckets.prepare([Part(bucket, zeros)])
    engine.void()
    assert {name: matrix.bases["basis"].shape[1] for name, matrix in engine.residuals.matrices.items()} == after
    assert any(after[name] < basis.shape[1] for name, basis in before.items())
    assert any(after[name] > basis.shape[1] for name, basis in before.items())
    for name, basis in before.items():
        new = engine.residuals.matrices[name].bases["basis"]
        assert torch.allclose(new.T @ new, torch.eye(after[name]), atol=1e-6)
        smaller, larger = sorted((basis, new), key=lambda tensor: tensor.shape[1])
        # What one spans the other does too.
        assert torch.allclose(larger @ (larger.T @ smaller), smaller, atol=1e-5), name
    assert all(torch.equal(error, errors[name]) for name, error in compressor.error().items())


@pytest.mark.parametrize("fields", [{}, {"algorithm": "alternating"}], ids=str)
@pytest.mark.parametrize("at", [2, 3, 4])
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
    """Nor is one by a fixed rank, whose state goes on under a budget and back."""
    rich, poor = (Compressor(planned(compression=compression), SHAPES) for compression in (3, 9))
    train(rich, range(5))
    poor.load_state_dict(rich.state_dict())
    assert poor.report().compression >= 9
    assert same_bits(poor.error(), rich.error())
    fixed = Compressor(PowerSGDConfig(rank=2), SHAPES)
    fixed.load_state_dict(poor.state_dict())
    train(fixed, range(5, 6))
    assert {segment.rank for segment in fixed.layout.compressed} == {2}
    poor.load_state_dict(fixed.state_dict())
    assert same_bits(poor.error(), fixed.error())


def test_saved_plans_of_steps_that_were_not_finite_are_loaded_and_damaged_ones_are_not():
    """Such a step is measured, but no plan is made from it."""
    through, resumed = (Compressor(planned(replan_every=2), SHAPES) for _ in range(2))
    train(through, range(1))
    spoiled = spectral(1)
    spoiled["flat"][0, 0] = math.inf
    through.compress(spoiled)
    assert through._engine.plan.pending is not None
    saved = through.state_dict()
    resumed.load_state_dict(saved)
    assert resumed._engine.plan.ranks == through._engine.plan.ranks
    empty: dict[str, Any] = {"ranks": {}, "demands": {}, "spectra": {}, "pending": {}}
    parts: list[dict[str, Any]] = [
        {"ranks": {"flat": "2"}}, {"ranks": [1]}, {"ranks": {"flat": 0}}, {"demands": {"flat": math.nan}},
        {"demands": {"flat": math.inf}}, {"spectra": {"flat": 3.0}}, {"spectra": {"flat": [3.0, math.nan]}},
        {"pending": {"flat": [math.inf, 1.0]}}, {"pending": {"flat": [3.0, "4"]}}, {"others": {}},
    ]  # fmt: skip
    plans: list[Any] = [[], *parts, *({**empty, **part} for part in parts)]
    for plan in plans:
        with pytest.raises(ValueError, match="expected a plan of ranks"):
            resumed.load_state_dict({**saved, "plan": plan})
