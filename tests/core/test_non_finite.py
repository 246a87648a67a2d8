"""A non-finite gradient spoils the step in which it comes, and nothing else."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton import Compressor
from tests.support.checks import COMPRESSED, SHAPES, bases, everything, gradients, same_bits, step

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF, NAN = float("inf"), float("nan")
# Unit roundoff of fp32 arithmetic.
U = 2.0**-24


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("where", ["linear", "conv", "row", "column", "bias", "scalar"])
def test_non_finite_element_spoils_one_step_only(where: str, value: float, dtype: torch.dtype, batch: bool):
    compressor, untouched = (Compressor(everything(batch_by_shape=batch), SHAPES) for _ in range(2))
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    u = torch.finfo(compute).eps / 2
    for seed in range(3):
        step(compressor, gradients(seed, dtype=dtype), compute)
        step(untouched, gradients(seed, dtype=dtype), compute)
    error, basis = compressor.error(), bases(compressor)

    now = gradients(3, dtype=dtype)
    now[where].view(-1)[now[where].numel() // 2] = value
    got = step(compressor, now, compute)
    for name in COMPRESSED:
        assert got[name].isnan().all(), name
    assert not got[where].isfinite().all()
    assert same_bits(bases(compressor), basis)
    for name, after in compressor.error().items():
        # G was added and subtracted again, each rounded once.
        G = torch.where(now[name].isfinite(), now[name], 0).double()
        bound = u * ((error[name] + G).abs() + 2 * error[name].abs())
        assert ((after.double() - error[name].double()).abs() <= bound).all(), name

    expected = step(untouched, gradients(4, dtype=dtype), compute)
    for name, tensor in step(compressor, gradients(4, dtype=dtype), compute).items():
        assert tensor.isfinite().all()
        if name not in COMPRESSED:
            assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("value", [INF, NAN])
def test_non_finite_without_error_feedback_or_warm_start(value: float):
    for fields in ({"error_feedback": False}, {"warm_start": False}):
        compressor = Compressor(everything(**fields), SHAPES)
        step(compressor, gradients(0))
        now = gradients(1)
        now["linear"][3, 3] = value
        assert step(compressor, now)["linear"].isnan().all()
        assert all(tensor.isfinite().all() for tensor in step(compressor, gradients(2)).values())


def test_many_spoiled_steps_in_a_row_lose_nothing_that_was_owed():
    compressor = Compressor(everything(), SHAPES)
    step(compressor, gradients(0))
    error = compressor.error()
    size = {name: tensor.abs() for name, tensor in error.items()}
    for seed in range(1, 21):
        now = gradients(seed)
        now["twin"][0, 0] = INF
        step(compressor, now)
        for name, total in size.items():
            total += (now[name] + error[name]).abs().nan_to_num(posinf=0) + 2 * error[name].abs()
    for name, after in compressor.error().items():
        assert ((after - error[name]).abs() <= 1.01 * U * size[name]).all()
    assert all(tensor.isfinite().all() for tensor in step(compressor, gradients(30)).values())


def test_finite_gradients_whose_product_overflows_spoil_one_step_only():
    compressor = Compressor(everything(), {"w": (24, 18)})
    step(compressor, gradients(0, {"w": (24, 18)}))
    assert step(compressor, {"w": torch.full((24, 18), 3e38)})["w"].isnan().all()
    assert compressor.error()["w"].isfinite().all()
    assert step(compressor, gradients(1, {"w": (24, 18)}))["w"].isfinite().all()


def test_error_that_overflows_spoils_one_step_only():
    """E + G may overflow although both are finite; what cannot be given back must not stay for ever."""
    torch.manual_seed(0)
    G = torch.diag(torch.tensor([3e38, -3e38, 1e38, 0.0]) * torch.rand(4))
    compressor = Compressor(everything(rank=1), {"w": (4, 4)})
    for _ in range(8):
        step(compressor, {"w": G})
    assert compressor.error()["w"].isfinite().all()
    step(compressor, {"w": torch.ones(4, 4)})
    assert step(compressor, {"w": torch.ones(4, 4)})["w"].isfinite().all()


def test_error_that_overflows_when_it_is_written_down_stays_finite():
    """M and the factors may be in range and M − P̂ Qᵀ not; every state that is saved must be one that can be loaded."""
    compressor = Compressor(everything(rank=1, algorithm="alternating"), {"w": (13, 2)})
    for sign in (1.0, -1.0, 1.0):
        step(compressor, {"w": torch.full((13, 2), sign * 3.4e38)})
        assert compressor.error()["w"].isfinite().all()
        compressor.load_state_dict(compressor.state_dict())
