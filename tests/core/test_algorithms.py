"""The alternating algorithm, iterations and 16-bit error buffers, against a model written apart from the product."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from powersgd_triton import Compressor
from powersgd_triton.comm.communicator import Communicator
from tests.support.checks import MODES, everything, gradients, step, trained
from tests.support.fp64_model import Model
from tests.support.lockstep import Fleet

# Unit roundoff of fp32 arithmetic.
U = 2.0**-24
SHAPE = (30, 20)
# The model does not explore.
FOLLOWED = {
    "standard": {"explore_every": 0},
    "standard twice": {"explore_every": 0, "iterations": 2},
    **{name: MODES[name] for name in ("alternating", "alternating twice", "alternating three times")},
}
modes = pytest.mark.parametrize("fields", FOLLOWED.values(), ids=FOLLOWED)


def started(rank: int, fields: dict[str, Any], workers: int) -> tuple[Fleet, Model]:
    """Workers and a model with the same bases, which an engine draws when it sees its first gradient."""
    fleet = Fleet(everything(rank, **fields), {"w": SHAPE}, workers)
    twin = Compressor(everything(rank, **fields), {"w": SHAPE})
    twin.compress({"w": torch.ones(SHAPE)})
    saved = twin.state_dict()
    generator = torch.Generator().manual_seed(99)
    left, right = (torch.linalg.qr(torch.randn(size, rank, generator=generator))[0] for size in SHAPE)
    parts = {"basis": right, "left_basis": left, "error": torch.zeros(SHAPE)}
    saved["iteration"], saved["matrices"]["w"] = 0, {key: parts[key] for key in saved["matrices"]["w"]}
    fleet.load([saved] * workers)
    alternating = fields.get("algorithm") == "alternating"
    return fleet, Model([parts["error"]] * workers, left, right, fields.get("iterations", 1), alternating)


@modes
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_follows_the_model(workers: int, fields: dict[str, Any]):
    """Bases are restored from fp32, and repeated products amplify that: the first steps' 2⁻²⁴ by about a thousand."""
    fleet, model = started(3, fields, workers)
    for seed in range(8):
        # In fp64, so that what amplifies rounding does not hide what is wrong.
        given = [gradients(100 * seed + w, {"w": SHAPE}, torch.float64) for w in range(workers)]
        expected = model.step([own["w"] for own in given])
        (run,) = fleet.step(given, [["w"]])
        size = float(max(own["w"].abs().max() for own in given) + max(E.abs().max() for E in model.errors))
        for averages, errors, E in zip(run.averages, fleet.errors(), model.errors, strict=True):
            assert (averages["w"] - expected).abs().max() <= 1e-9 * size
            assert (errors["w"] - E).abs().max() <= 1e-9 * size


@modes
def test_what_the_bases_can_hold_arrives(fields: dict[str, Any]):
    """With one product a step what is missing after a left product, made with stale bases, comes with the right one."""
    for rank, k in ((3, 3), (4, 1), (1000, 20)):
        generator = torch.Generator().manual_seed(k)
        left, right = (torch.linalg.qr(torch.randn(size, k, generator=generator))[0] for size in SHAPE)
        compressor = Compressor(everything(rank, **fields), {"w": SHAPE})
        owed = torch.zeros(SHAPE)
        for index in range(8):
            G = left @ right.T * (index + 1)
            owed += G - step(compressor, {"w": G})["w"]
            if index % 2:
                assert owed.norm() <= 100 * (index + 1) * U * G.norm()
    # Square bases of full rank hold any gradient.
    compressor = Compressor(everything(9, **fields), {"w": (9, 9)})
    for seed in range(4):
        G = gradients(seed, {"w": (9, 9)})["w"]
        assert (step(compressor, {"w": G})["w"] - G).norm() <= 200 * U * G.norm()


def test_alternating_sends_one_message_and_standard_two():
    for name, count in {"standard": 2, "twice": 4, "alternating": 1, "alternating twice": 2}.items():
        compressor, sent = trained(0, **MODES[name]), list[int]()
        with mock.patch.object(Communicator, "all_reduce", lambda _, tensor: sent.append(tensor.numel())):  # noqa: B023
            for index in range(1, 5):
                step(compressor, gradients(index))
                assert len(sent) == index * count
                # The statistics are what was sent.
                assert compressor.compression_stats()[2] == sum(sent)
