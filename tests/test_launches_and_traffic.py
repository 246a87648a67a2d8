"""A step's launches do not depend on the number of matrices, and it moves little more than it must."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from powersgd_triton.communication import Communicator
from powersgd_triton.compressor import Compression
from powersgd_triton.layout import Layout
from powersgd_triton.state import State
from tests.checks import everything, gradients

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter")

# What issue 3 asks for.
MOST_LAUNCHES = 12
MOST_UNITS = 5.4


def steps(shapes: Sequence[tuple[int, ...]], rank: int, number: int = 2, **fields: object):
    """Run a step ``number`` times in one bucket; what the last one did."""
    from tests.interpreter import watched

    named = {str(index): shape for index, shape in enumerate(shapes)}
    config = everything(rank, backend="triton", **fields)
    state, layout, communicator = State(config), Layout.build(named, config), Communicator()
    for seed in range(number):
        now = gradients(seed, named)
        with watched() as activity:
            compression = Compression(state, layout, now, communicator)
            compression.project()
            compression.backproject()
            compression.commit()
            compression.reconstruct(now)
            state.end_step()
    return activity


@pytest.mark.parametrize("fields", [{}, {"error_feedback": False}], ids=["standard", "without error feedback"])
@pytest.mark.parametrize("rank", [1, 4, 17, 32])
def test_launches_do_not_depend_on_the_number_of_matrices(rank: int, fields: dict[str, object]):
    one = steps([(40, 36), (7,)], rank, **fields)
    many = steps([(40 + i % 3, 36 - i % 2) for i in range(20)] + [(7,)] * 20, rank, **fields)
    assert one.launches == many.launches
    assert one.operations == []
    assert len(one.launches) <= MOST_LAUNCHES


def test_three_hundred_matrices():
    assert len(steps([(3, 4)] * 300, 2).launches) == len(steps([(3, 4)], 2).launches) <= MOST_LAUNCHES


def test_a_step_that_is_not_finite_takes_no_more_launches():
    from tests.interpreter import watched

    named = {"w": (40, 36)}
    config = everything(2, backend="triton")
    state, layout = State(config), Layout.build(named, config)
    kernels = []
    for value in (0.0, float("inf")):
        now = gradients(0, named)
        now["w"][3, 3] = value
        compression = Compression(state, layout, now, Communicator())
        with watched() as activity:
            compression.project()
            compression.backproject()
            compression.commit()
            compression.reconstruct(now)
        state.end_step()
        assert now["w"].isnan().all() == (value != 0)
        kernels.append(activity.kernels)
    assert kernels[0] == kernels[1]


@pytest.mark.parametrize("shape", [(512, 512), (512, 768), (1024, 512)], ids=str)
def test_a_step_moves_little_more_than_the_gradients_must(shape: tuple[int, int]):
    """Read G, read and write M; read M; write Ĝ: 5 units of the gradient's bytes, and the factors."""
    activity = steps([shape], 4)
    units = activity.moved / (4 * shape[0] * shape[1])
    assert 5 <= units <= MOST_UNITS
