"""A plain training loop: the interface of the reference implementation (epfml/powersgd), by changing one import.

from powersgd_triton.integrations.optimizer import PowerSGD, Config, optimizer_step
powersgd = PowerSGD(list(model.parameters()), config=Config(rank=1, min_compression_rate=10))
loss.backward()
optimizer_step(optimizer, powersgd)     # in place of optimizer.step(), and without optimizer.zero_grad()
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.compressor import Compressor
from powersgd_triton.config import PowerSGDConfig

__all__ = ["Aggregator", "AllReduce", "Config", "PowerSGD", "optimizer_step", "params_in_optimizer"]


class Config(NamedTuple):
    """How much is compressed; names and meaning are the reference implementation's.

    Attributes:
        rank: columns of the factors.
        min_compression_rate: compress a tensor only if it shrinks by more than this factor, counting the
            ``num_iters_per_step · rank · (n + m) / 2`` elements that a step sends on average.
        num_iters_per_step: products and all-reduces in one step, left and right by turns.
        start_compressing_after_num_steps: number of first steps with exact averaging.
    """

    rank: int
    min_compression_rate: float = 2
    num_iters_per_step: int = 1
    start_compressing_after_num_steps: int = 100


class Aggregator(abc.ABC):
    """Averages gradients over the workers, and leaves in them what was not sent."""

    @abc.abstractmethod
    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The (approximate) averages, in new tensors. The inputs become the compression errors, or zero."""


class AllReduce(Aggregator):
    """Exact averages. ``group``: process group; None for the default group, or for one process."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._communicator = Communicator(group)

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        if not gradients:
            return []
        mean = self._communicator.mean(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        pieces = mean.split([gradient.numel() for gradient in gradients])
        averages = [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]
        for gradient in gradients:
            gradient.zero_()
        return averages


class PowerSGD(Aggregator):
    """The alternating algorithm over a list of gradients, which keep the error between steps.

    There is no error buffer: what a step did not send stays in the gradients, to which the next backward pass adds.
    So they must not be set to zero in between, and a skipped step needs no care. An element that is not finite reaches
    the average of all compressed tensors as NaN; in the gradients it becomes zero and everything else stays, to be
    sent in the next step. Errors have the gradients' dtype.

    Args:
        params: parameters or tensors of their shapes, in the order in which gradients will come.
        config: how much is compressed.
        group: process group; None for the default group, or for one process where none is initialised.

    Raises:
        TypeError, ValueError: a setting is of the wrong type or out of range.
    """

    def __init__(self, params: Sequence[Tensor], config: Config, group: dist.ProcessGroup | None = None) -> None:
        self.config = config
        self._compressor = Compressor(
            PowerSGDConfig(
                rank=config.rank,
                min_compression_rate=config.min_compression_rate,
                iterations=config.num_iters_per_step,
                start_iter=config.start_compressing_after_num_steps,
                algorithm="alternating",
                error_feedback=False,
            ),
            {str(index): parameter.shape for index, parameter in enumerate(params)},
            group,
        )
        self._dropped: Tensor | None = None

    @property
    def step_counter(self) -> int:
        """Number of steps done."""
        return self._compressor.iteration

    @property
    def dropped_elements(self) -> int:
        """How many elements of this worker's gradients were not finite so far. Waits for the device."""
        return 0 if self._dropped is None else int(self._dropped)

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Average gradients; the inputs become the errors.

        Args:
            gradients: of the parameters' shapes, in their order.

        Returns:
            Ĝ of the gradients' dtypes, in new tensors, equal on all workers.

        Raises:
            TypeError, ValueError: the gradients are not those of the parameters. Nothing was changed.
        """
        compressed = self._compressor.compress(gradients)
        averages = self._compressor.decompress(compressed)
        assert isinstance(averages, Mapping)
        dropped = self._compressor.leave_error(compressed, gradients)
        self._dropped = dropped if self._dropped is None else self._dropped + dropped
        return [averages[str(index)] for index in range(len(gradients))]

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, elements before, elements after) over all steps so far; rate 0 before the first."""
        return self._compressor.compression_stats()

    def state_dict(self) -> dict[str, Any]:
        """The bases and the step, equal on all workers. The errors are in the gradients: save their mean with it."""
        return self._compressor.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            ValueError: it is of another model or format. Nothing was changed.
        """
        self._compressor.load_state_dict(state_dict)


def params_in_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_step(optimizer: torch.optim.Optimizer, aggregator: Aggregator) -> None:
    """Take an optimizer step with averaged gradients. Afterwards ``.grad`` holds the errors: do not set it to zero.

    A parameter without a gradient counts as one whose gradient is zero, since all workers must send the same.
    """
    parameters = params_in_optimizer(optimizer)
    gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    with torch.no_grad():
        averages = aggregator.aggregate(gradients)
    try:
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.grad = average
        optimizer.step()
    finally:
        for parameter, error in zip(parameters, gradients, strict=True):
            parameter.grad = error
