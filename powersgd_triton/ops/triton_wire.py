"""Factors narrower than fp32 on the wire, by three kernels a message for any number of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from powersgd_triton.kernels.configurations import Launch
from powersgd_triton.kernels.wire import decode_triton, encode_triton, reduce_triton
from powersgd_triton.kernels.wire_table import WireTable
from powersgd_triton.layout.wire_format import WirePlan


class TritonWire:
    """What ``TorchWire`` does, bit by bit, with fp32 messages.

    Args:
        plan: where everything lies; of a width narrower than fp32.
        launch: the kernels' launches.
        rank: the largest that may occur.
        device: of the messages.
    """

    def __init__(self, plan: WirePlan, launch: Launch, rank: int, device: torch.device) -> None:
        self.plan = plan
        self._launch = launch
        self._table = WireTable(plan, min(launch.panel, 1 << (rank - 1).bit_length()), device)

    def encode(self, message: Tensor, own: Tensor | None, *, out: Tensor) -> None:
        encode_triton(self._table, message, own, self._launch, out=out)

    def reduce(self, received: Tensor, own: Tensor | None, worker: int, *, out: Tensor) -> None:
        reduce_triton(self._table, received, own, worker, self._launch, out=out)

    def decode(self, gathered: Tensor, *, out: Tensor) -> None:
        decode_triton(self._table, gathered, self._launch, out=out)
