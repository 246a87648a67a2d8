"""The alternating algorithm, iterations and 16-bit error buffers, against a model written apart from the product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.comm.communicator import Communicator
from tests.support.checks import SHAPES, bases, everything, gradients, same_bits, step
from tests.support.distributed import outcome, run_cases
from tests.support.fp64_model import Model

# Unit roundoff of fp32 arithmetic.
U = 2.0**-24
SHAPE = (30, 20)
MODES: dict[str, dict[str, Any]] = {
    "alternating": {"algorithm": "alternating"},
    "alternating twice": {"algorithm": "alternating", "iterations": 2},
    "alternating three times": {"algorithm": "alternating", "iterations": 3},
    # The model does not explore.
    "standard twice": {"iterations": 2, "explore_every": 0},
}
modes = pytest.mark.parametrize("fields", MODES.values(), ids=MODES)


def started(rank: int, fields: dict[str, Any], workers: int = 1) -> tuple[Compressor, Model]:
    """A compressor and a model with the same bases, which the compressor draws when it sees its first gradient."""
    compressor = Compressor(everything(rank, **fields), {"w": SHAPE})
    twin = Compressor(everything(rank, **fields), {"w": SHAPE})
    generator = torch.Generator().manual_seed(99)
    left, right = (torch.linalg.qr(torch.randn(size, rank, generator=generator))[0] for size in SHAPE)
    twin.compress({"w": torch.ones(SHAPE)})
    saved = twin.state_dict()
    saved["iteration"] = 0
    parts = saved["matrices"]["w"]
    parts["basis"], parts["error"] = right, torch.zeros(SHAPE)
    if "left_basis" in parts:
        parts["left_basis"] = left
    compressor.load_state_dict(saved)
    errors = [torch.zeros(SHAPE)] * workers
    alternating = fields.get("algorithm") == "alternating"
    return compressor, Model(errors, left, right, fields.get("iterations", 1), alternating)


def distance(one: Tensor, other: Tensor, size: float) -> float:
    return float((one.double() - other.double()).abs().max()) / size


def compare(worker: int, world_size: int) -> dict[str, float]:
    """For each mode the largest difference from the model within ten steps, relative to the largest |M|."""
    found = {}
    for name, fields in MODES.items():
        compressor, model = started(3, fields, world_size)
        worst = 0.0
        for seed in range(10):
            # In fp64, so that what amplifies rounding does not hide what is wrong.
            given = [gradients(100 * seed + w, {"w": SHAPE})["w"].double() for w in range(world_size)]
            expected = model.step(given)
            got = step(compressor, {"w": given[worker]}, torch.float64)["w"]
            size = float(max(G.abs().max() for G in given) + max(E.abs().max() for E in model.errors))
            worst = max(worst, distance(got, expected, size))
            worst = max(worst, distance(compressor.error()["w"], model.errors[worker], size))
        found[name] = worst
    return found


@pytest.fixture(scope="module", params=[1, 2, 3])
def compared(request: pytest.FixtureRequest) -> list[dict[str, float]]:
    return outcome(run_cases([compare], request.param), compare)


def test_follows_the_model_on_any_number_of_workers(compared: list[dict[str, float]]):
    """Bases are restored from fp32, and repeated products amplify that: the first steps' 2⁻²⁴ by about a thousand."""
    for found in compared:
        assert max(found.values()) <= 1e-9, found


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nothing_is_lost(dtype: torch.dtype, fields: dict[str, Any]):
    compressor = Compressor(everything(2, **fields), SHAPES)
    wide = torch.promote_types(dtype, torch.float32)
    owed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    size = dict.fromkeys(SHAPES, 0.0)
    for seed in range(8):
        now = gradients(seed, dtype=dtype)
        got = step(compressor, now, wide)
        for name, G in now.items():
            size[name] += float((G.double().abs() + owed[name].abs()).max()) if G.numel() else 0.0
            owed[name] += G.double() - got[name].double()
    for name, error in compressor.error().items():
        u = torch.finfo(wide).eps / 2
        # A few roundings of |M| in every step, and in each product of up to six columns.
        assert (owed[name] - error.double()).abs().max() <= 16 * u * size[name], name


