"""The plain loop's interface means what the reference implementation's does; see ``Reference``.

The table says that nothing is lost and that all workers have the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powersgd_triton.integrations.optimizer import AllReduce, Config, PowerSGD, optimizer_step, params_in_optimizer
from tests.support.checks import gradients
from tests.support.distributed import run

U = 2.0**-24
SHAPES: dict[str, tuple[int, ...]] = {"0": (30, 20), "1": (20,), "2": (12, 3, 3, 3), "3": (30, 20), "4": ()}
COMPRESSED = ("0", "2", "3")


class Reference:
    """epfml/powersgd's algorithm in fp64, on the gradients of all workers, from bases that were read elsewhere."""

    def __init__(self, config: Config, bases: dict[str, dict[str, Tensor]]) -> None:
        self.config = config
        self.left = {name: parts["left_basis"].double() for name, parts in bases.items()}
        self.right = {name: parts["basis"].double() for name, parts in bases.items()}
        self.counter = 0

    def aggregate(self, workers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Averages; the workers' gradients become their errors."""
        averages: dict[str, Tensor] = {name: torch.zeros_like(G) for name, G in workers[0].items()}
        repetitions = self.config.num_iters_per_step
        for name, average in averages.items():
            if name not in self.left:
                average += sum(own[name] for own in workers) / len(workers)
                for own in workers:
                    own[name].zero_()
                continue
            n = average.shape[0]
            for turn in range(self.counter * repetitions, (self.counter + 1) * repetitions):
                products = []
                sums: Any = 0
                for own in workers:
                    M = own[name].view(n, -1)
                    if turn % 2 == 0:
                        out = M.T @ self.left[name]
                        products.append(self.left[name] @ out.T)
                    else:
                        out = M @ self.right[name]
                        products.append(out @ self.right[name].T)
                    sums = sums + out
                    M -= products[-1]
                average.view(n, -1).add_(sum(products) / len(workers))
                bases = self.right if turn % 2 == 0 else self.left
                bases[name] = torch.linalg.qr(sums)[0]
        self.counter += 1
        return averages


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def follows_the_reference(worker: int, world_size: int) -> None:
    """Averages and errors in fp64, for one, two and three products a step.

    Seven steps of products of up to 30 terms, repeated on residuals, which amplifies rounding.
    """
    for repetitions in (1, 2, 3):
        config = Config(
            rank=2, min_compression_rate=1, num_iters_per_step=repetitions, start_compressing_after_num_steps=2
        )
        parameters = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES.values()]
        powersgd = PowerSGD(parameters, config)
        reference = None
        errors = [zeros() for _ in range(world_size)]
        for step in range(9):
            given = [gradients(100 * step + w, SHAPES, torch.float64) for w in range(world_size)]
            workers = [{name: given[w][name] + errors[w][name] for name in SHAPES} for w in range(world_size)]
            inputs = [workers[worker][name].clone() for name in SHAPES]
            if step == 2:
                # The first compressed step draws the bases: they are those of a twin that has seen nothing but zeros.
                twin = PowerSGD(parameters, config)
                twin._compressor._engine.step.iteration = step
                twin._compressor.compress(zeros())
                start = {**twin.state_dict(), "iteration": step}
                powersgd.load_state_dict(start)
                reference = Reference(config, start["matrices"])
            averages = powersgd.aggregate(inputs)
            if reference is None:
                expected = {name: torch.stack([own[name] for own in workers]).mean(0) for name in SHAPES}
                workers = [zeros()] * world_size
            else:
                expected = reference.aggregate(workers)
            errors = workers
            for position, name in enumerate(SHAPES):
                for got, truth in ((averages[position], expected[name]), (inputs[position], workers[worker][name])):
                    assert (got - truth).abs().max() <= 1e-9, (repetitions, step, name)


@pytest.mark.parametrize(
    "workers", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_follows_the_reference(workers: int) -> None:
    run(follows_the_reference, workers)


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
    for name in COMPRESSED:
        assert averages[name].isnan().all()
        assert torch.equal(given[name], expected[name])
    assert all(average.isfinite().all() for average in aggregator.aggregate(list(given.values())))


def test_non_contiguous_gradients_become_errors_in_place():
    one, other = powersgd(), powersgd()
    for seed in range(3):
        given = gradients(seed, SHAPES)
        odd = [torch.stack([G, G], dim=-1)[..., 0] for G in given.values()]
        plain = list(given.values())
        for a, b in zip(one.aggregate(odd), other.aggregate(plain), strict=True):
            assert torch.equal(a, b)
        assert all(torch.equal(a, b) for a, b in zip(odd, plain, strict=True))


def test_nothing_full_size_is_kept() -> None:
    """The gradients have the errors."""
    aggregator = powersgd()
    given = list(gradients(2, SHAPES).values())
    aggregator.aggregate(given)
    assert given[0].any()
    assert all(matrix.error is None for matrix in aggregator._compressor._engine.memory.matrices.values())
    assert Config(rank=3) == (3, 2, 1, 100), "the reference implementation's defaults"


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
