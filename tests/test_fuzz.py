"""Random layouts, gradients and configurations: every step follows the method, and nothing is lost."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import HealthCheck, given

from tests.fuzzing import Case, Follower, cases


def examples(count: int) -> hypothesis.settings:
    """The same examples in every run."""
    return hypothesis.settings(
        deadline=None, derandomize=True, max_examples=count, suppress_health_check=list(HealthCheck), database=None
    )


@examples(120)
@given(cases())
def test_steps_follow_the_method(case: Case) -> None:
    Follower(case).run()


@pytest.mark.slow
@examples(4000)
@given(cases(max_steps=10))
def test_many_steps_follow_the_method(case: Case) -> None:
    Follower(case).run()
