"""The plain loop's interface means what the reference implementation's does. The table has the rest."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.integrations.optimizer import AllReduce, Config, PowerSGD, optimizer_step, params_in_optimizer
from tests.support.checks import gradients
from tests.support.distributed import make_test
from tests.support.training import relative

SHAPES: dict[str, tuple[int, ...]] = {"0": (30, 20), "1": (20,), "2": (12, 3, 3, 3), "3": (30, 20), "4": ()}
COMPRESSED = ("0", "2", "3")


@pytest.mark.parametrize("products", [1, 2, 3])
def test_gradients_keep_what_a_compressor_keeps(products: int) -> None:
    """Averages and errors are those of the alternating algorithm, whose own tests compare it with a model."""
    fields: dict[str, Any] = {"rank": 2, "min_compression_rate": 1}
    loop = PowerSGD(
        [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES.values()],
        Config(**fields, num_iters_per_step=products, start_compressing_after_num_steps=2),
    )
    config = PowerSGDConfig(**fields, algorithm="alternating", iterations=products, start_iter=2, error_dtype="fp32")
    compressor = Compressor(config, SHAPES)
    errors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(6):
        given = gradients(step, SHAPES, torch.float64)
        # Errors are left in gradients that are not contiguous, too.
        inputs = [torch.stack([errors[name] + G] * 2, dim=-1)[..., 0] for name, G in given.items()]
        averages = loop.aggregate(inputs)
        expected = compressor.decompress(compressor.compress(given))
        errors = dict(zip(SHAPES, inputs, strict=True))
        assert isinstance(expected, dict)
        kept = compressor.error()
        for name, average in zip(SHAPES, averages, strict=True):
            torch.testing.assert_close(average, expected[name], rtol=0, atol=1e-4)
            assert (
                errors[name] - kept[name].view(errors[name].shape) if name in kept else errors[name]
            ).abs().max() < 1e-4
        assert sorted(kept) == (sorted(COMPRESSED) if step >= 2 else sorted(kept))
    assert errors["0"].any()


def powersgd(**fields: Any) -> PowerSGD:
    settings = {"rank": 2, "min_compression_rate": 1, "start_compressing_after_num_steps": 0, **fields}
    return PowerSGD([torch.zeros(shape) for shape in SHAPES.values()], Config(**settings))


@pytest.mark.parametrize(("where", "value"), [("0", float("inf")), ("0", float("nan")), ("1", float("inf"))])
def test_non_finite_elements_are_zeroed_and_counted(where: str, value: float):
    aggregator = powersgd()
    aggregator.aggregate(list(gradients(0, SHAPES).values()))
    given = gradients(1, SHAPES)
    given[where].view(-1)[:3] = value
    expected = {name: torch.where(G.isfinite(), G, 0) for name, G in given.items()}
    averages = dict(zip(SHAPES, aggregator.aggregate(list(given.values())), strict=True))
    assert not averages[where].isfinite().all()
    assert aggregator.dropped_elements == 3
    assert all(averages[name].isnan().all() for name in COMPRESSED)
    assert all(torch.equal(given[name], expected[name]) for name in SHAPES)
    assert all(average.isfinite().all() for average in aggregator.aggregate(list(given.values())))
    # Nothing full-size is kept: the gradients have the errors.
    assert all(matrix.error is None for matrix in aggregator._compressor._engine.residuals.matrices.values())


def test_a_step_applies_averages_and_leaves_errors_in_gradients() -> None:
    """Also with parameters without gradients, and if it fails."""
    weight, idle = nn.Parameter(torch.ones(30, 20)), nn.Parameter(torch.ones(30, 20))
    optimizer = torch.optim.SGD([weight, idle], lr=0.5)
    assert params_in_optimizer(optimizer) == [weight, idle]
    aggregator = PowerSGD([weight, idle], Config(1, 1, 1, 0))
    weight.grad = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    gradient, before = weight.grad, weight.grad.clone()
    optimizer_step(optimizer, aggregator)
    assert weight.grad is gradient
    assert (1 - weight.detach()).norm() > 0.1
    torch.testing.assert_close(2 * (1 - weight.detach()), before - gradient, rtol=0, atol=1e-5)
    assert idle.grad is not None
    assert not idle.grad.any()
    assert torch.equal(idle.detach(), torch.ones(30, 20))

    def broken() -> None:
        raise RuntimeError("no step")

    optimizer.step = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(RuntimeError, match="no step"):
        optimizer_step(optimizer, aggregator)
    assert weight.grad is gradient


def test_frozen_parameters_and_their_errors_stay_as_they_are() -> None:
    """Frozen from the beginning, and in the middle, when something is still to be sent."""
    net = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24))
    net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    aggregator = PowerSGD(params_in_optimizer(optimizer), Config(1, start_compressing_after_num_steps=0))
    for step in range(4):
        if step == 2:
            net[1].requires_grad_(False)
            before = [(p, p.detach().clone(), p.grad) for p in [*net[0].parameters(), *net[1].parameters()]]
            kept = [None if grad is None else grad.clone() for *_, grad in before]
            assert kept[2] is not None
        net(torch.randn(3, 24)).square().mean().backward()
        optimizer_step(optimizer, aggregator)
    for (parameter, value, _), grad in zip(before, kept, strict=True):
        assert torch.equal(parameter, value)
        assert grad is None or (parameter.grad is not None and torch.equal(parameter.grad, grad))


def test_wrong_arguments_and_an_optimizer_with_a_closure_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(TypeError, match="a Config or a PowerSGDConfig; got int"):
        PowerSGD([weight], 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"its own Config\(rank=…\).*got a PowerSGDConfig with rank=3"):
        PowerSGD([weight], PowerSGDConfig(rank=3))
    for wrong in (nn.Linear(2, 2), [[weight]]):
        with pytest.raises(TypeError, match=r"params must be tensors.*params_in_optimizer.*got a (Linear|list)"):
            PowerSGD(wrong, Config(1))  # type: ignore[arg-type]
    aggregator = PowerSGD([weight], Config(1))
    with pytest.raises(TypeError, match="an optimizer and an Aggregator; got a SGD"):
        optimizer_step(aggregator, torch.optim.SGD([weight]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs no closure; got LBFGS"):
        optimizer_step(torch.optim.LBFGS([weight]), aggregator)
    assert aggregator.step_counter == 0


def test_wrong_gradients_are_refused_and_nothing_changes() -> None:
    aggregator = powersgd()
    given = list(gradients(0, SHAPES).values())
    copies = [G.clone() for G in given]
    # Errors could not be written to an expanded gradient.
    expanded = [torch.ones(1, 20).expand(30, 20), *given[1:]]
    for wrong, said in (
        (given[:-1], r"(expected|shape).*params_in_optimizer"),
        ([*given[:-1], torch.zeros(3)], r"(expected|shape).*params_in_optimizer"),
        (expanded, "share memory"),
    ):
        with pytest.raises(ValueError, match=said):
            aggregator.aggregate(wrong)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    assert aggregator.step_counter == 0
    assert AllReduce().aggregate([]) == []
    assert Config(rank=3) == (3, 2, 1, 100), "the reference implementation's defaults"


def frozen(worker: int, world_size: int) -> None:
    """A frozen parameter loses no error of quantized gradients."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer, total = torch.optim.SGD([weight], lr=1.0), torch.zeros(64, 64)
    aggregator = PowerSGD([weight], PowerSGDConfig(quantize="ternary"))
    for step in range(9):
        weight.requires_grad_(step % 6 < 3)
        if weight.requires_grad:
            gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(10 * step + worker))
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
            total += gradient
        optimizer_step(optimizer, aggregator)
    assert weight.grad is not None
    left = total + weight.detach() - weight.grad - aggregator._compressor.error()["0"]
    dist.all_reduce(left)
    torch.testing.assert_close(left, torch.zeros(64, 64), rtol=0, atol=1e-4)


