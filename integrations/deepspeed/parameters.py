"""DeepSpeed: every worker's parameters follow the optimizer's by coded differences, in place of ZeRO's all-gather.

At ZeRO stages 1 and 2, and with BF16_Optimizer, each worker owns a partition of the parameters w that the optimizer
updates, the masters. After a step it rounds them into its partition of the model's parameters v, and all workers gather
these partitions. Here each owner sends w − v in 8, 4 or 2 bits an element instead, and every worker adds what arrives
to v. What a code does not say remains in w − v, and the codes of the next steps say it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import deepspeed.comm
import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator, wait
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.deepspeed.seams import is_bf16_optimizer
from powersgd_triton.layout.wire_format import BLOCK, DIFFERENCES
from powersgd_triton.ops.backends import difference_codec

GATHER = "all_gather_dp_groups"
"""DeepSpeed's function that gathers parameters. The modules of both optimizers import it under this name."""


class ParameterSeam:
    """The all-gather of parameters in the optimizer's step.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer has a ``gathering_module``.
        config: Configuration of the compression, for the backend.
        width: Format of the differences, a key of ``DIFFERENCES``.

    Attributes:
        width: Format of the differences.
    """

    def __init__(self, engine: Any, config: PowerSGDConfig, width: str) -> None:
        self.width = DIFFERENCES[width]
        self._optimizer, self._config = engine.optimizer, config
        self._module = gathering_module(engine.optimizer)
        # The owner's v, by parameter group. DeepSpeed rounds w into the partition before it gathers.
        self._kept: list[Tensor] = []
        self._followed = False
        self._padding = [_gaps(flat, parameters) for flat, parameters in self._flats()]
        original = engine.optimizer.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            with self._following():
                return original(*args, **kwargs)

        engine.optimizer.step = step

    def sent_bytes(self) -> int:
        """Return the bytes that all owners send in a step."""
        sizes = [(len(rows), rows.shape[1]) for rows, _, _ in self._groups()]
        return sum(workers * self.width.difference_bytes(numel)[1] for workers, numel in sizes)

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Within it, the model's parameters are w rounded, on all workers. Collective, before and after."""
        self._keep()
        self._optimizer.update_lp_params()
        try:
            yield
        finally:
            # Gather v again: with a copy of it, each worker would need memory for the whole model.
            self._restore()
            for rows, own, communicator in self._groups():
                wait(communicator.all_gather(rows, own.clone()))

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        """Replace the all-gather of one step. Outside of steps, such as after a universal load, DeepSpeed gathers."""
        self._keep()
        self._followed = False
        gather = getattr(self._module, GATHER)
        setattr(self._module, GATHER, self._follow)
        try:
            yield
        except BaseException:
            # All workers must have the same v, also in the partition of an owner whose step failed halfway.
            if not self._followed:
                self._restore()
            raise
        finally:
            setattr(self._module, GATHER, gather)
        if not self._followed and not getattr(self._optimizer, "overflow", False):
            raise RuntimeError(
                f"powersgd sends parameters in {self.width.name}, but DeepSpeed {deepspeed.__version__} gathered them "
                f'without {GATHER}: use a version that the README lists, or set "parameters": null in the section '
                "'powersgd'"
            )

    @torch.no_grad()
    def _follow(self, *arguments: Any, **named: Any) -> None:  # noqa: ARG002
        """Stand in for ``all_gather_dp_groups``, whose arguments are the optimizer's own attributes."""
        self._restore()
        self._followed = True
        for (rows, own, communicator), masters, padding in zip(
            self._groups(), self._masters(), self._padding, strict=True
        ):
            encode, apply = difference_codec(self._config, own.device, own.dtype)
            workers, numel = rows.shape
            each = max(BLOCK, self._optimizer.allgather_bucket_size // workers // BLOCK * BLOCK)
            for start in range(0, numel, each):
                part = slice(start, min(start + each, numel))
                _, size = self.width.difference_bytes(part.stop - start)
                sent = own.new_empty(size, dtype=torch.uint8)
                gathered = own.new_empty(workers, size, dtype=torch.uint8)
                # The masters may be on the CPU.
                encode(masters[part].to(own.device), own[part], self.width, sent)
                wait(communicator.all_gather(gathered, sent))
                apply(gathered, self.width, rows[:, part])
            # Codes of 2 bits move elements by at least a scale. Checkpoints do not contain the padding.
            for gap in padding:
                rows.view(-1)[gap].zero_()

    def _groups(self) -> Iterator[tuple[Tensor, Tensor, Communicator]]:
        """Yield, by parameter group, v [workers, elements of a partition], the own partition, and the workers."""
        for (flat, _), group in zip(self._flats(), self._optimizer.real_dp_process_group, strict=True):
            # DeepSpeed's collectives, so that its communication logger counts the codes.
            communicator = Communicator(group, collectives=deepspeed.comm)
            rows = flat.detach().view(communicator.world_size, -1)
            yield rows, rows[communicator.index], communicator

    def _flats(self) -> list[tuple[Tensor, list[Tensor]]]:
        """Return, by parameter group, v flat, and the model's parameters, which are views of it."""
        optimizer = self._optimizer
        if is_bf16_optimizer(optimizer):
            return list(zip(optimizer.bf16_groups_flat, optimizer.bf16_groups, strict=True))
        return list(zip(optimizer.bit16_groups_flat, optimizer.bit16_groups, strict=True))

    def _masters(self) -> Sequence[Tensor]:
        optimizer = self._optimizer
        if is_bf16_optimizer(optimizer):
            return [masters.detach() for masters in optimizer.fp32_groups_flat_partition]
        return [masters.detach() for masters in optimizer.single_partition_of_fp32_groups]

    def _keep(self) -> None:
        partitions = [own for _, own, _ in self._groups()]
        if [kept.shape for kept in self._kept] != [own.shape for own in partitions]:
            self._kept = [torch.empty_like(own) for own in partitions]
        for kept, own in zip(self._kept, partitions, strict=True):
            kept.copy_(own)

    def _restore(self) -> None:
        for kept, (_, own, _) in zip(self._kept, self._groups(), strict=True):
            own.copy_(kept)


def gathering_module(optimizer: Any) -> ModuleType | None:
    """Return the module in which the optimizer's class looks up ``all_gather_dp_groups``. None if there is none."""
    modules = [sys.modules[kind.__module__] for kind in type(optimizer).__mro__]
    return next((module for module in modules if callable(getattr(module, GATHER, None))), None)


def _gaps(flat: Tensor, parameters: Sequence[Tensor]) -> list[slice]:
    """Return the parts of a flat tensor that belong to no parameter."""
    start = flat.storage_offset()
    ends = sorted((p.storage_offset() - start, p.storage_offset() - start + p.numel()) for p in parameters)
    edges = [0, *(edge for pair in ends for edge in pair), flat.numel()]
    return [slice(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]
