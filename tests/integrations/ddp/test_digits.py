"""Training on handwritten digits with two workers: rank 1 with error feedback is as accurate as exact averaging."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.digits import BATCH, TEST_IMAGES, images_and_labels
from tests.support.distributed import run
from tests.support.training import digest

Trained = dict[str, list[dict[str, Any]]]
SEEDS = (0, 1, 2)
EPOCHS = 15
# Measured: with learning rates of 0.01 to 0.1 compression costs at most 1.1 points, and 19 to 52 without feedback;
# with this one and 9 seeds, three at a time, at most 0.6. After 12 epochs some rates have not caught up yet.
LEARNING_RATE = 0.03
RANK_1: dict[str, Any] = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 0, "min_compression_rate": 0}
BASIC: dict[str, dict[str, Any] | None] = {"exact": None, "rank 1": RANK_1}
OTHERS: dict[str, dict[str, Any] | None] = {
    "rank 1 without error feedback": {**RANK_1, "use_error_feedback": False},
    "rank 1, 16-bit error": {**RANK_1, "error_dtype": "bf16"},
    # As many bytes as rank 1.
    "rank 2, alternating": {**RANK_1, "matrix_approximation_rank": 2, "algorithm": "alternating"},
}
# Percentage points.
ALLOWED_LOSS = 1.5


def training(worker: int, world_size: int, settings: dict[str, Any] | None, seed: int) -> dict[str, Any]:
    images, labels = images_and_labels(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    replica = DistributedDataParallel(model)
    state = None
    if settings is not None:
        state = PowerSGDState(None, module=model, **settings)
        replica.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        order = TEST_IMAGES + torch.randperm(len(labels) - TEST_IMAGES, generator=generator)
        for mine in order[worker::world_size].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica(images[mine]), labels[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        correct = model(images[:TEST_IMAGES]).argmax(1) == labels[:TEST_IMAGES]
    return {
        "accuracy": 100 * float(correct.float().mean()),
        "digest": digest(model.parameters()),
        "rate": state.compression_stats()[0] if state else 1,
    }


def all_trainings(worker: int, world_size: int, wanted: Mapping[str, dict[str, Any] | None]) -> Trained:
    return {name: [training(worker, world_size, settings, seed) for seed in SEEDS] for name, settings in wanted.items()}


@pytest.fixture(scope="module")
def trained() -> list[Trained]:
    return run(all_trainings, 2, BASIC)


@pytest.fixture(scope="module")
def others(trained: list[Trained]) -> list[Trained]:
    """The basic ones among them."""
    return [{**one, **more} for one, more in zip(trained, run(all_trainings, 2, OTHERS), strict=True)]


def mean_accuracy(trained: list[Trained], name: str) -> float:
    return float(statistics.mean(seen["accuracy"] for seen in trained[0][name]))


def test_rank_1_loses_no_more_than_allowed(trained: list[Trained]) -> None:
    exact, compressed = mean_accuracy(trained, "exact"), mean_accuracy(trained, "rank 1")
    assert exact > 90
    assert compressed >= exact - ALLOWED_LOSS


@pytest.mark.slow
def test_alternating_loses_no_more_than_allowed(others: list[Trained]) -> None:
    assert mean_accuracy(others, "rank 2, alternating") >= mean_accuracy(others, "exact") - ALLOWED_LOSS


@pytest.mark.slow
def test_16_bit_error_loses_no_more_than_the_spread(others: list[Trained]) -> None:
    found = [seen["accuracy"] for seen in others[0]["rank 1"]]
    assert mean_accuracy(others, "rank 1, 16-bit error") >= statistics.mean(found) - (max(found) - min(found))


@pytest.mark.slow
def test_rank_1_without_error_feedback_loses_more(others: list[Trained]) -> None:
    """That the criterion can fail."""
    loss = mean_accuracy(others, "exact") - mean_accuracy(others, "rank 1 without error feedback")
    assert loss > 3 * ALLOWED_LOSS


def test_all_weight_matrices_are_compressed(trained: list[Trained]) -> None:
    biases = 64 + 64 + 10
    before, after = 64 * 64 * 2 + 64 * 10 + biases, 128 * 2 + 74 + biases
    for seen in trained[0]["rank 1"]:
        assert seen["rate"] == pytest.approx(before / after)


@pytest.mark.parametrize("which", ["trained", pytest.param("others", marks=pytest.mark.slow)])
def test_workers_end_with_the_same_bits(which: str, request: pytest.FixtureRequest) -> None:
    one, other = request.getfixturevalue(which)
    assert [[seen["digest"] for seen in runs] for runs in one.values()] == [
        [seen["digest"] for seen in runs] for runs in other.values()
    ]