@modes
def test_gradient_of_low_rank_is_recovered(fields: dict[str, Any]):
    """With one product a step what is missing after a left product, made with stale bases, comes with the right one."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(size, 3, generator=generator))[0] for size in SHAPE)
    compressor = Compressor(everything(3, **fields), {"w": SHAPE})
    owed = torch.zeros(SHAPE)
    for index in range(8):
        G = left @ right.T * (index + 1)
        owed += G - step(compressor, {"w": G})["w"]
        if index % 2:
            assert owed.norm() <= 100 * (index + 1) * U * G.norm()


@modes
def test_full_rank_is_exact_after_two_steps(fields: dict[str, Any]):
    compressor = Compressor(everything(1000, **fields), {"w": (12, 12)})
    for seed in range(5):
        now = gradients(seed, {"w": (12, 12)})
        got = step(compressor, now)["w"]
        assert (got - now["w"]).norm() <= 200 * U * now["w"].norm()


@modes
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("when", [3, 4])
def test_non_finite_element_spoils_one_step_only(when: int, value: float, fields: dict[str, Any]):
    compressor = Compressor(everything(**fields), SHAPES)
    for seed in range(when):
        step(compressor, gradients(seed))
    error, basis = compressor.error(), bases(compressor)
    now = gradients(when)
    now["linear"][3, 5] = value
    got = step(compressor, now)
    assert all(got[name].isnan().all() for name in error)
    assert same_bits(bases(compressor), basis)
    for name, after in compressor.error().items():
        G = torch.where(now[name].isfinite(), now[name], 0).double()
        bound = U * ((error[name] + G).abs() + 2 * error[name].abs())
        assert ((after.double() - error[name].double()).abs() <= bound).all(), name
    for seed in range(when + 1, when + 4):
        assert all(tensor.isfinite().all() for tensor in step(compressor, gradients(seed)).values())


@modes
@pytest.mark.parametrize("saved_at", [1, 2])
def test_run_goes_on_from_a_checkpoint(saved_at: int, fields: dict[str, Any]):
    one, other = (Compressor(everything(**fields), SHAPES) for _ in range(2))
    for seed in range(saved_at):
        step(one, gradients(seed))
    other.load_state_dict(one.state_dict())
    for seed in range(saved_at, saved_at + 4):
        assert same_bits(step(one, gradients(seed)), step(other, gradients(seed)))


@modes
def test_checkpoint_of_another_mode_and_rank_is_taken_over(fields: dict[str, Any]):
    for before, after in (({}, fields), (fields, {})):
        old = Compressor(everything(3, **before), SHAPES)
        for seed in range(3):
            step(old, gradients(seed))
        new = Compressor(everything(5, **after), SHAPES)
        new.load_state_dict(old.state_dict())
        assert same_bits(new.error(), old.error())
        now = gradients(4)
        got, error = step(new, now), new.error()
        for name, E in old.error().items():
            owed = now[name].double() + E.double()
            assert (got[name].double() + error[name].double() - owed).abs().max() <= 16 * U * owed.abs().max()


def test_alternating_sends_one_message_and_standard_two():
    class Counting(Communicator):
        def __init__(self) -> None:
            super().__init__()
            self.sent: list[int] = []

        def all_reduce(self, tensor: Tensor) -> None:
            self.sent.append(tensor.numel())

    for fields, count in (
        ({}, 2),
        ({"iterations": 2}, 4),
        ({"algorithm": "alternating"}, 1),
        (MODES["alternating twice"], 2),
    ):
        compressor = Compressor(everything(**fields), SHAPES)
        communicator = Counting()
        compressor._engine.connect(communicator)
        for index in range(1, 5):
            step(compressor, gradients(index))
            assert len(communicator.sent) == index * count
            # The statistics are what was sent.
            assert compressor.compression_stats()[2] == sum(communicator.sent)


def test_alternating_needs_warm_start():
    with pytest.raises(ValueError, match="warm_start"):
        PowerSGDConfig(algorithm="alternating", warm_start=False)


@pytest.mark.parametrize("fields", [{}, *MODES.values()], ids=["standard", *MODES])
def test_16_bit_error_keeps_its_share(fields: dict[str, Any]):
    """What is lost in a step is at most the rounding of M to bf16."""
    compressor = Compressor(everything(error_dtype="bf16", **fields), {"w": SHAPE})
    owed = torch.zeros(SHAPE, dtype=torch.float64)
    for seed in range(6):
        G = gradients(seed, {"w": SHAPE})["w"]
        before = compressor.error().get("w", torch.zeros(SHAPE)).double()
        got = step(compressor, {"w": G})["w"].double()
        M = G.double() + before
        owed = M - got
        after = compressor.error()["w"]
        assert after.dtype == torch.bfloat16
        assert (after.double() - owed).abs().max() <= 2 * 2.0**-9 * (M.abs().max() + got.abs().max())


@pytest.mark.parametrize("name", [torch.bfloat16, "bf16", "bfloat16"])
def test_error_dtype_is_known_by_several_names(name: Any):
    assert PowerSGDConfig(error_dtype=name) == PowerSGDConfig(error_dtype="bfloat16")
    assert PowerSGDConfig.from_dict(PowerSGDConfig(error_dtype=name).to_dict()).error_dtype == "bfloat16"
    with pytest.raises(ValueError, match="error_dtype"):
        PowerSGDConfig(error_dtype="int8")
