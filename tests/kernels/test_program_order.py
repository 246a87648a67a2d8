"""Programs of a launch run in any order on a GPU; in the interpreter, in random ones."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton import Compressor
from powersgd_triton.kernels import explore, gram
from tests.support.checks import everything, gradients, step
from tests.support.device import INTERPRETED
from tests.support.interpreter import random_order

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the order of programs is a device's own")

SHAPES = {"two chunks": (300, 12), "bias": (7,)}


def steps() -> list[Tensor]:
    compressor = Compressor(everything(4, backend="triton", explore_every=2), SHAPES)
    return [tensor for seed in range(2) for tensor in step(compressor, gradients(seed, SHAPES)).values()]


def same_in_random_orders() -> bool:
    """Whether two random orders give the bits of the interpreter's own."""
    expected = steps()
    for seed in range(2):
        with random_order(seed):
            if not all(torch.equal(one, other) for one, other in zip(steps(), expected, strict=True)):
                return False
    return True


def test_same_bits_in_any_order():
    assert same_in_random_orders()


@triton.jit
def arrives_by_number(counter, expected):
    """A mistake: the program with the largest number need not be the last one."""
    return tl.program_id(0) == tl.num_programs(0) - 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_kernel_that_relies_on_the_order_is_found():
    with contextlib.ExitStack() as stack:
        for module in (explore, gram):
            if hasattr(module, "arrives_last"):
                stack.enter_context(mock.patch.object(module, "arrives_last", arrives_by_number))
        assert not same_in_random_orders()
