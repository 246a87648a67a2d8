"""What the algorithms send, and what arrives."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from powersgd_triton import Compressor
from powersgd_triton.comm.communicator import Communicator
from tests.support.checks import MODES, everything, gradients, step, trained

# Unit roundoff of fp32 arithmetic.
U = 2.0**-24
SHAPE = (30, 20)


@pytest.mark.parametrize("name", ["standard", "twice", "alternating", "alternating twice", "alternating three times"])
def test_what_the_bases_can_hold_arrives(name: str):
    """With one product a step what is missing after a left product, made with stale bases, comes with the right one."""
    fields = {"explore_every": 0, **MODES[name]}
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
