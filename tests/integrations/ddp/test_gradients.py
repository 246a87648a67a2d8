"""Gradients that are zero for a while, and gradients that are not finite, with DDP on two workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.distributed import outcome, run_cases
from tests.support.small import MANY, ONE, RANK_2, WIDTH, Results, stack, state_for
from tests.support.training import LIMIT, batch, flat, gradients_of, local_gradients, relative, squared_error, total

# Silent gradients ---------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Two layers, of which the second has a zero gradient until its gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.first(inputs) + self.gate * self.second(torch.tanh(inputs))
        return outputs


ASLEEP, AWAKE = 3, 4


def sleeping_layer(worker: int, world_size: int) -> dict[int, dict[str, Any]]:
    return {rank: woken(worker, world_size, rank) for rank in (2, WIDTH)}


def woken(worker: int, world_size: int, rank: int) -> dict[str, Any]:
    """The second layer's gradients, with its gate closed in the first steps."""
    model = Gated()
    own = local_gradients(model)
    state = PowerSGDState(None, module=model, **{**RANK_2, "matrix_approximation_rank": rank})
    replica = DistributedDataParallel(model)
    replica.register_comm_hook(state, powerSGD_hook)
    finite, got, means = True, [], []
    for step in range(ASLEEP + AWAKE):
        model.gate = float(step >= ASLEEP)
        model.zero_grad()
        inputs, targets = batch(worker, step, width=WIDTH)
        squared_error(replica(inputs), targets).backward()
        gradients = gradients_of(model)
        finite &= bool(flat(gradients).isfinite().all())
        got.append(gradients["second.weight"])
        means.append(total(own["second.weight"]) / world_size)
    left = total(state.error()["second.weight"]) / world_size
    return {
        "finite": finite,
        "asleep": [float(gradient.abs().max()) for gradient in got[:ASLEEP]],
        "shares": [float(G_hat.norm() / mean.norm()) for G_hat, mean in zip(got, means, strict=True)][ASLEEP:],
        "differences": [relative(G_hat, mean) for G_hat, mean in zip(got, means, strict=True)][ASLEEP:],
        "conserved": relative(torch.stack(got).double().sum(0) + left, torch.stack(means).sum(0)),
    }


# Spoiled gradients --------------------------------------------------------------------------------------------------


SPOILED_STEP, SPOILED = 3, "2.weight"
# Unit roundoff of fp32 arithmetic.
U = 2.0**-24


def spoiled(worker: int, world_size: int) -> dict[float, dict[str, Any]]:
    return {cap: spoiled_run(worker, cap) for cap in (ONE, MANY)}


def spoiled_run(worker: int, cap: float) -> dict[str, Any]:
    """An inf in one element of worker 1's gradient, in one step; the optimizer skips what is not finite."""
    model = stack()
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = local_gradients(model)
    spoiling = False

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if spoiling:
            gradient[3, 5] = float("inf")
        return gradient

    dict(model.named_parameters())[SPOILED].register_hook(spoil)
    neighbours: set[str] = set()

    def hook(state, bucket):
        members = {names[parameter] for parameter in bucket.parameters()}
        if SPOILED in members:
            neighbours.clear()
            neighbours.update(members)
        return powerSGD_hook(state, bucket)

    state = state_for(model)
    replica = DistributedDataParallel(model, bucket_cap_mb=cap)
    replica.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    finite, found = [], {}
    for step in range(7):
        before = state.error()
        spoiling = step == SPOILED_STEP and worker == 1
        optimizer.zero_grad()
        inputs, targets = batch(worker, step, width=WIDTH)
        squared_error(replica(inputs), targets).backward()
        gradients = gradients_of(model)
        finite.append(bool(flat(gradients).isfinite().all()))
        if finite[-1]:
            optimizer.step()
        if step == SPOILED_STEP:
            if spoiling:
                own[SPOILED][3, 5] = 0
            excess = {name: beyond_rounding(before[name], own[name], after) for name, after in state.error().items()}
            found = {
                "broken": sorted(name for name, gradient in gradients.items() if not gradient.isfinite().all()),
                "kept": {name: kept for name, (kept, _) in excess.items()},
                "carried": {name: carried for name, (_, carried) in excess.items()},
                "neighbours": {name for name in neighbours if name in excess},
            }
    return {**found, "finite": finite}


def beyond_rounding(before: Tensor, gradient: Tensor, after: Tensor) -> tuple[float, float]:
    """Largest |after − before| and |after − (before + gradient)|, in units of what adding and subtracting rounds."""
    E, G = before.double(), gradient.double()
    # Of two floats whose sum is exact the bound is 0.
    bound = U * ((E + G).abs() + 2 * E.abs()) + 1e-30
    return float(((after - E).abs() / bound).max()), float(((after - E - G).abs() / bound).max())


# On two workers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Results:
    return run_cases([sleeping_layer, spoiled], 2)


@pytest.mark.parametrize("rank", [2, WIDTH])
def test_layer_without_gradients_wakes_up(two: Results, rank: int) -> None:
    for seen in outcome(two, sleeping_layer):
        assert seen[rank]["finite"]
        assert seen[rank]["asleep"] == [0.0] * ASLEEP
        assert seen[rank]["conserved"] <= LIMIT
        assert min(seen[rank]["shares"]) > 0.1


def test_layer_without_gradients_wakes_up_in_one_step_at_full_rank(two: Results) -> None:
    for seen in outcome(two, sleeping_layer):
        assert len(seen[WIDTH]["differences"]) == AWAKE
        assert max(seen[WIDTH]["differences"]) <= LIMIT


@pytest.mark.parametrize("cap", [ONE, MANY])
def test_spoiled_step_is_spoiled_on_all_workers_and_no_other_is(two: Results, cap: float) -> None:
    for seen in outcome(two, spoiled):
        assert seen[cap]["finite"] == [step != SPOILED_STEP for step in range(7)]
        assert SPOILED in seen[cap]["broken"]
        assert seen[cap]["broken"] == sorted(seen[cap]["neighbours"])


def test_spoiled_step_leaves_the_error_as_it_was(two: Results) -> None:
    for seen in outcome(two, spoiled):
        assert len(seen[ONE]["kept"]) == 6
        assert max(seen[ONE]["kept"].values()) <= 1


def test_spoiled_step_is_owed_by_the_other_buckets(two: Results) -> None:
    for seen in outcome(two, spoiled):
        neighbours = seen[MANY]["neighbours"]
        others = seen[MANY]["kept"].keys() - neighbours
        assert others
        assert all(seen[MANY]["kept"][name] <= 1 for name in neighbours)
        assert all(seen[MANY]["carried"][name] <= 1 for name in others)
