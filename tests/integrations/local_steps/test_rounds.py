"""Rounds over which the learning rate adds up to the same."""

from __future__ import annotations

import pytest

from powersgd_triton.integrations.local_steps import growing


def lengths(every: int, steps: int, rates: list[float]) -> list[int]:
    rounds, found = growing(every, steps, rates.__getitem__), list[int]()
    while sum(found) < steps:
        found.append(rounds(sum(found)))
    return found


def test_a_constant_rate_gives_equal_rounds():
    assert lengths(5, 20, [0.1] * 20) == [5, 5, 5, 5]


def test_rounds_are_short_at_the_peak_of_the_rate():
    rates = [min(1.0, (step + 1) / 30) * (1 - 0.9 * step / 600) for step in range(600)]
    for every in (2, 5, 20):
        found = lengths(every, 600, rates)
        assert sum(found) == 600
        assert 600 // every * 0.9 <= len(found) <= 600 // every
        assert found[0] > min(found)
        assert found[-1] > 3 * min(found)


def test_a_round_of_any_length_follows_the_last_one():
    assert growing(5, 20, lambda _: 1.0)(20) == 5
    assert lengths(50, 20, [1.0] * 20) == [20]


@pytest.mark.parametrize(("every", "steps", "rate"), [(0, 10, 1.0), (5, 0, 1.0), (5, 10, 0.0), (5, 10, -1.0)])
def test_impossible_rounds_are_refused(every: int, steps: int, rate: float):
    with pytest.raises(ValueError, match="expected positive numbers of steps"):
        growing(every, steps, lambda _: rate)
