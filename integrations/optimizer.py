"""A plain training loop, with the interface of the reference implementation (epfml/powersgd). Change one import."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powersgd_triton.checkpoint import StateDict
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.compressor import Compressor
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.telemetry import Callback
from powersgd_triton.integrations.common import check_closure
from powersgd_triton.ops.gradients import as_real, check_writable, in_form, real_shape

__all__ = ["Aggregator", "AllReduce", "Config", "PowerSGD", "optimizer_step", "params_in_optimizer"]


class Config(NamedTuple):
    """Configuration of the compression, with the reference implementation's names and meaning.

    Attributes:
        rank: Number of columns of the factors.
        min_compression_rate: Compress a tensor only if it shrinks by more than this factor. A step sends
            ``num_iters_per_step · rank · (n + m) / 2`` elements on average.
        num_iters_per_step: Number of products and all-reduces in one step, left and right by turns.
        start_compressing_after_num_steps: Number of first steps with exact averaging.
    """

    rank: int
    min_compression_rate: float = 2
    num_iters_per_step: int = 1
    start_compressing_after_num_steps: int = 100


class Aggregator(abc.ABC):
    """Averages gradients over the workers, and leaves in them what was not sent."""

    @abc.abstractmethod
    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the (approximate) averages in new tensors. The inputs become the compression errors, or zero."""