def quantized(worker: int, world_size: int) -> None:
    """Nothing is lost, also in a step that is not finite on one worker. Gradients keep something only then."""
    for name in ("int8", "int4"):
        loop = PowerSGD([torch.zeros(shape) for shape in SHAPES.values()], PowerSGDConfig(quantize=name))
        kept = [torch.zeros(shape) for shape in SHAPES.values()]
        given, sent = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES.values()] for _ in range(2))
        for number in range(4):
            own, spoiled = [*gradients(10 * number + worker, SHAPES).values()], number == 2
            if spoiled and worker:
                own[0].view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
            for total, gradient, element in zip(given, own, kept, strict=True):
                total += torch.where(gradient.isfinite(), gradient, 0)
                element += gradient
            averages = loop.aggregate(kept)
            assert all(average.isfinite().all() for average in averages) != spoiled
            assert all(element.any() == spoiled for element in kept)
            for total, average in zip(sent, averages, strict=True):
                total += 0 if spoiled else average
        assert loop.dropped_elements == 3 * worker
        errors = loop._compressor.error()
        assert [*errors] == ([*SHAPES] if name == "int4" else [])
        mean = Communicator().mean
        for index, (total, found) in enumerate(zip(given, sent, strict=True)):
            left = mean(errors[str(index)].double()) if errors else 0
            # Without errors, each of three averages is rounded by half a percent or so.
            assert relative(found + left, mean(total)) < (1e-6 if errors else 0.02)


test_on_two_workers = make_test([frozen, quantized], 2)
