"""A non-finite gradient spoils the step in which it comes, and nothing else."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from powersgd_triton import Compressor
from tests.support.checks import COMPRESSED, DTYPES, MODES, bases, everything, gradients, same_bits, step, trained

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        *((fields, torch.float32) for fields in MODES.values() if "error_dtype" not in fields),
        *(({}, dtype) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_a_non_finite_element_spoils_one_step_only(fields: dict[str, Any], dtype: torch.dtype):
    """Errors are as before: a finite gradient was added and subtracted again, each rounded once."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    # Where a message has the element depends on its tensor, and not on the mode.
    places = ("linear", "conv", "row", "column", "bias", "scalar") if fields == {} else ("conv", "bias")
    turns = (2, 3) if "algorithm" in fields else (3,)
    for value, when, where in itertools.product((INF, -INF, NAN), turns, places):
        compressor, untouched = (trained(when, dtype=dtype, **fields) for _ in range(2))
        error, basis = compressor.error(), bases(compressor)
        now = gradients(when, dtype=dtype)
        now[where].view(-1)[now[where].numel() // 2] = value
        got = step(compressor, now, compute)
        assert all(got[name].isnan().all() for name in COMPRESSED)
        assert not got[where].isfinite().all()
        assert fields == MODES["cold"] or same_bits(bases(compressor), basis)
        for name, after in compressor.error().items():
            E, G = error[name].double(), torch.where(now[name].isfinite(), now[name], 0).double()
            bound = torch.finfo(compute).eps / 2 * ((E + G).abs() + 2 * E.abs())
            assert ((after.double() - E).abs() <= bound).all(), name
        for seed in (8, 9):
            expected = step(untouched, gradients(seed, dtype=dtype), compute)
            for name, tensor in step(compressor, gradients(seed, dtype=dtype), compute).items():
                assert tensor.isfinite().all()
                assert name in COMPRESSED or torch.equal(tensor, expected[name])


def test_an_error_that_overflows_spoils_one_step_only():
    """E + G may overflow although both are finite; what cannot be given back must not stay for ever."""
    torch.manual_seed(0)
    G = torch.diag(torch.tensor([3e38, -3e38, 1e38, 0.0]) * torch.rand(4))
    compressor = Compressor(everything(rank=1), {"w": (4, 4)})
    for _ in range(8):
        step(compressor, {"w": G})
    assert compressor.error()["w"].isfinite().all()
    step(compressor, {"w": torch.ones(4, 4)})
    assert step(compressor, {"w": torch.ones(4, 4)})["w"].isfinite().all()


def test_an_error_that_overflows_when_it_is_written_down_stays_finite():
    """M and the factors may be in range and M − P̂ Qᵀ not; every state that is saved must be one that can be loaded."""
    compressor = Compressor(everything(rank=1, algorithm="alternating"), {"w": (13, 2)})
    for sign in (1.0, -1.0, 1.0):
        step(compressor, {"w": torch.full((13, 2), sign * 3.4e38)})
        assert compressor.error()["w"].isfinite().all()
        compressor.load_state_dict(compressor.state_dict())
