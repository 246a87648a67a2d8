"""Finite factors whose product does not fit the gradients' dtype: the step does not count, and nothing is lost."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor
from powersgd_triton.compressor import Compressed
from powersgd_triton.ops.products import reconstruct
from powersgd_triton.ops.reference import may_overflow
from tests.support.checks import everything, gradients, poisoned, step
from tests.support.device import EMULATED, INTERPRETED
from tests.support.held import gamma
from tests.support.lockstep import Fleet
from tests.support.thinned import thinned

SHAPES = {"large": (8, 8), "twin": (8, 8), "other": (5, 7), "bias": (6,)}
# The gradients are held for a while, then turned, then small: what was carried leaves again.
FACTORS = [1.0, 1.0, 1.0, -0.9, -0.9, -0.9, 0.01, 0.01]
MODES: dict[str, dict[str, Any]] = {
    "standard": {},
    "alternating": {"algorithm": "alternating"},
    "twice": {"iterations": 2, "backend": "torch"},
    "triton": {"backend": "triton"},
    "triton alternating": {"backend": "triton", "algorithm": "alternating"},
}


def fixed() -> dict[str, Tensor]:
    """Gradients of which the average of a few steps does not fit into fp16."""
    generator = torch.Generator().manual_seed(0)
    largest = {"large": 20000.0, "twin": 10.0, "other": 1.0, "bias": 1.0}
    given = {name: torch.randn(shape, generator=generator) * largest[name] for name, shape in SHAPES.items()}
    return {name: tensor.clamp(-60000, 60000).half() for name, tensor in given.items()}


def compressor_for(mode: str) -> Compressor:
    fields = MODES[mode]
    if fields.get("backend") == "triton" and not (INTERPRETED or EMULATED):
        pytest.skip("kernels are compiled for the GPU")
    return Compressor(everything(rank=1, **{"backend": "torch", **fields}), SHAPES)


def written(compressor: Compressor, compressed: Compressed, dtype: torch.dtype) -> tuple[bool, dict[str, Tensor]]:
    """Averages in a dtype, and whether they fit it."""
    averages = poisoned(SHAPES, dtype)
    compressor.decompress(compressed, out=averages)
    return all(bool(tensor.isfinite().all()) for tensor in averages.values()), averages


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@thinned("mode, falls", list(MODES), (False, True), together=1)
def test_nothing_is_lost_where_an_average_does_not_fit(mode: str, falls: bool) -> None:
    """At one scale, the gradients shrink in the end. Or the scale falls until all averages fit."""
    compressor, scale, applied = compressor_for(mode), torch.ones(()), list[bool]()
    compressor.attach(lambda: scale)
    balance = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items() if name != "bias"}
    size = {name: tensor.clone() for name, tensor in balance.items()}
    for number, factor in enumerate([1.0] * 8 if falls else FACTORS):
        given = {name: (scale * factor * tensor.float()).half() for name, tensor in fixed().items()}
        compressed = compressor.compress(given)
        # What the optimizer looks at; the second time decides nothing, whichever dtype that has.
        wide = falls and number == 3
        dtypes = (torch.float32, torch.float16) if wide else (torch.float16, torch.float32)
        (counts, one), (_, other) = (written(compressor, compressed, dtype) for dtype in dtypes)
        averages = one if wide else other
        assert bool(compressed.verdict) == counts
        assert counts or not wide
        applied.append(counts)
        errors = compressor.error()
        for name in balance:
            # Tensors whose averages do fit are skipped with the others, and carried with them.
            balance[name] += given[name].double() / scale
            if counts:
                balance[name] -= averages[name].double() / scale
            assert averages[name].isfinite().all()
            size[name] += (given[name].double().abs() + 2 * averages[name].abs()) / scale + errors[name].abs()
            tolerance = gamma(16, torch.float32) * size[name]
            assert ((errors[name].double() - balance[name]).abs() <= tolerance).all(), name
        if falls and not counts:
            scale = scale / 2
    assert not all(applied[:3])
    assert all(applied[-2:])


def test_without_a_loss_scale_steps_fit_again_when_gradients_are_small() -> None:
    """A scaler that no one has told us of shrinks gradients, not what would be carried."""
    compressor = Compressor(everything(rank=1, backend="torch"), SHAPES)
    history: list[bool] = []
    for number in range(24):
        scale = 2.0 ** -sum(not fitted for fitted in history)
        given = {name: (scale * tensor.float()).half() for name, tensor in fixed().items()}
        compressed = compressor.compress(given)
        history.append(written(compressor, compressed, torch.float16)[0])
        assert compressed.verdict == 1, number
    assert False in history
    assert all(history[-8:])


def test_leave_error_keeps_a_gradient_whose_average_does_not_fit() -> None:
    """Without error feedback what is owed is in the gradients, for the next step."""
    compressor = Compressor(everything(rank=1, error_feedback=False), {"w": (8, 8)})
    compressor.attach(lambda: 1.0)
    # Of rank 1, as the average is, so that the product in fp32 would leave next to nothing.
    G = torch.full((8, 8), 60000.0)
    compressed = compressor.compress({"w": G})
    compressor.decompress(compressed, out={"w": torch.empty(8, 8, dtype=torch.float16)})
    given = {"w": G.clone()}
    compressor.leave_error(compressed, given)
    assert float(given["w"].abs().max()) < 1
    compressed = compressor.compress({"w": 2 * G})
    compressor.decompress(compressed, out={"w": torch.empty(8, 8, dtype=torch.float16)})
    given = {"w": 2 * G}
    assert compressor.leave_error(compressed, given) == 0
    assert torch.equal(given["w"], 2 * G)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_single_element_is_found(dtype: torch.dtype) -> None:
    for rank, (share, expected) in itertools.product((1, 3), ((0.99, 1.0), (1.01, 0.0))):
        P, Q = torch.zeros(2, 9, rank), torch.zeros(2, 7, rank)
        P[1, 8, rank - 1], Q[1, 6, rank - 1] = 4.0, torch.finfo(dtype).max / 4 * share
        out = list(torch.full((2, 9, 7), torch.nan, dtype=dtype))
        verdict = torch.ones(())
        reconstruct([(P, Q)], out=[out], verdict=verdict)
        assert float(verdict) == expected
        assert bool(torch.stack(out).isfinite().all()) == bool(expected)


def test_factors_tell_that_nothing_can_overflow() -> None:
    """One look at the factors saves the look at what was written, for gradients of any usual size."""
    for p, q, expected in (
        (1.0, -30000.0, False), (1.0, 40000.0, True), (-3.0, 30000.0, True), (0.0, 3e38, False),
        (1.0, torch.nan, True), (1.0, -torch.inf, True), (torch.nan, 0.0, True),
    ):  # fmt: skip
        P, Q = torch.zeros(1, 4, 1), torch.zeros(1, 3, 1)
        P[0, 2], Q[0, 1] = p, q
        assert may_overflow(P, Q, torch.float16) is expected


@pytest.mark.parametrize(
    ("workers", "mode", "error_dtype"),
    [(1, "standard", None), (2, "standard", "bf16"), (1, "alternating", "bf16"), (2, "alternating", None),
     (1, "triton alternating", "bf16")],
)  # fmt: skip
def test_a_matrix_of_the_largest_numbers_does_not_stop_later_steps(workers: int, mode: str, error_dtype: str | None):
    """Nor the most that such a step can leave in the errors. One step meets the error of each turn."""
    compressor_for(mode)
    shapes = {"w": (24, 18), "v": (13, 2)}
    fleet = Fleet(everything(**{"backend": "torch", **MODES[mode], "error_dtype": error_dtype}), shapes, workers)
    for number in range(8):
        given = [gradients(10 * number + worker, shapes) for worker in range(workers)]
        if number == 1:
            given = [{name: G.sign() * 3.4e38 for name, G in own.items()} for own in given]
        (run,) = fleet.step(given, [list(shapes)])
        if number == 1:
            for matrix in (matrix for engine in fleet.engines for matrix in engine.residuals.matrices.values()):
                assert matrix.error is not None
                matrix.error.fill_(3.38e38)
        if number > 4:
            assert all(bool(verdict) for verdict in run.verdicts)
            assert all(average.isfinite().all() for own in run.averages for average in own.values())
            assert run.averages[0]["w"].any()
    assert all(error.isfinite().all() for own in fleet.errors() for error in own.values())


def test_an_error_that_overflows_when_it_is_written_down_stays_finite():
    """M and the factors may be in range and M − P̂ Qᵀ not; every state that is saved must be one that can be loaded."""
    compressor = Compressor(everything(rank=1, algorithm="alternating"), {"w": (13, 2)})
    for sign in (1.0, -1.0, 1.0):
        step(compressor, {"w": torch.full((13, 2), sign * 3.4e38)})
        assert compressor.error()["w"].isfinite().all()
        compressor.load_state_dict(compressor.state_dict())
