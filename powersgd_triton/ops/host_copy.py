"""Copies of numbers from the device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy on the host of a tensor that the current stream has written. Making it does not wait for the device.

    A tensor on the CPU is kept, so it must not change.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether the copy is done, so that reading it does not wait."""
        return self._event is None or self._event.query()

    def numbers(self) -> Any:
        """Return the numbers as nested lists. The host waits until the copy is done."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
