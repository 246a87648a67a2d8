"""Lengths of rounds that follow the learning rate."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable


def growing(every: int, steps: int, rate: Callable[[int], float]) -> Callable[[int], int]:
    """Return lengths of rounds for ``LocalSteps``, over each of which the learning rate adds up to the same.

    Rounds are then long where the rate is small, at the end of a training and in its warm-up, and short at its peak.

    Args:
        every: Mean length. There are as many exchanges as with ``every`` itself.
        steps: Steps of the training.
        rate: Returns the learning rate of a step, the first of which is 0, in any unit.

    Returns:
        A function from the number of steps before a round to its length.

    Raises:
        ValueError: ``every`` or ``steps`` is not positive, or a rate is negative, or all are zero.
    """
    rates = [float(rate(step)) for step in range(steps)]
    if every < 1 or steps < 1 or min(rates) < 0 or not any(rates):
        raise ValueError(
            f"expected positive numbers of steps, and rates of at least 0 that are not all 0; got every={every}, "
            f"steps={steps} and rates from {min(rates, default=0)} to {max(rates, default=0)}"
        )
    sums = list(itertools.accumulate(rates))
    rounds = max(1, steps // every)
    # A little less than the share, so that the last round ends with the training whatever was rounded.
    shares = [sums[-1] * (index + 1) / rounds * (1 - 1e-12) for index in range(rounds)]
    ends = sorted({bisect.bisect_left(sums, share) + 1 for share in shares})
    return lambda done: next((end - done for end in ends if end > done), every)
