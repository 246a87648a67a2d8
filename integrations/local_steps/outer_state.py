"""θ, the parameters that all workers share, their outer optimizer, and what of it a worker's own parameters get."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from powersgd_triton.comm.agreement import together
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.integrations.common import broadcast_from_first
from powersgd_triton.integrations.local_steps.local_tensors import LocalTensors, local
from powersgd_triton.ops.step import HostCopy

logger = logging.getLogger("powersgd_triton.integrations.local_steps")

Outer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Returns the outer optimizer, of the shared parameters. Their gradient is the mean of the pseudo-gradients."""

Tensors = dict[str, Tensor]

LARGEST = 1e30
"""Magnitude of changes from which on they count as not finite, since sums of them might not be."""


class OuterState:
    """The shared parameters θ, in at least fp32, beside this worker's own, which are sent from ``device``."""

    def __init__(
        self, local: LocalTensors, outer: Outer | None, communicator: Communicator, device: torch.device
    ) -> None:
        self.local, self._communicator, self.device = local, communicator, device
        self.shared = {
            name: nn.Parameter(tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True).contiguous())
            for name, tensor in local.tensors()
        }
        parameters = list(self.shared.values())
        # By default, θ becomes the mean of the local parameters.
        self.optimizer = torch.optim.SGD(parameters, lr=1.0) if outer is None else outer(parameters)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"outer must return a torch.optim.Optimizer; got {type(self.optimizer).__name__}")
        self._finite: HostCopy | None = None
        # As they were after the last exchange.
        self._buffers: list[Tensor] = []

    def settings(self) -> list[Any]:
        """Return the kind and the plain settings of the outer optimizer, which must be equal on all workers."""
        plain = (bool, int, float, str)
        groups = [{k: v for k, v in group.items() if isinstance(v, plain)} for group in self.optimizer.param_groups]
        return [type(self.optimizer).__name__, *groups]

    def theta(self) -> Tensors:
        """Return {name: θ} without gradients. They are not copies."""
        return {name: parameter.detach() for name, parameter in self.shared.items()}

    def begin_equal(self) -> None:
        """Give all workers the parameters and buffers of the first one. Collective."""
        found = itertools.chain(self.theta().items(), self.local.buffers(), self.local.frozen())
        broadcast_from_first((tensor for _, tensor in found), self._communicator)
        self.write(self.theta())
        self._buffers = [buffer.clone() for _, buffer in self.local.buffers()]

    def forget(self) -> None:
        """Begin anew from the first worker's parameters. Collective."""
        self.optimizer.state.clear()
        theta = self.theta()
        for name, tensor in self.local.tensors():
            theta[name].copy_(tensor)
        self.begin_equal()

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the local parameters."""
        for name, tensor in self.local.tensors():
            tensor.copy_(values[name])
        self.local.refresh()

    def pseudo_gradients(
        self, finite: Tensor | None = None, begun: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensors, Tensor]:
        """Return {name: θ − local parameters}, padded, and whether this worker is finite. If not, they are zero.

        Collective on the other shards, unless it is known whether the worker was ``finite`` when the exchange began.
        ``begun`` are the local parameters from that time, if they have changed since.
        """
        found: Tensors = {}
        for name, tensor in self.local.tensors():
            start = self._start(name, tensor)
            own = tensor.to(start.dtype) if begun is None else begun[name]
            found[name] = gradient = (start - own).to(self.device).contiguous()
            if gradient.shape != self.local.shapes[name]:
                found[name] = gradient.new_zeros(self.local.shapes[name])
                without_padding(found[name], gradient).copy_(gradient)
        if finite is None:
            finite = self._is_finite(found.values())
        for gradient in found.values():
            torch.where(finite, gradient, gradient.new_zeros(()), out=gradient)
        return found, finite

    def copies(self, finite: Tensor) -> Tensors:
        """Return copies of the local parameters. If this worker is not finite, it gets θ first."""
        copies: Tensors = {}
        for name, tensor in self.local.tensors():
            start = self._start(name, tensor)
            copies[name] = torch.where(finite.to(tensor.device), tensor.to(start.dtype), start)
            tensor.copy_(copies[name])
        self.local.refresh()
        return copies

    def update(self, means: Mapping[str, Tensor], begun: Mapping[str, Tensor] | None) -> None:
        """Update θ by {name: mean pseudo-gradient}, padded, and go on from it.

        What was changed since the exchange has ``begun`` with these local parameters is kept. They are overwritten.
        """
        for name, parameter in self.shared.items():
            parameter.grad = without_padding(means[name], parameter).to(parameter.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        values = self.theta()
        if begun is not None:
            for name, tensor in self.local.tensors():
                # In the memory of ``begun``, since new pages are slow on the CPU.
                changed = torch.sub(tensor.to(values[name].dtype), begun[name], out=begun[name])
                values[name] = changed.add_(values[name])
        self.write(values)

    def parts(self, *, begun: bool) -> dict[str, Tensors]:
        """Return what a saved state has of each tensor: "shared", and in a round that has begun "own" and "changes".

        Collective if a round has begun: the changes are the mean of all workers' pseudo-gradients.
        """
        parts = {name: {"shared": theta.clone()} for name, theta in self.theta().items()}
        if begun:
            gradients, finite = self.pseudo_gradients()
            copies = self.copies(finite)
            for name, tensor in self.local.tensors():
                changes = without_padding(self._communicator.mean(gradients[name]), tensor).to(tensor.device)
                parts[name] |= {"own": copies[name].to(tensor.dtype), "changes": changes}
        return parts

    def load(self, parts: Mapping[str, Tensors], *, own: bool) -> None:
        """Continue from what ``parts`` has returned: from the worker's own parameters, or from the mean of all."""
        for name, theta in self.theta().items():
            theta.copy_(parts[name]["shared"])
        values: Tensors = {}
        for name, tensor in self.local.tensors():
            saved, start = parts[name], self._start(name, tensor)
            if own and "own" in saved:
                values[name] = saved["own"]
            else:
                values[name] = start - saved["changes"].to(start.device) if "changes" in saved else start
        self.write(values)

    def _start(self, name: str, tensor: Tensor) -> Tensor:
        """Return θ as it was rounded into the local parameters."""
        shared = self.shared[name].detach()
        return shared.to(tensor.dtype).to(shared.dtype)

    def _is_finite(self, gradients: Iterable[Tensor]) -> Tensor:
        """Return whether all shards of this worker's model are finite, as a bool scalar on the device."""
        # Several times as fast on the CPU as a norm.
        extremes = [extreme for each in gradients if each.numel() for extreme in torch.aminmax(each)]
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        if extremes:
            finite = (torch.stack([each.double() for each in extremes]).abs() < LARGEST).all()
        if self._communicator.others:
            flag = finite.int()
            for shards in self._communicator.others:
                shards.minimum(flag)
            finite = flag > 0
        self.warn()
        # Read in the next exchange, so that the host does not wait for the device now.
        self._finite = HostCopy(finite)
        return finite

    def warn(self) -> None:
        """Log a warning if this worker was not finite in the last exchange."""
        finite, self._finite = self._finite, None
        if finite is not None and not finite.numbers():
            logger.warning("this worker's parameters were not finite, so that it went on from the shared parameters")

    def average_exactly(self, finite: Tensor, optimizer: torch.optim.Optimizer | None) -> int:
        """Average changed buffers, and the optimizer's states if asked. Return the bytes sent. Collective.

        Workers that are not finite, or have a NaN in what is averaged, do not count.
        """
        tensors = self._changed_buffers()
        if optimizer is not None:
            # Parameters that were not updated yet have none.
            known = optimizer.state
            states = [known[p] for group in optimizer.param_groups for p in group["params"] if p in known]
            found = [local(t) for state in states for t in state.values() if isinstance(t, Tensor) and t.dim()]
            # They differ if a parameter had a gradient on some workers only.
            shapes = {"shapes of the optimizer's states": [list(tensor.shape) for tensor in found]}
            together("an average of states", lambda: (None, {}, shapes), self._communicator, self.device)
            tensors += found
        if not tensors or self._communicator.world_size == 1:
            return 0
        # Integers and fp32 keep their values in fp64.
        whole = torch.cat([tensor.double().reshape(-1).to(self.device) for tensor in tensors])
        counts = finite & ~whole.isnan().any()
        whole = torch.cat([torch.where(counts, whole, 0), counts.double().view(1)])
        self._communicator.mean(whole)
        share = whole[-1]
        averages = (whole[:-1] / share).split([tensor.numel() for tensor in tensors])
        for tensor, average in zip(tensors, averages, strict=True):
            average = average if tensor.is_floating_point() else average.round()
            # If no worker counts, nothing changes.
            tensor.copy_(torch.where(share > 0, average.view(tensor.shape), tensor.to(self.device)))
        self._buffers = [buffer.clone() for _, buffer in self.local.buffers()]
        return whole.nbytes

    def _changed_buffers(self) -> list[Tensor]:
        """Return the buffers that a worker has changed since the last exchange. Masks, for example, never change."""
        buffers = [buffer for _, buffer in self.local.buffers()]
        if not buffers:
            return []
        same = [torch.equal(buffer, before) for buffer, before in zip(buffers, self._buffers, strict=True)]
        unchanged = torch.tensor(same, dtype=torch.int32, device=self.device)
        self._communicator.minimum(unchanged)
        return [buffer for buffer, equal in zip(buffers, unchanged.tolist(), strict=True) if not equal]


def without_padding(padded: Tensor, tensor: Tensor) -> Tensor:
    """Return a view of the elements of ``padded``, which has zeros at the ends of its dimensions, in tensor's shape."""
    return padded[tuple(slice(size) for size in tensor.shape)]
