"""Predicted times of steps, and the choice among them. Plain numbers only."""

from __future__ import annotations

import dataclasses
import math

import pytest

from powersgd_triton import PowerSGDConfig
from powersgd_triton.planning import cost
from powersgd_triton.planning.cost import ComputeTime, Job, Network, Prediction, choose, kinds, options, step_seconds

BUCKETS = [{"head": (512, 256), "bias": (512,)}, {"body": (256, 1024), "norm": (256,)}]
CHEAP = ComputeTime((1e-4, 2e-4, 6e-4))
CONFIG = PowerSGDConfig(compression=20)


def job_at(megabits: float) -> Job:
    return Job(BUCKETS, 0.05, Network(2, card=megabits * 1e6 / 8))


def test_a_time_between_measured_ranks_is_on_a_line():
    time = ComputeTime((1.0, 2.0, 8.0))
    assert [time(rank) for rank in (4, 10, 16, 40, 64)] == [1, 1.5, 2, 5, 8]
    assert time(2) == pytest.approx(1 - 1 / 6)
    assert time(256) == pytest.approx(8 + 192 / 8)
    # A disturbed measurement does not make a higher rank cheaper.
    assert ComputeTime((3.0, 2.0, 4.0))(16) == 3
    assert ComputeTime((1e-3, 1.0, 2.0))(1) == 0


def test_messages_before_the_last_one_travel_during_the_backward_pass():
    assert step_seconds(0.3, 0.01, [0.1, 0.1, 0.05]) == pytest.approx(0.36)
    assert step_seconds(0.3, 0.01, [0.2, 0.1, 0.05]) == pytest.approx(0.46)
    for messages in ([], [0.1], [0.02, 0.1], [0.5, 0.5, 0.1]):
        assert cost.compute_of(step_seconds(0.2, 0.0, messages), messages) == pytest.approx(0.2)


def test_predicted_steps_have_the_bytes_and_ranks_of_their_plans():
    slow = job_at(100.0)
    elements = sum(math.prod(shape) for shape in slow.tensors.values())
    exact, half, compressed = slow.exact(), slow.exact(2), slow.compressed(CONFIG, CHEAP)
    assert [exact.bytes_per_step, half.bytes_per_step] == [4 * elements, 2 * elements]
    assert exact.seconds - 0.05 > 1.5 * (half.seconds - 0.05) > 0
    assert compressed.ranks.keys() == {"head", "body"}
    assert compressed.bytes_per_step <= 4 * elements / 20
    assert 0 < compressed.overhead < 0.02
    assert compressed.seconds < exact.seconds
    with pytest.raises(ValueError, match="the budget is"):
        slow.compressed(PowerSGDConfig(compression=1e6), CHEAP)


def test_a_choice_gives_away_little_time_for_quality():
    exact = Prediction(None, {}, 1e6, 1.0)
    configs = [dataclasses.replace(CONFIG, compression=c) for c in (10, 20, 40)]
    times = (0.5 * (1 + cost.TOLERANCE) + 0.01, 0.5 * (1 + cost.TOLERANCE), 0.5)
    found = [Prediction(c, {"a": 40 - 10 * i}, 1e5, t) for i, (c, t) in enumerate(zip(configs, times, strict=True))]
    assert choose(exact, found) is found[1]
    # An all-reduce that takes about as long loses nothing.
    assert choose(dataclasses.replace(exact, seconds=0.51), found).config is None
    assert choose(exact, []) is exact


def test_quantized_gradients_lose_less_than_factors_and_more_than_an_all_reduce():
    exact = Prediction(None, {}, 1e6, 1.0)
    low_rank = Prediction(CONFIG, {"a": 64}, 1e5, 1.0)
    formats = [Prediction(PowerSGDConfig(quantize=name), {}, 2e5, 1.0) for name in cost.FORMATS]
    for number, best in enumerate(found := [exact, *formats, low_rank]):
        assert choose(low_rank, found[number:][::-1]) is best
    # The compute of factors, and then that of quantization, is more than may be.
    times = {kind: ComputeTime((1e-3 if kind.quantize else 1.0,) * 3) for kind in kinds(CONFIG)}
    half, *others = options(job_at(100.0), times, 0.5)
    assert [p.config and p.config.quantize for p in (half, *others)] == [*cost.FORMATS]
    assert half.seconds > others[0].seconds > others[1].seconds
    assert half.bytes_per_step == job_at(100.0).exact(2).bytes_per_step
    assert not options(job_at(100.0), times, 1e-3)


def test_budgets_that_are_too_small_or_the_same_are_left_out():
    found = options(job_at(100.0), dict.fromkeys(kinds(CONFIG, ()), CHEAP), None)
    compressions = [float(p.config.compression or 0) for p in found if p.config is not None]
    assert compressions == sorted(set(compressions))
    plans = [tuple(sorted(p.ranks.items())) for p in found]
    assert len(set(plans)) == len(plans)
    # What is averaged exactly is more than 1/1280 of the bytes.
    assert 1280 not in compressions
