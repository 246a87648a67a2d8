"""The error follows a loss scale: whatever it does, results are those without one."""

import itertools
from typing import Any

import pytest
import torch

from powersgd_triton import Compressor
from powersgd_triton.ops.step import LARGEST_SCALE, LossScale
from tests.support.checks import everything, gradients, same_bits, step

SHAPES = {"a": (12, 10), "b": (9,), "c": (20, 16), "d": (12, 10)}
SCALES = [None, 65536.0, 65536.0, 32768.0, None, 262144.0, 2.0**-10, 1.0]
"""Powers of two, so that nothing rounds."""

INF = float("inf")


class Pair:
    """A compressor that follows a loss scale, and one whose gradients are not scaled."""

    def __init__(self, **fields: Any) -> None:
        config = everything(2, **{"backend": "torch", **fields})
        self.plain, self.following = Compressor(config, SHAPES), Compressor(config, SHAPES)
        self.scale: Any = 1.0
        self.following.attach(lambda: self.scale)

    def step(self, number: int, used: float, spoiled: bool = False) -> None:
        """A step of both, with gradients multiplied by what the scale is taken for."""
        given = gradients(number, SHAPES)
        if spoiled:
            given["c"][3, 4] = INF
        expected = step(self.plain, given)
        got = step(self.following, {name: tensor * used for name, tensor in given.items()})
        if spoiled:
            assert got["c"].isnan().all()
        else:
            assert same_bits(expected, {name: tensor / used for name, tensor in got.items()})
        assert same_bits(self.plain.error(), self.following.error())


TORCH = [{}, {"algorithm": "alternating"}, {"iterations": 2}, {"error_dtype": "bf16"}]
TRITON = [{"backend": "triton"}, {"backend": "triton", "algorithm": "alternating"}]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(
    ("fields", "spoiled", "scales"),
    [
        *((fields, spoiled, SCALES) for fields in TORCH for spoiled in (None, 1, 5)),
        *((fields, 1, [None, 65536.0, 32768.0]) for fields in TRITON),
    ],
    ids=str,
)
def test_results_are_those_without_a_scale(fields: dict[str, Any], spoiled: int | None, scales: list[float | None]):
    pair = Pair(**fields)
    for number, pair.scale in enumerate(scales):
        pair.step(number, pair.scale or 1.0, number == spoiled)


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF, 0.0, -2.0])
def test_a_tensor_that_is_no_scale_leaves_the_last_one_in_force(bad: float):
    """The step is skipped if its gradients show it, and otherwise an ordinary step at the last scale."""
    values = [bad, 4.0, bad, bad, 16.0], [8.0, bad, 8.0, bad, 2.0]
    for fields, given in itertools.product(({}, {"algorithm": "alternating"}, {"error_dtype": "bf16"}), values):
        pair, used = Pair(**fields), 1.0
        for number, value in enumerate(given):
            pair.scale = torch.full((1,), value)
            used = used if value is bad else value
            pair.step(number, used, spoiled=number == 3)


def test_a_checkpoint_is_not_scaled_and_goes_on_at_another_scale():
    pair, resumed = Pair(), Pair()
    pair.scale, resumed.scale = 1024.0, 16.0
    for number in range(4):
        pair.step(number, 1024.0)
    saved, expected = pair.following.state_dict(), pair.plain.state_dict()
    assert all(same_bits(parts, saved["matrices"][name]) for name, parts in expected["matrices"].items())
    resumed.following.load_state_dict(saved)
    resumed.plain.load_state_dict(expected)
    for number in range(4, 7):
        resumed.step(number, 16.0)


def read(source: Any) -> Any:
    return LossScale(source).read(torch.device("cpu"))


def test_sources():
    """A scaler's scale is None before it is used; a number is one tensor, and a tensor is kept within bounds."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scale = LossScale(scaler)
    assert scale.read(torch.device("cpu")) is None
    scaler.scale(torch.ones(()))
    first = scale.read(torch.device("cpu"))
    scaler.update(1024.0)
    assert [first, scale.read(torch.device("cpu"))] == [4096, 1024]
    assert read(torch.amp.GradScaler("cpu", enabled=False)) is None
    number = LossScale(lambda: 8.0)
    assert number.read(torch.device("cpu")) is number.read(torch.device("cpu"))
    for value in (0.0, 1e-40, 1e30, INF):
        kept = read(lambda value=value: torch.full((1,), value))
        assert kept.shape == ()
        assert 1 / LARGEST_SCALE <= float(kept) <= LARGEST_SCALE


def test_what_is_no_scale_is_refused_before_anything_changes():
    pair = Pair()
    pair.step(0, 1.0)
    cases: list[tuple[Any, type[Exception], str]] = [
        (0.0, ValueError, "positive and finite; got 0.0"), (-1, ValueError, "got -1"), (INF, ValueError, "got inf"),
        ("1", TypeError, "got str"), (True, TypeError, "got bool"), (torch.ones(2), ValueError, r"shape \(2,\)"),
    ]  # fmt: skip
    for pair.scale, kind, message in cases:
        with pytest.raises(kind, match=message):
            pair.following.compress(gradients(1, SHAPES))
    with pytest.raises(TypeError, match=r"expected a torch.amp.GradScaler or a function; got float"):
        pair.following.attach(2.0)  # type: ignore[arg-type]
    pair.scale = 1.0
    assert pair.following.iteration == 1
    assert same_bits(pair.plain.error(), pair.following.error())
