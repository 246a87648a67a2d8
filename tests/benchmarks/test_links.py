"""Crossovers and times to a loss of the benchmark of links; one that trains for real."""

from __future__ import annotations

import math

import pytest

from benchmarks.network import links
from benchmarks.network.links_report import crossover, steps_to
from benchmarks.network.namespaces import can_shape

MODEL = next(iter(links.MODELS))


def test_a_crossover_lies_on_a_power_law() -> None:
    ours = {10.0: 1.0, 100.0: 1.0, 1000.0: 1.0, None: 1.0}
    base = {10.0: 40.0, 100.0: 4.0, 1000.0: 0.4, None: 0.1, 30.0: 9.0}
    assert crossover(ours, base) == pytest.approx(400)
    for times, expected in ((0.9, 0.0), (1.0, 0.0), (1.1, math.inf)):
        assert crossover({10.0: 1.0, 100.0: 1.0}, {10.0: times, 100.0: times}) == expected
    with pytest.raises(ValueError, match=r"same rates; got rates \[10\.0\] and \[None\]"):
        crossover({10.0: 1.0}, {None: 1.0})


def test_a_loss_is_reached_between_two_points() -> None:
    curve = [4.0, 3.0, 1.0, 2.0]
    assert steps_to(curve, 5.0, interval=10) == 10
    assert steps_to(curve, 3.0, interval=10) == 20
    assert steps_to(curve, 2.5, interval=10) == 22.5
    assert steps_to(curve, 0.9, interval=10) is None


@pytest.mark.slow
def test_links_are_measured_for_real() -> None:
    if reason := can_shape():
        pytest.skip(reason)
    rows = links.measure([links.ALONE, links.FP32, links.OURS], [MODEL], 100.0, most_turns=2, limit=0.1)
    alone, exact, factors = rows
    # Headers and acknowledgements take 6%. 12.5 MB pass in a second.
    gradients = 4 * 834_304
    assert 1.03 * gradients < exact.most < 1.1 * gradients
    assert exact.most > 15 * factors.most
    assert alone.most < 2000
    assert exact.seconds[1] > 0.9 * gradients / 12.5e6
