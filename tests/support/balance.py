"""What models in wrappers are given and what they apply: books of it, and comparisons. All runs inside a worker."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import PowerSGDConfig
from tests.support.sharded_training import RATE, Batch, Gradients, batch, loss_of
from tests.support.training import LIMIT, digest, flat, relative
from tests.support.wrapper_table import WRAPPERS
from tests.support.wrappers import Wrapped, means

EIGHT_BITS = 0.02
"""Relative difference of sums that are rounded to 8 bits."""
U = 2.0**-24
"""Unit roundoff of fp32."""


def build(wrapper: str, config: PowerSGDConfig | None, parameters: Gradients | None = None) -> Wrapped:
    """A new model in a wrapper, with parameters of its own or those that are given."""
    net = WRAPPERS[wrapper].net()
    if parameters is not None:
        net.load_state_dict(parameters)
    return WRAPPERS[wrapper].make(net, config)


def batches(model: Wrapped, step: int, micro: int = 1) -> list[Batch]:
    """This worker's micro-batches of a step."""
    return [batch(model.data_worker(), step, index) for index in range(micro)]


def train(steps: Iterable[int], *models: Wrapped) -> None:
    for step in steps:
        for model in models:
            model.step(batches(model, step))


def exact_mean(model: Wrapped, given: Sequence[Batch]) -> Gradients:
    """The mean over workers of their own gradients, by autograd alone. What is not finite counts as zero."""
    twin = model.net_type()
    twin.load_state_dict(model.parameters())
    twin.use, twin.inject = model.net.use, model.net.inject
    for micro in given:
        (loss_of(twin, micro) / len(given)).backward()
    own = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in twin.named_parameters()}
    return means({name: torch.where(gradient.isfinite(), gradient, 0) for name, gradient in own.items()})


class Ledger:
    """What a model is given and what it applies, from now on."""

    def __init__(self, model: Wrapped) -> None:
        self.model, self.begin, self.steps = model, model.parameters(), 0
        self.given: Gradients = {name: torch.zeros_like(p).double() for name, p in self.begin.items()}
        self.owed = model.mean_error()

    def step(self, given: Sequence[Batch]) -> None:
        for name, gradient in exact_mean(self.model, given).items():
            self.given[name] += gradient
        self.model.step(given)
        self.steps += 1

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.step(batches(self.model, step))

    def check(self, *, rounds: bool = False) -> None:
        """mean E + Σ Ĝ = mean Σ G + mean E before; something was left out; all workers hold the same parameters.

        If it ``rounds`` what has no errors, the averages of these tensors are nearly those of the gradients.
        """
        now, error, rounded = self.model.parameters(), self.model.mean_error(), list[tuple[Tensor, Tensor]]()
        for name, given in self.given.items():
            sent = (self.begin[name].double() - now[name].double()) / RATE
            left = sum(
                sign * e[name].double().view(given.shape) for sign, e in ((1, error), (-1, self.owed)) if name in e
            )
            if rounds and not (name in error and error[name].any()):
                rounded.append((sent.view(-1), given.view(-1)))
                continue
            # Each step rounds the parameter once.
            allowed = LIMIT * given.norm() + self.steps * U * now[name].norm() / RATE
            assert (sent + left - given).norm() <= allowed, f"{name}: {relative(sent + left, given)} is missing"
        assert relative(flat(error) * 0, flat(error)) == 1, "nothing was left out"
        if rounds:
            # Together, since small tensors share a scale with larger ones.
            sent, given = (torch.cat(tensors) for tensors in zip(*rounded, strict=True))
            assert 10 * LIMIT < relative(sent, given) < EIGHT_BITS, relative(sent, given)
        check_same(now.values())


def check_same(tensors: Any, group: Any = None) -> None:
    """That all workers have the same bits."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, digest(tensors), group)
    assert len(set(found)) == 1, "workers hold different bits"


def check_close(got: Gradients, expected: Gradients, start: Gradients, limit: float = LIMIT) -> None:
    """That two trainings from the same parameters have moved to the same ones."""
    assert got.keys() == expected.keys(), (sorted(got), sorted(expected))
    moved = flat(expected) - flat(start)
    assert moved.norm() > 0.01, "nothing was learned"
    difference = (flat(got) - flat(expected)).norm()
    # Parameters were rounded in each step.
    assert difference <= limit * moved.norm() + 4 * U * flat(expected).norm(), f"{difference} of {moved.norm()}"


def check_errors(model: Wrapped, expected: Gradients) -> None:
    found = model.mean_error()
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    for name, error in expected.items():
        assert (found[name] - error).norm() <= LIMIT * error.norm() + U, name


def iteration(model: Wrapped) -> int:
    """Steps that the compression has taken."""
    name = "iteration" if hasattr(model.state, "iteration") else "step_counter"
    return int(getattr(model.state, name))
