"""DeepSpeed: the state of one engine's compression, for all ZeRO stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed.comm
import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.checkpoint import StateDict, opened
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.handle import Handle
from powersgd_triton.core.saved_state import LoadReport, SavedState, Size, sizes_digest
from powersgd_triton.integrations.names import plain_name
from powersgd_triton.layout.layout import sizes


@dataclasses.dataclass
class Gradient:
    """One parameter's gradient on its way through DeepSpeed.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the whole parameter.
        tensor: This worker's own gradient, contiguous, with as many elements as ``shape``.
        part: (first element, tensor that takes the average from this element on). None overwrites ``tensor``.
    """

    name: str
    shape: tuple[int, ...]
    tensor: Tensor
    part: tuple[int, Tensor] | None = None


class DeepSpeedState(Handle):
    """The compression of one engine's gradients, available as ``engine.powersgd``.

    Args:
        config: Configuration of the compression.
        engine: A ``DeepSpeedEngine``.
        group: Process group of the workers that average gradients with each other.

    Raises:
        ValueError: The configuration's budget is too small for the model.
    """

    def __init__(self, config: PowerSGDConfig, engine: Any, group: dist.ProcessGroup) -> None:
        self.group = group
        self._framework = engine
        self._names = {id(parameter): plain_name(name) for name, parameter in engine.module.named_parameters()}
        sparse = {id(module.weight) for module in engine.module.modules() if getattr(module, "sparse", False) is True}
        # Only dense gradients. DeepSpeed averages sparse gradients itself.
        self.shapes = {
            self._names[id(parameter)]: whole_shape(parameter)
            for parameter in engine.module.parameters()
            if parameter.requires_grad and whole_numel(parameter) and id(parameter) not in sparse
        }
        # DeepSpeed's collectives, so that its communication logger counts the factors.
        communicator = Communicator(group, collectives=deepspeed.comm)
        super().__init__(Engine(config, communicator, lambda: self.shapes, torch.device(engine.device)))
        self._reached = False

    # A step -----------------------------------------------------------------------------------------------------

    def name_of(self, parameter: Tensor) -> str:
        """Return a parameter's name in the module.

        Raises:
            RuntimeError: The parameter was not in the module when compression was switched on.
        """
        try:
            return self._names[id(parameter)]
        except KeyError:
            raise RuntimeError(
                f"DeepSpeed reduces the gradient of a parameter of shape {whole_shape(parameter)} that the module did "
                "not have when powersgd was enabled; change the model before deepspeed.initialize"
            ) from None

    def compressing(self) -> bool:
        """Return whether to compress the seam's gradients. Note that DeepSpeed has called the seam in this step."""
        self._reached = True
        return bool(self._framework.global_steps >= self.config.start_iter)

    @torch.no_grad()
    def average(self, gradients: Sequence[Gradient], factor: float = 1.0) -> None:
        """Write ``factor`` times the averages over the workers to the gradients, or to their parts."""
        if not gradients:
            return
        views = {gradient.name: gradient.tensor.view(gradient.shape) for gradient in gradients}
        targets = [g.tensor.view(-1) if g.part is None else g.part[1] for g in gradients]
        ranges = {
            gradient.name: (0 if gradient.part is None else gradient.part[0], target)
            for gradient, target in zip(gradients, targets, strict=True)
            if target.numel()
        }
        whole = all(gradient.part is None for gradient in gradients)
        # ZeRO 2 and 3 reduce in every micro-batch. A gradient that comes again begins a new step of the compression.
        layout = self._engine.begin(
            tuple(gradient.name for gradient in gradients),
            lambda: {gradient.name: gradient.shape for gradient in gradients},
            gradients[0].tensor.device,
        )
        self._engine.average(layout, views, ranges=None if whole else ranges)
        if factor != 1.0:
            for target in targets:
                target.mul_(factor)

    def check_reached(self) -> None:
        """Check that DeepSpeed has called the seam. Call it before the optimizer's step.

        Raises:
            RuntimeError: No gradient has come through the seam since the last step.
        """
        if self.shapes and not self._reached:
            raise RuntimeError(
                f"powersgd is on, but DeepSpeed {deepspeed.__version__} averaged the gradients of step "
                f"{self._framework.global_steps} without it. This release may reduce gradients in another way: use "
                "a version that the README lists, or take the section 'powersgd' out. (This also happens if "
                "deepspeed.enable is called between backward() and step().)"
            )

    def close_step(self) -> None:
        """End the step. Call it after the optimizer's step, applied or skipped."""
        if self._reached:
            self._reached = False
            # DeepSpeed may skip a step because of an overflow that no bucket of this worker contains.
            self._engine.end_step(applied=not getattr(self._framework.optimizer, "overflow", False))

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the mean error, bases and step, as CPU tensors and numbers. Collective. Equal on all workers."""
        mean = self._engine.communicator.mean
        saved = self._engine.state_dict(lambda error: mean(error).cpu())
        for parts in saved["matrices"].values():
            parts.update({key: part.cpu() for key, part in parts.items()})
        # Include parameters of this model that have not had a gradient yet.
        idle = {name: [n, m, 0] for name, (n, m, _) in self._sizes().items()}
        tensors = saved["tensors"] = {**idle, **saved["tensors"]}
        return {**saved, "fingerprint": sizes_digest(tensors)}

    def load_state_dict(self, state_dict: StateDict) -> LoadReport:
        """Continue from a saved state of any number of workers and any rank, or from a file. Collective.

        Raises:
            ValueError: A worker's state belongs to another model, or has another format. Nothing was changed.
            DisagreementError: Workers load different states, or do not all load one. Nothing was changed.
        """
        return self.adopt(*self.read(lambda: opened(state_dict)))

    def read(self, read: Callable[[], Any]) -> tuple[SavedState, LoadReport]:
        """Check a saved state on all workers as ``load_state_dict`` does, before anything is loaded. Collective."""
        return self._engine.peers.read(lambda: (read(), self._sizes()))

    def adopt(self, saved: SavedState, report: LoadReport) -> LoadReport:
        """Continue from the result of ``read``. Not collective."""
        return self._engine.adopt(saved, report)

    def forget(self) -> None:
        """Set all errors to zero, because the weights were replaced."""
        self._engine.memory.forget_errors()
        self._engine.step.forget()

    def _sizes(self) -> dict[str, Size]:
        return sizes(self.shapes, self.config)


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return a parameter's shape, even if ZeRO 3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def whole_numel(parameter: Tensor) -> int:
    """Return a parameter's number of elements, even if ZeRO 3 has partitioned it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
