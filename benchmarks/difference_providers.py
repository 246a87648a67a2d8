"""Differences of parameters between workers of which one exists: encoded and applied by kernels or the reference."""

import torch

from benchmarks.shapes import count_parameters
from benchmarks.timing import Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.wire_format import BLOCK, DIFFERENCES
from powersgd_triton.ops.backends import difference_codec
from powersgd_triton.ops.differences import encode_reference
from powersgd_triton.planning.models import Shapes

WORKERS = 4


class PreparedDifferences:
    """The copies of all parameters, one partition per worker, and the fp32 original of the first partition.

    Args:
        shapes: the parameters'.
        width: of the differences, a name in ``DIFFERENCES``.
        dtype: of the copies.
        device: where.
    """

    def __init__(self, shapes: Shapes, width: str, dtype: torch.dtype, device: torch.device) -> None:
        self._width = DIFFERENCES[width]
        # Whole blocks, so that all partitions are aligned.
        numel = -(-count_parameters(shapes) // (WORKERS * BLOCK)) * BLOCK
        generator = torch.Generator(device).manual_seed(0)
        self._copies = torch.randn(WORKERS, numel, generator=generator, device=device, dtype=dtype)
        self._target = self._copies[0] + 1e-3 * torch.randn(numel, generator=generator, device=device)
        size = self._width.difference_bytes(numel)[1]
        self._content = torch.zeros(WORKERS, size, dtype=torch.uint8, device=device)
        encode_reference(Encoding(self._target, self._copies[0], self._width, self._content[0]))
        # As if all workers had sent the same.
        self._content[1:] = self._content[0]
        self.parameter_bytes = self._copies.nbytes

    def work(self, phase: str, provider: str) -> Work:
        """One stage by "triton" or "reference", or a "copy" that moves the same bytes."""
        if provider == "copy":
            source = torch.zeros(self.bytes_of(phase) // 2, dtype=torch.uint8, device=self._copies.device)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)
        config = PowerSGDConfig(backend="triton" if provider == "triton" else "torch")
        encode, apply, _ = difference_codec(config, self._copies.device, self._copies.dtype)
        if phase == "encode_difference":
            return lambda: encode(Encoding(self._target, self._copies[0], self._width, self._content[0]))
        return lambda: apply(Decoding(self._content, self._width, self._copies))

    def bytes_of(self, phase: str) -> int:
        """The fewest bytes a stage moves: each input read once, each output written once."""
        if phase == "encode_difference":
            return self._target.nbytes + self._copies[0].nbytes + self._content[0].nbytes
        return self._content.nbytes + 2 * self._copies.nbytes
