"""Tensors of several matrices, such as the experts of a layer, are compressed like these matrices one by one."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import step
from tests.support.thinned import thinned

SHAPE = (3, 24, 20)
STEPS = 2


def gradients(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    experts = torch.randn(SHAPE, generator=generator)
    # No token was for this expert.
    experts[number % 3] = 0
    return {"experts": experts, "head": torch.randn(24, 20, generator=generator)}


def one_by_one(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**{f"experts[{i}]": expert for i, expert in enumerate(tensors["experts"])}, "head": tensors["head"]}


@thinned("backend, algorithm", ["triton", "torch"], ["standard", "alternating"], together=1)
def test_a_batch_is_its_matrices(backend: str, algorithm: str):
    config = PowerSGDConfig(rank=2, backend=backend, algorithm=algorithm)
    batch, single = Compressor(config, gradients(0)), Compressor(config, one_by_one(gradients(0)))
    owed = torch.zeros(SHAPE)
    for number in range(STEPS):
        given = gradients(number)
        compressed, expected = batch.compress(given), single.compress(one_by_one(given))
        averages = batch.decompress(compressed)
        assert isinstance(averages, dict)
        torch.testing.assert_close(one_by_one(averages), single.decompress(expected), rtol=0, atol=0)
        left, right = compressed.factors()["experts"]
        torch.testing.assert_close(left @ right.mT, averages["experts"])
        # Elements 100 to 1,259: parts of all three matrices.
        part = torch.empty(1160)
        compressed.backend.reconstruct_ranges({"experts": (100, part)}, None)
        torch.testing.assert_close(part, averages["experts"].flatten()[100:1260])
        owed += given["experts"] - averages["experts"]
    torch.testing.assert_close(one_by_one(batch.error()), single.error(), rtol=0, atol=1e-6)
    torch.testing.assert_close(batch.error()["experts"], owed, rtol=0, atol=1e-5)


def test_a_state_from_before_keeps_its_error():
    """Saved with one view, loaded with another: the error stays, and the basis starts again."""
    old = PowerSGDConfig(rank=1, matrices=lambda name, _: (1, 3, 480) if name == "experts" else None)
    before, after = Compressor(old, gradients(0)), Compressor(PowerSGDConfig(rank=2), gradients(0))
    before.compress(gradients(0))
    report = after.load_state_dict(before.state_dict())
    assert (report.reviewed, report.loaded) == (("experts",), ("head",))
    expected = before.error()["experts"]
    assert expected.any()
    torch.testing.assert_close(after.error()["experts"].view(SHAPE), expected)
    average = step(after, gradients(1))
    owed = expected + gradients(1)["experts"] - average["experts"]
    torch.testing.assert_close(after.error()["experts"], owed, rtol=0, atol=1e-5)
    assert after.load_state_dict(after.state_dict()).reviewed == ()


def test_ranks_of_idle_experts_are_planned():
    """After 100 steps without a gradient, a tensor gets ranks and is sent as before."""
    shapes = dict.fromkeys(("a", "b"), (4, 64, 64))
    compressor = Compressor(PowerSGDConfig(compression=8, replan_every=10, wire_dtype="fp32"), shapes)
    torch.manual_seed(0)
    low = {name: torch.randn(4, 64, 3) @ torch.randn(4, 3, 64) for name in shapes}
    average = torch.empty(0)
    for number in range(150):
        idle = 10 <= number < 110
        average = step(compressor, {"a": low["a"] * (not idle), "b": low["b"]})["a"]
    torch.testing.assert_close(average, low["a"], rtol=0.05, atol=0.05)
    assert all(tensor.matrices == (4, 64, 64) and tensor.rank >= 3 for tensor in compressor.report().tensors)


def test_what_is_a_matrix_can_be_said():
    views = {"qkv": (3, 8, 20), "router": (1, 1, 192)}
    config = PowerSGDConfig(rank=2, matrices=lambda name, _: views.get(name))
    shapes = {"qkv": (24, 20), "router": (4, 48), "layer.experts": (2, 24, 20)}
    tensors = Compressor(config, shapes).report().tensors
    assert [tensor.matrices for tensor in tensors] == [(3, 8, 20), (1, 1, 192), (2, 24, 20)]
    assert [tensor.rank for tensor in tensors] == [2, 0, 2]
    assert "24 × 20 as 3 of 8 × 20" in str(Compressor(config, shapes).report())
    for view in ((3, 7, 20), (3.0, 8, 20), (True, 24, 20), (24, 20), "qkv", ()):
        wrong = PowerSGDConfig(matrices=lambda *_, view=view: view)
        with pytest.raises(ValueError, match=r"matrices must return .* 480 elements, .* for 'qkv'; got ") as raised:
            Compressor(wrong, {"qkv": (24, 20)}).report()
        assert str(raised.value).endswith(repr(view))
    with pytest.raises(TypeError, match="matrices must be a function"):
        PowerSGDConfig(matrices=3)  # type: ignore[arg-type]
