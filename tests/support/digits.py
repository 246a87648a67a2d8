"""Scikit-learn's handwritten digits, shuffled; the first of them are for testing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BATCH = 32
TEST_IMAGES = 597


def images_and_labels(seed: int) -> tuple[Tensor, Tensor]:
    """As ``sklearn.datasets.load_digits`` has them, which takes each worker seconds to import."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    digits = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    return digits[order, :-1] / 16, digits[order, -1].long()
