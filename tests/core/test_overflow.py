"""Finite factors whose product does not fit the gradients' dtype: the step does not count, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor
from powersgd_triton.ops import reference
from powersgd_triton.ops.reference import may_overflow, reconstruct_reference
from tests.support.checks import everything, poisoned
from tests.support.device import INTERPRETED
from tests.support.fuzzing import gamma
from tests.support.lockstep import Fleet

SHAPES = {"large": (8, 8), "twin": (8, 8), "other": (5, 7), "bias": (6,)}
# The gradients are held for a while, then turned, then small: what was carried leaves again.
FACTORS = [1.0, 1.0, 1.0, -0.9, -0.9, -0.9, 0.01, 0.01]
MODES: dict[str, dict[str, Any]] = {
    "standard": {},
    "one by one": {"batch_by_shape": False},
    "alternating": {"algorithm": "alternating"},
    "twice": {"iterations": 2, "backend": "torch"},
    "triton": {"backend": "triton"},
    "triton alternating": {"backend": "triton", "algorithm": "alternating"},
}


def fixed(dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Gradients of which the average of a few steps does not fit into fp16."""
    generator = torch.Generator().manual_seed(0)
    largest = {"large": 20000.0, "twin": 10.0, "other": 1.0, "bias": 1.0}
    given = {name: torch.randn(shape, generator=generator) * largest[name] for name, shape in SHAPES.items()}
    return {name: tensor.clamp(-60000, 60000).to(dtype) for name, tensor in given.items()}


def compressor_for(mode: str) -> Compressor:
    fields = MODES[mode]
    if fields.get("backend") == "triton" and not INTERPRETED:
        pytest.skip("kernels are compiled for the GPU")
    return Compressor(everything(rank=1, **{"backend": "torch", **fields}), SHAPES)


def fits(tensors: dict[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def step(compressor: Compressor, given: dict[str, Tensor]) -> tuple[bool, dict[str, Tensor]]:
    """Whether the averages fit fp16, which is what the optimizer looks at; and what they are in fp32."""
    compressed = compressor.compress(given)
    narrow = poisoned(SHAPES, torch.float16)
    compressor.decompress(compressed, out=narrow)
    assert bool(compressed.verdict) == fits(narrow)
    wide = poisoned(SHAPES)
    compressor.decompress(compressed, out=wide)
    assert bool(compressed.verdict) == fits(narrow), "the second time decides nothing"
    return fits(narrow), wide


# A step in the interpreter takes a third of a second.
IN_THE_INTERPRETER = {("triton", True), ("triton alternating", False)}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    ("mode", "falls"),
    [
        pytest.param(mode, falls, marks=[pytest.mark.slow] * ((mode, falls) in IN_THE_INTERPRETER))
        for mode in MODES
        for falls in (False, True)
    ],
)
def test_nothing_is_lost_where_an_average_does_not_fit(mode: str, falls: bool) -> None:
    """At one scale, the gradients shrink in the end. Or the scale falls until all averages fit."""
    compressor, scale, applied = compressor_for(mode), torch.ones(()), list[bool]()
    compressor.attach(lambda: scale)
    balance = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items() if name != "bias"}
    size = {name: tensor.clone() for name, tensor in balance.items()}
    for factor in [1.0] * 9 if falls else FACTORS:
        given = {name: (scale * factor * tensor.float()).half() for name, tensor in fixed().items()}
        counts, averages = step(compressor, given)
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


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("mode", MODES)
def test_another_dtype_afterwards_does_no_harm(mode: str) -> None:
    """Averages that were applied in fp32, and then looked at in fp16, are not owed any more."""
    compressor = compressor_for(mode)
    compressor.attach(lambda: 1.0)
    given = {name: 3 * tensor for name, tensor in fixed(torch.float32).items()}
    compressed = compressor.compress(given)
    averages = poisoned(SHAPES)
    compressor.decompress(compressed, out=averages)
    narrow = poisoned(SHAPES, torch.float16)
    compressor.decompress(compressed, out=narrow)
    assert not fits(narrow)
    assert compressed.verdict == 1
    # What was subtracted is what was written.
    E, G = compressor.error()["large"], given["large"]
    size = G.abs() + 2 * averages["large"].abs()
    assert ((E - (G - averages["large"])).abs() <= gamma(16, torch.float32) * size).all()


