"""Products of options: a part of them in ``make test``, in which every option is tried, all of them in test-all."""

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch


def label(value: Any) -> str:
    """For pytest's ids."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return "none" if value is None else getattr(value, "__name__", str(value))


def slow(values: Sequence[Any]) -> list[Any]:
    """Values of a parameter with which a test is slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def thinned(names: str, *options: Sequence[Any], together: int = 2) -> pytest.MarkDecorator:
    """Parametrize over the product of the options; most of its cases are slow.

    Those that are not are chosen one by one, each time one that brings most that is new and among these the one whose
    values were chosen least, until any values of ``together`` different options have met in one of them: with 1 each
    value is tried, with 2 each pair of values.
    """
    cases = list(itertools.product(*(range(len(values)) for values in options)))
    groups = list(itertools.combinations(range(len(options)), together))
    left = {(group, *(case[at] for at in group)) for case in cases for group in groups}
    quick: set[tuple[int, ...]] = set()
    while left:
        met = {case: {(group, *(case[at] for at in group)) for group in groups} & left for case in cases}
        times = [collections.Counter(values) for values in zip(*quick, strict=True)] or [collections.Counter()] * len(
            options
        )
        best = max(
            cases, key=lambda case: (len(met[case]), -sum(seen[at] for seen, at in zip(times, case, strict=True)))
        )
        quick.add(best)
        left -= met[best]
    params = []
    for case in cases:
        values = [given[at] for given, at in zip(options, case, strict=True)]
        marks = [] if case in quick else [pytest.mark.slow]
        params.append(pytest.param(*values, id="-".join(label(value) for value in values), marks=marks))
    return pytest.mark.parametrize(names.split(", "), params)
