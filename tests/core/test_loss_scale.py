"""The error follows a loss scale: whatever it does, results are those without one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.ops.step import LARGEST_SCALE, LossScale
from tests.support.checks import everything, same_bits
from tests.support.checks import gradients as random_gradients

SHAPES = {"a": (12, 10), "b": (9,), "c": (20, 16), "d": (12, 10)}
SCALES = [None, 65536.0, 65536.0, 32768.0, None, 262144.0, 2.0**-10, 1.0]
"""Powers of two, so that nothing rounds."""

INF = float("inf")


def gradients(step: int) -> dict[str, Tensor]:
    return random_gradients(step, SHAPES)


def scaled(named: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: tensor * factor for name, tensor in named.items()}


def results(compressor: Compressor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    out = compressor.decompress(compressor.compress(named))
    assert isinstance(out, dict)
    return out


class Pair:
    """A compressor that follows a loss scale, and one whose gradients are not scaled."""

    def __init__(self, **fields: Any) -> None:
        config = everything(2, **{"backend": "torch", **fields})
        self.plain, self.following = Compressor(config, SHAPES), Compressor(config, SHAPES)
        self.scale: Any = 1.0
        self.following.attach(lambda: self.scale)

    def step(self, number: int, used: float, spoiled: bool = False) -> None:
        """A step of both, with gradients multiplied by what the scale is taken for."""
        given = gradients(number)
        if spoiled:
            given["c"][3, 4] = INF
        expected, got = results(self.plain, given), results(self.following, scaled(given, used))
        if spoiled:
            assert got["c"].isnan().all()
        else:
            assert same_bits(expected, scaled(got, 1 / used))
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
    for step, pair.scale in enumerate(scales):
        pair.step(step, pair.scale or 1.0, step == spoiled)


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF, 0.0, -2.0])
def test_a_tensor_that_is_no_scale_leaves_the_last_one_in_force(bad: float):
    """The step is skipped if its gradients show it, and otherwise an ordinary step at the last scale."""
    values = [bad, 4.0, bad, bad, 16.0], [8.0, bad, 8.0, bad, 2.0]
    for fields, given in itertools.product(({}, {"algorithm": "alternating"}, {"error_dtype": "bf16"}), values):
        pair, used = Pair(**fields), 1.0
        for step, value in enumerate(given):
            pair.scale = torch.full((1,), value)
            used = used if value is bad else value
            pair.step(step, used, spoiled=step == 3)


def test_a_checkpoint_is_not_scaled_and_goes_on_at_another_scale():
    pair, resumed = Pair(), Pair()
    pair.scale, resumed.scale = 1024.0, 16.0
    for step in range(4):
        pair.step(step, 1024.0)
    saved, expected = pair.following.state_dict(), pair.plain.state_dict()
    assert all(same_bits(parts, saved["matrices"][name]) for name, parts in expected["matrices"].items())
    resumed.following.load_state_dict(saved)
    resumed.plain.load_state_dict(expected)
    for step in range(4, 7):
        resumed.step(step, 16.0)


# What is read -------------------------------------------------------------------------------------------------------


def test_grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scale, device = LossScale(scaler), torch.device("cpu")
    assert scale.read(device) is None
    scaler.scale(torch.ones(()))
    first = scale.read(device)
    assert first is not None
    assert first == 4096
    scaler.update(1024.0)
    assert scale.read(device) == 1024
    assert first == 4096
    assert LossScale(torch.amp.GradScaler("cpu", enabled=False)).read(device) is None


def test_the_same_number_is_one_tensor():
    scale = LossScale(lambda: 8.0)
    assert scale.read(torch.device("cpu")) is scale.read(torch.device("cpu"))


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e30, INF])
def test_tensors_are_kept_within_bounds(value: float):
    read = LossScale(lambda: torch.full((1,), value)).read(torch.device("cpu"))
    assert read is not None
    assert read.shape == ()
    assert 1 / LARGEST_SCALE <= float(read) <= LARGEST_SCALE


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (0.0, ValueError, "positive and finite; got 0.0"),
        (-1, ValueError, "got -1"),
        (INF, ValueError, "got inf"),
        ("1", TypeError, "got str"),
        (True, TypeError, "got bool"),
        (torch.ones(2), ValueError, r"shape \(2,\)"),
    ],
)
def test_what_is_no_scale_is_refused_before_anything_changes(value: Any, kind: type[Exception], message: str):
    pair = Pair()
    pair.step(0, 1.0)
    pair.scale = value
    with pytest.raises(kind, match=message):
        pair.following.compress(gradients(1))
    pair.scale = 1.0
    assert pair.following.iteration == 1
    assert same_bits(pair.plain.error(), pair.following.error())


def test_what_is_no_source_is_refused():
    compressor = Compressor(PowerSGDConfig(), SHAPES)
    with pytest.raises(TypeError, match=r"expected a torch.amp.GradScaler or a function; got float"):
        compressor.attach(2.0)  # type: ignore[arg-type]
