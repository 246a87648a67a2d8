"""The error follows a loss scale: whatever it does, results are those without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from powersgd_triton.ops.step import LARGEST_SCALE, LossScale
from tests.support.distributed import run
from tests.support.small import MANY, RANK_2, WIDTH, stack
from tests.support.training import batch, flat, gradients_of, squared_error

SHAPES = {"a": (12, 10), "b": (9,), "c": (20, 16), "d": (12, 10)}
SCALES = [1.0, 65536.0, 65536.0, 32768.0, 262144.0, 2.0**-10, 1.0, 1.0]
"""Powers of two, so that nothing rounds."""

INF = float("inf")


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def scaled(named: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: tensor * factor for name, tensor in named.items()}


def results(compressor: Compressor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    out = compressor.decompress(compressor.compress(named))
    assert isinstance(out, dict)
    return out


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


TORCH = [{}, {"algorithm": "alternating"}, {"iterations": 2}, {"error_dtype": "bf16"}]
TRITON = [{"backend": "triton"}, {"backend": "triton", "algorithm": "alternating"}]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(
    ("fields", "spoiled", "scales"),
    [
        *((fields, spoiled, SCALES) for fields in TORCH for spoiled in (None, 1, 4)),
        *((fields, 1, SCALES[:4]) for fields in TRITON),
    ],
    ids=str,
)
def test_results_are_those_without_a_scale(fields: dict[str, Any], spoiled: int | None, scales: list[float]):
    config = PowerSGDConfig(rank=2, min_compression_rate=0, **{"backend": "torch", **fields})
    plain, following = Compressor(config, SHAPES), Compressor(config, SHAPES)
    scale = 1.0
    following.attach(lambda: scale)
    for step, scale in enumerate(scales):
        given = gradients(step)
        if step == spoiled:
            given["c"][3, 4] = INF
        expected, got = results(plain, given), results(following, scaled(given, scale))
        if step == spoiled:
            assert got["c"].isnan().all()
        else:
            assert_same_bits(expected, scaled(got, 1 / scale))
    assert_same_bits(plain.error(), following.error())


def test_without_following_it_the_error_has_the_wrong_size():
    config = PowerSGDConfig(rank=2, min_compression_rate=0)
    plain, ignorant = Compressor(config, SHAPES), Compressor(config, SHAPES)
    for step, scale in enumerate([1.0, 1024.0]):
        expected, got = results(plain, gradients(step)), results(ignorant, scaled(gradients(step), scale))
    assert (expected["c"] - got["c"] / scale).norm() > 0.1 * expected["c"].norm()


def test_checkpoint_is_not_scaled_and_goes_on_at_another_scale():
    config = PowerSGDConfig(rank=2, min_compression_rate=0)
    plain, following, resumed = (Compressor(config, SHAPES) for _ in range(3))
    following.attach(lambda: 1024.0)
    resumed.attach(lambda: 16.0)
    for step in range(4):
        results(plain, gradients(step))
        results(following, scaled(gradients(step), 1024.0))
    saved, expected = following.state_dict(), plain.state_dict()
    for name, parts in expected["matrices"].items():
        assert_same_bits(parts, saved["matrices"][name])
    resumed.load_state_dict(saved)
    for step in range(4, 7):
        assert_same_bits(
            results(plain, gradients(step)), scaled(results(resumed, scaled(gradients(step), 16.0)), 1 / 16.0)
        )


def test_scale_that_appears_and_disappears():
    config = PowerSGDConfig(rank=2, min_compression_rate=0)
    plain, following = Compressor(config, SHAPES), Compressor(config, SHAPES)
    scale: float | None = None
    following.attach(lambda: scale)
    for step, scale in enumerate([None, 8.0, None, None, 2.0]):
        factor = scale or 1.0
        expected, got = results(plain, gradients(step)), results(following, scaled(gradients(step), factor))
        assert_same_bits(expected, scaled(got, 1 / factor))


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


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF, 0.0, -2.0])
@pytest.mark.parametrize("fields", [{}, {"algorithm": "alternating"}, {"error_dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_a_tensor_that_is_no_scale_leaves_the_last_one_in_force(bad: float, fields: dict[str, Any], first: bool):
    """The step is skipped if its gradients show it, and otherwise an ordinary step at the last scale."""
    config = PowerSGDConfig(rank=2, min_compression_rate=0, backend="torch", **fields)
    plain, following = Compressor(config, SHAPES), Compressor(config, SHAPES)
    scale = torch.ones(1)
    following.attach(lambda: scale)
    used = 1.0
    for step, value in enumerate([bad, 4.0, bad, bad, 16.0] if first else [8.0, bad, 8.0, bad, 2.0]):
        scale = torch.full((1,), value)
        used = used if value == bad or value != value else value
        given = gradients(step)
        if step == 3:
            given["c"][3, 4] = INF
        expected, got = results(plain, given), results(following, scaled(given, used))
        if step == 3:
            assert got["c"].isnan().all()
        else:
            assert_same_bits(expected, scaled(got, 1 / used))
    assert_same_bits(plain.error(), following.error())


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
    compressor = Compressor(PowerSGDConfig(rank=2, min_compression_rate=0), SHAPES)
    results(compressor, gradients(0))
    before = compressor.state_dict()
    compressor.attach(lambda: value)
    with pytest.raises(kind, match=message):
        compressor.compress(gradients(1))
    compressor.attach(lambda: 1.0)
    assert_same_bits(
        {name: parts["error"] for name, parts in before["matrices"].items()},
        {name: parts["error"] for name, parts in compressor.state_dict()["matrices"].items()},
    )


def test_what_is_no_source_is_refused():
    compressor = Compressor(PowerSGDConfig(), SHAPES)
    with pytest.raises(TypeError, match=r"expected a torch.amp.GradScaler or a function; got float"):
        compressor.attach(2.0)  # type: ignore[arg-type]


# DDP ----------------------------------------------------------------------------------------------------------------

OVERFLOWS = (5, 6)


def train(worker: int, scaler: torch.amp.GradScaler | None) -> dict[str, Any]:
    """Ten steps; in some of them one worker's gradient overflows and the optimizer skips."""
    model = stack()
    state = PowerSGDState(None, module=model, **RANK_2)
    if scaler is not None:
        state.attach(scaler)
    replica = DistributedDataParallel(model, bucket_cap_mb=MANY, find_unused_parameters=True)
    replica.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for step in range(10):
        optimizer.zero_grad()
        inputs, targets = batch(worker, step, width=WIDTH)
        loss = squared_error(replica(inputs), targets)
        if step in OVERFLOWS and worker == 1:
            # The first layer's bucket is the last one.
            loss = loss + next(model.parameters())[0, 0] * INF
        if scaler is None:
            loss.backward()
            if flat(gradients_of(model)).isfinite().all():
                optimizer.step()
        else:
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return {"weights": flat(dict(model.named_parameters())).detach(), "error": state.error(), "scales": scales}


def with_and_without(worker: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return train(worker, None), train(worker, torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2))


def test_ddp_with_a_grad_scaler():
    for plain, with_scaler in run(with_and_without, 2):
        assert len(set(with_scaler["scales"])) >= 3
        assert torch.equal(plain["weights"], with_scaler["weights"])
        assert_same_bits(plain["error"], with_scaler["error"])
        assert all(error.any() for error in plain["error"].values())
