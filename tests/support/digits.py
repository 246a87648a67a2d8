"""Scikit-learn's handwritten digits, shuffled; the first of them are for testing."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor

BATCH = 32
TEST_IMAGES = 597


def images_and_labels(seed: int) -> tuple[Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