class AllReduce(Aggregator):
    """Averages gradients exactly over ``group``. None uses the default group, or a single process."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._communicator = Communicator(group)

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        if not gradients:
            return []
        flats = [as_real(gradient).view(-1) for gradient in gradients]
        pieces = self._communicator.mean(torch.cat(flats)).split([flat.numel() for flat in flats])
        # Gradients of several dtypes are averaged in the widest of them. torch views real elements as complex only from
        # an even offset, which a copy has.
        averages = [
            in_form(piece.to(flat.dtype, copy=gradient.is_complex()), gradient.shape, gradient.dtype)
            for piece, flat, gradient in zip(pieces, flats, gradients, strict=True)
        ]
        for gradient in gradients:
            gradient.zero_()
        return averages


class PowerSGD(Aggregator):
    """Averages a list of gradients with the alternating algorithm. The gradients keep the error between steps.

    What a step did not send stays in the gradients, in their dtype, and the next backward pass adds to them. So do not
    set the gradients to zero between steps. A skipped step needs no care. If an element is not finite, the averages of
    all compressed tensors become NaN. In the gradients it becomes zero, and all else is sent in the next step.

    Args:
        params: Parameters, or tensors of their shapes, in the order of the gradients. For ``optimizer_step`` that is
            the order of ``params_in_optimizer(optimizer)``.
        config: Configuration of the compression. ``PowerSGDConfig(quantize=…)`` quantizes gradients in place of
            factors: the state then keeps errors, if any are kept, and the gradients become zero.
        group: Process group. None uses the default group, or a single process if no group is initialized.

    Raises:
        TypeError, ValueError: A setting has the wrong type or is out of range, or is for factors in ``PowerSGDConfig``.
    """

    def __init__(
        self, params: Sequence[Tensor], config: Config | PowerSGDConfig, group: dist.ProcessGroup | None = None
    ) -> None:
        self.config = config
        if not isinstance(config, (Config, PowerSGDConfig)):
            raise TypeError(f"config must be a Config or a PowerSGDConfig; got {type(config).__name__}")
        if not isinstance(config, PowerSGDConfig):
            config = PowerSGDConfig(
                rank=config.rank,
                min_compression_rate=config.min_compression_rate,
                iterations=config.num_iters_per_step,
                start_iter=config.start_compressing_after_num_steps,
                algorithm="alternating",
                # The gradients themselves keep the error, see ``leave_error``.
                error_feedback=False,
            )
        elif config.quantize is None:
            raise ValueError(
                "the plain loop takes ranks from its own Config(rank=…), and PowerSGDConfig(quantize=…) for gradients; "
                f"got a PowerSGDConfig with rank={config.rank}"
            )
        tensors: list[Any] = [params] if isinstance(params, nn.Module) else [*params]
        others = [type(each).__name__ for each in tensors if not isinstance(each, Tensor)]
        if others:
            raise TypeError(f"params must be tensors, as params_in_optimizer(optimizer) returns; got a {others[0]}")
        shapes = {str(index): real_shape(tensor.shape, tensor.dtype) for index, tensor in enumerate(tensors)}
        self._compressor = Compressor(config, shapes, group)
        self._dropped: Tensor | int = 0

    @property
    def step_counter(self) -> int:
        """Number of finished steps."""
        return self._compressor.iteration

    @property
    def keeps_errors(self) -> bool:
        """Whether errors are kept here and not in the gradients."""
        return bool(self._compressor.config.error_feedback)

    @property
    def dropped_elements(self) -> int:
        """Number of non-finite elements in this worker's gradients so far. Reading it waits for the device."""
        return int(self._dropped)

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the averages in new tensors with the gradients' dtypes. The inputs become the errors.

        Raises:
            TypeError, ValueError: The gradients' shapes are not those of the parameters. Nothing was changed.
        """

        def check() -> None:
            for index, gradient in enumerate(gradients):
                if isinstance(gradient, Tensor) and gradient.layout == torch.strided:
                    check_writable(str(index), gradient)

        self._compressor._examined(check)
        try:
            compressed = self._compressor.compress(gradients)
        except ValueError as error:
            order = "for optimizer_step, parameters must be in the order of params_in_optimizer(optimizer)"
            raise ValueError(f"{error}; {order}") from None
        averages = self._compressor.decompress(compressed)
        assert isinstance(averages, Mapping)
        if self._compressor.config.quantize is None:
            self._dropped = self._compressor.leave_error(compressed, gradients) + self._dropped
        for gradient in gradients if self._compressor.config.quantize else []:
            finite = gradient.isfinite()
            self._dropped = gradient.numel() - finite.sum() + self._dropped
            # A step that does not count is sent again.
            gradient.masked_fill_(~finite | (compressed.verdict > 0), 0)
        return [averages[str(index)] for index in range(len(gradients))]

    def compression_stats(self) -> tuple[float, int, int]:
        """See ``Compressor.compression_stats``. The exact first steps count too."""
        return self._compressor.compression_stats()

    def telemetry(self, callback: Callback | None = None, *, writer: Any = None, every: int = 50) -> None:
        """See ``Compressor.telemetry``. Layers are numbered as the parameters are."""
        self._compressor.telemetry(callback, writer=writer, every=every)

    def state_dict(self) -> dict[str, Any]:
        """Return the bases and the step, equal on all workers. The gradients hold the errors: save their mean too."""
        return self._compressor.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """See ``Compressor.load_state_dict``."""
        self._compressor.load_state_dict(state_dict)


def params_in_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_step(optimizer: torch.optim.Optimizer, aggregator: Aggregator) -> None:
    """Take an optimizer step with averaged gradients. Afterwards ``.grad`` holds the errors: do not set it to zero.

    A missing gradient counts as zero, since all workers must send the same tensors. A parameter that does not require
    gradients stays as it is, and so does its ``.grad``, but for what is sent of an error that is kept elsewhere.

    Raises:
        TypeError: The optimizer needs a closure, as LBFGS does, or the aggregator is none. Nothing was changed.
        Exception: What ``aggregator.aggregate`` raises, or the optimizer.
    """
    if not isinstance(aggregator, Aggregator):
        raise TypeError(f"optimizer_step expects an optimizer and an Aggregator; got a {type(aggregator).__name__}")
    check_closure(optimizer, "optimizer_step expects")
    parameters = params_in_optimizer(optimizer)
    gradients = [p.grad if p.grad is not None and p.requires_grad else torch.zeros_like(p) for p in parameters]
    with torch.no_grad():
        averages = aggregator.aggregate(gradients)
    after = [error if p.requires_grad else p.grad for p, error in zip(parameters, gradients, strict=True)]
    try:
        for index, (parameter, average) in enumerate(zip(parameters, averages, strict=True)):
            if parameter.requires_grad:
                parameter.grad = average
                continue
            if getattr(aggregator, "keeps_errors", False):
                after[index] = average if parameter.grad is None else parameter.grad + average
            parameter.grad = None
        optimizer.step()
    finally:
        for parameter, grad in zip(parameters, after, strict=True):
            parameter.grad = grad
