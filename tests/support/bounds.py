"""Compares a result with fp64 truth, under a bound for each element."""

from __future__ import annotations

from torch import Tensor


def assert_within(actual: Tensor, truth: Tensor, bound: Tensor) -> None:
    difference = (actual.double() - truth).abs()
    assert actual.isfinite().all()
    assert (difference <= bound).all(), f"off by {difference.max():.3e}; {(difference / bound).max():.2f} × the bound"
