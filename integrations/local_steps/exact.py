"""What is averaged exactly at the end of an exchange: buffers, and the states of a worker's optimizer if asked."""

import itertools
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.core.engine import Engine
from powersgd_triton.integrations.local_steps.local_tensors import LocalTensors, kind, local


class ExactAverages:
    """Averages buffers, and the states of the optimizer ``inner``, unless no worker has changed them."""

    def __init__(self, local: LocalTensors, engine: Engine, device: torch.device, inner: Any) -> None:
        self._local, self._engine, self._device, self._inner = local, engine, device, inner
        # {name: kind} of the tensors, as the workers agreed; the buffers, as they were after the last exchange.
        self._agreed: dict[str, str] = {}
        self._buffers: dict[str, Tensor] = {}

    def agree(self) -> dict[str, str]:
        """Return {name: kind} of the tensors that the next exchange averages, for the workers to compare."""
        self._agreed = {name: kind(tensor) for name, tensor in sorted(self._tensors().items())}
        return self._agreed

    def hold(self, names: Container[str]) -> None:
        """Take the buffers with these names as equal on all workers, so that they are not sent until one changes."""
        self._buffers = {name: buffer.clone() for name, buffer in self._local.buffers() if name in names}

    def unchanged(self) -> Tensor:
        """Return the least ``_sameness`` on any worker of each tensor. Collective."""
        if not self._agreed or self._engine.communicator.world_size == 1:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        found = self._tensors()
        least = torch.stack([self._sameness(name, found.get(name)) for name in self._agreed])
        self._engine.communicator.minimum(least)
        return least

    def average(self, unchanged: Sequence[int], finite: Tensor) -> int:
        """Average the tensors that ``unchanged`` says have changed. Return the bytes sent. Collective.

        Workers that are not finite, or have a NaN there, do not count. The next exchange averages what is new now.
        """
        if not unchanged:
            return 0
        found, numbers = self._tensors(), dict(zip(self._agreed, unchanged, strict=True))
        sent = self.mean([found[name] for name, flag in numbers.items() if flag == 0], finite)
        self.hold({name for name, flag in numbers.items() if flag >= 0})
        return sent

    def mean(self, tensors: Sequence[Tensor], finite: Tensor) -> int:
        """Average tensors over the workers that are ``finite`` and have no NaN there. See ``average``."""
        if not tensors:
            return 0
        # Integers and fp32 keep their values in fp64.
        whole = torch.cat([tensor.double().reshape(-1).to(self._device) for tensor in tensors])
        counts = finite.to(self._device) & ~whole.isnan().any()
        whole = torch.cat([torch.where(counts, whole, 0), counts.double().view(1)])
        self._engine.communicator.mean(whole)
        averages = (whole[:-1] / whole[-1]).split([tensor.numel() for tensor in tensors])
        for tensor, average in zip(tensors, averages, strict=True):
            average = average if tensor.is_floating_point() else average.round()
            # If no worker counts, nothing changes.
            tensor.copy_(torch.where(whole[-1] > 0, average.view(tensor.shape), tensor.to(self._device)))
        return whole.nbytes

    def _tensors(self) -> dict[str, Tensor]:
        """Return {name: buffer}, and {"state … of parameter …": state} if asked."""
        found = dict(self._local.buffers())
        groups = [] if self._inner is None else self._inner.param_groups
        for index, parameter in enumerate(itertools.chain.from_iterable(group["params"] for group in groups)):
            for key, state in self._inner.state.get(parameter, {}).items():
                if isinstance(state, Tensor) and state.dim():
                    found[f"state {key!r} of parameter {index}"] = local(state)
        return found

    def _sameness(self, name: str, tensor: Tensor | None) -> Tensor:
        """Return 1 if a tensor is as after the last exchange, 0 if it has changed, −1 if it is not what was agreed."""
        before, agreed = self._buffers.get(name), self._agreed[name]
        # On the device, since the host would wait for each tensor.
        if tensor is None or kind(tensor) != agreed:
            return torch.full((), -1, device=self._device)
        if before is None or kind(before) != agreed:
            return torch.full((), 0, device=self._device)
        return (tensor == before).all().long().to(self._device)
