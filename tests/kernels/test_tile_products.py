"""Products of tiles as tensor cores compute them: three products of tf32 values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from powersgd_triton.kernels import product_device
from powersgd_triton.kernels.product_device import multiply
from tests.support.bounds import assert_within
from tests.support.device import EMULATED
from tests.support.kernel_cases import INF, NAN, rounding

SIZE = 32
# With the emulator, ``triton.jit`` still makes functions of the interpreter.
jit: Any = triton.JITFunction if EMULATED else triton.jit


@jit
def _product_kernel(A, B, out, N: tl.constexpr):
    """out = A B [N, N]."""
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, multiply(tl.load(A + at), tl.load(B + at), "tf32x3"))


def product(A: torch.Tensor, B: torch.Tensor, device: torch.device) -> torch.Tensor:
    out = torch.full((SIZE, SIZE), NAN, device=device)
    _product_kernel[(1,)](A.to(device), B.to(device), out, N=SIZE, enable_fp_fusion=False)
    return out.cpu()


@pytest.fixture(autouse=True)
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter too, which does not truncate to tf32."""
    monkeypatch.setattr(product_device, "TENSOR_CORES", tl.constexpr(True))


def test_products_are_nearly_as_exact_as_in_fp32(device: torch.device):
    generator = torch.Generator().manual_seed(0)
    for exponent in (0, 30, -30):
        A, B = torch.randn(2, SIZE, SIZE, generator=generator) * 2.0**exponent
        # One product each, which no others hide.
        for left in (A, torch.diag(A.diagonal())):
            truth, size = left.double() @ B.double(), left.abs().double() @ B.abs().double()
            assert_within(product(left, B, device), truth, rounding(SIZE, torch.device("cuda")) * size)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [INF, -INF, NAN, torch.finfo(torch.float32).max])
def test_what_is_not_finite_stays_where_it_is(value: float, device: torch.device):
    generator = torch.Generator().manual_seed(1)
    A, B = torch.randn(2, SIZE, SIZE, generator=generator)
    A[3, 5] = value
    found = product(A, B, device).isfinite()
    assert not found[3].any()
    assert found.sum() == SIZE * (SIZE - 1)
