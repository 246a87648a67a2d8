"""Kernels find gradients and averages without an upload, once the first steps are over."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import powersgd_triton
from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.kernels import table

CONFIG = PowerSGDConfig(rank=2, backend="triton")
pytestmark = pytest.mark.usefixtures("one_worker")


def test_uploads() -> None:
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 12), nn.Linear(12, 1))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    powersgd_triton.attach(replica, CONFIG)
    shapes = {"weight": (16, 12), "odd": (7, 9), "bias": (7,)}
    compressor = Compressor(CONFIG, shapes)
    gradients = {name: torch.randn(shape) for name, shape in shapes.items()}

    def in_ddp() -> None:
        replica.zero_grad()
        replica(torch.randn(8, 20)).sum().backward()

    def in_a_loop() -> None:
        compressor.decompress(compressor.compress(gradients))

    for step in (in_ddp, in_a_loop):
        uploads = []
        for _ in range(2):
            with mock.patch.object(table, "on_host", wraps=table.on_host) as on_host:
                for _ in range(3):
                    step()
            uploads.append(on_host.call_count)
        assert uploads[0] > 0 == uploads[1], (step, uploads)