def test_without_a_loss_scale_steps_fit_again_when_gradients_are_small() -> None:
    """A scaler that no one has told us of shrinks gradients, not what would be carried."""
    compressor = Compressor(everything(rank=1, backend="torch"), SHAPES)
    history: list[bool] = []
    for number in range(24):
        scale = 2.0 ** -sum(not fitted for fitted in history)
        given = {name: (scale * tensor.float()).half() for name, tensor in fixed().items()}
        compressed = compressor.compress(given)
        averages = poisoned(SHAPES, torch.float16)
        compressor.decompress(compressed, out=averages)
        history.append(fits(averages))
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
@pytest.mark.parametrize("rank", [1, 3])
def test_reference_finds_a_single_element(rank: int, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for share, expected in ((0.99, 1.0), (1.01, 0.0)):
        P, Q = torch.zeros(2, 9, rank), torch.zeros(2, 7, rank)
        P[1, 8, rank - 1], Q[1, 6, rank - 1] = 4.0, largest / 4 * share
        out = list(torch.full((2, 9, 7), torch.nan, dtype=dtype))
        verdict = torch.ones(())
        reconstruct_reference(P, Q, out=out, verdict=verdict)
        assert float(verdict) == expected
        assert bool(torch.stack(out).isfinite().all()) == bool(expected)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [((1.0, 30000.0), False), ((1.0, -30000.0), False), ((1.0, 40000.0), True), ((-3.0, 30000.0), True),
     ((0.0, 3e38), False), ((1.0, torch.nan), True), ((1.0, -torch.inf), True), ((torch.nan, 0.0), True)],
)  # fmt: skip
def test_factors_tell_that_nothing_can_overflow(entries: Sequence[float], expected: bool) -> None:
    """One look at the factors saves the look at what was written, for gradients of any usual size."""
    P, Q = torch.zeros(1, 4, 1), torch.zeros(1, 3, 1)
    P[0, 2], Q[0, 1] = entries
    assert may_overflow(P, Q, torch.float16) is expected


def test_only_what_may_overflow_is_looked_at() -> None:
    P, Q = torch.ones(1, 9, 2), torch.ones(1, 7, 2)
    for factor, expected in ((1.0, []), (1e4, []), (1e5, [63])):
        with mock.patch.object(reference, "note_overflow", wraps=reference.note_overflow) as note:
            reconstruct_reference(P, factor * Q, out=[torch.empty(9, 7, dtype=torch.float16)], verdict=torch.ones(()))
        assert [look.args[0].numel() for look in note.call_args_list] == expected


@pytest.mark.parametrize(
    ("workers", "mode", "error_dtype"),
    [(1, "standard", None), (2, "standard", "bf16"), (1, "alternating", "bf16"), (2, "alternating", None),
     (1, "triton alternating", "bf16")],
)  # fmt: skip
def test_a_matrix_of_the_largest_numbers_does_not_stop_later_steps(workers: int, mode: str, error_dtype: str | None):
    fields = {"backend": "torch", **MODES[mode], "error_dtype": error_dtype}
    if fields["backend"] == "triton" and not INTERPRETED:
        pytest.skip("kernels are compiled for the GPU")
    shapes = {"w": (24, 18), "v": (13, 2)}
    for seed in range(1 if fields["backend"] == "triton" else 6):
        generator = torch.Generator().manual_seed(seed)

        def given(size: float = 0.0, generator: torch.Generator = generator) -> list[dict[str, Tensor]]:
            random = [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(workers)]
            return [{n: g.sign() * size if size else g for n, g in own.items()} for own in random]

        fleet = Fleet(everything(rank=2, **fields), shapes, workers)
        fleet.step(given(), [list(shapes)])
        fleet.step(given(3.4e38), [list(shapes)])
        for engine in fleet.engines:
            for matrix in engine.memory.matrices.values():
                assert matrix.error is not None
                # The most that such a step can leave.
                matrix.error.fill_(3.38e38)
        history = [fleet.step(given(), [list(shapes)])[0] for _ in range(6)]
        # One step meets the error of each turn.
        for run in history[-3:]:
            assert all(bool(verdict) for verdict in run.verdicts), (seed, [bool(r.verdicts[0]) for r in history])
            assert all(fits(own) for own in run.averages)
        assert all(fits(own) for own in fleet.errors())
        sent = [run.averages[0]["w"].abs().max() for run in history[-3:]]
        assert min(sent) > 0
