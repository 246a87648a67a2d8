"""Kernels find gradients and averages without an upload, once the first steps are over."""

from __future__ import annotations

from unittest import mock

import torch

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.kernels import table


def test_uploads_of_a_loop() -> None:
    """Those of flat buckets are counted with the launches of a step."""
    shapes = {"weight": (16, 12), "odd": (7, 9), "bias": (7,)}
    compressor = Compressor(PowerSGDConfig(rank=2, backend="triton"), shapes)
    gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
    uploads = []
    for _ in range(2):
        with mock.patch.object(table, "on_host", wraps=table.on_host) as on_host:
            for _ in range(3):
                compressor.decompress(compressor.compress(gradients))
        uploads.append(on_host.call_count)
    assert uploads[0] > 0 == uploads[1], uploads
