"""Training on handwritten digits with two workers: rank 1 with error feedback is as accurate as exact averaging."""

import importlib.util
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from powersgd_triton.integrations.ddp import PowerSGDState
from tests.support.balance import check_same
from tests.support.distributed import run
from tests.support.training import hooked

BATCH, TEST_IMAGES = 32, 597
SEEDS = (0, 1, 2)
EPOCHS = 15
# Measured: with learning rates of 0.01 to 0.1 compression costs at most 1.1 points, and 19 to 52 without feedback;
# with this one and 9 seeds, three at a time, at most 0.6. After 12 epochs some rates have not caught up yet.
LEARNING_RATE = 0.03
RANK_1: dict[str, Any] = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 0, "min_compression_rate": 0}
SETTINGS: Mapping[str, dict[str, Any] | None] = {
    "exact": None,
    "rank 1": RANK_1,
    "rank 1 without error feedback": {**RANK_1, "use_error_feedback": False},
    "rank 1, 16-bit error": {**RANK_1, "error_dtype": "bf16"},
    # As many bytes as rank 1.
    "rank 2, alternating": {**RANK_1, "matrix_approximation_rank": 2, "algorithm": "alternating"},
}
ALLOWED_LOSS = 1.5  # Percentage points.


def training(worker: int, world_size: int, names: Iterable[str], seed: int, epochs: int) -> dict[str, float]:
    """Accuracies in percent with some settings. The workers end with the same bits."""
    package: Any = importlib.util.find_spec("sklearn")
    # As ``sklearn.datasets.load_digits`` has them, which takes seconds to import.
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    digits = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    digits = digits[torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))]
    images, labels = digits[:, :-1] / 16, digits[:, -1].long()
    found = {}
    for name in names:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        settings = SETTINGS[name]
        replica = hooked(model, None if settings is None else PowerSGDState(None, module=model, **settings))
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = TEST_IMAGES + torch.randperm(len(labels) - TEST_IMAGES, generator=generator)
            for mine in order[worker::world_size].split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(replica(images[mine]), labels[mine]).backward()
                optimizer.step()
        check_same(model.parameters())
        with torch.no_grad():
            correct = model(images[:TEST_IMAGES]).argmax(1) == labels[:TEST_IMAGES]
        found[name] = 100 * float(correct.float().mean())
    return found


def test_it_trains() -> None:
    """A few epochs, after which compression has not quite caught up; without error feedback it never does."""
    found = run(training, 2, ("exact", "rank 1"), 0, 6)[0]
    assert found["exact"] > 80
    assert found["rank 1"] >= found["exact"] - 4 * ALLOWED_LOSS


@pytest.mark.slow
def test_compression_loses_no_more_than_allowed() -> None:
    """16-bit errors lose no more than the spread. Without error feedback it loses more: the criterion can fail."""
    runs = [run(training, 2, tuple(SETTINGS), seed, EPOCHS)[0] for seed in SEEDS]
    found = {name: [accuracies[name] for accuracies in runs] for name in SETTINGS}
    means = {name: statistics.mean(found[name]) for name in SETTINGS}
    assert means["exact"] > 90
    for name in ("rank 1", "rank 2, alternating"):
        assert means[name] >= means["exact"] - ALLOWED_LOSS, name
    assert means["rank 1, 16-bit error"] >= means["rank 1"] - (max(found["rank 1"]) - min(found["rank 1"]))
    assert means["exact"] - means["rank 1 without error feedback"] > 3 * ALLOWED_LOSS
