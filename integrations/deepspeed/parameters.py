"""DeepSpeed: every worker's parameters follow the optimizer's by coded differences, in place of ZeRO's all-gather.

At ZeRO stages 1 and 2, and with BF16_Optimizer, each worker owns a partition of the masters w, which the optimizer
updates. DeepSpeed rounds them into the model's parameters v, which all workers gather. Here each owner sends w − v in
8, 4 or 2 bits an element, and every worker adds what arrives to v. The rounding error remains in w − v for later steps.
"""

import contextlib
import sys
from collections.abc import Container, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import Tensor

from powersgd_triton.comm.agreement import fingerprint, together
from powersgd_triton.comm.communicator import Communicator, wait
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.deepspeed.engines import communicator_of, is_bf16_optimizer, masters_of, run_within
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.wire_format import BLOCK, DIFFERENCES
from powersgd_triton.ops.backends import difference_codec

GATHER = "all_gather_dp_groups"
"""DeepSpeed's function that gathers parameters. The modules of both optimizers import it under this name."""
UNEQUAL = "that must stay equal, and differences would round them differently: leave the key out"


class Group(NamedTuple):
    """A parameter group: v as ``rows`` [workers, numel of a partition], this owner's ``own`` row, its masters w."""

    communicator: Communicator
    rows: Tensor
    own: Tensor
    masters: Tensor
    parameters: Sequence[Tensor]


class ParameterOverride:
    """Overrides the all-gather of parameters in the optimizer's step, unless ``why_not_differences`` has a reason."""

    def __init__(self, engine: Any, config: PowerSGDConfig, width: str) -> None:
        self.width, self._config = DIFFERENCES[width], config
        self._engine, self._optimizer = engine, engine.optimizer
        self._module = _gathering_module(engine.optimizer)
        groups = self._groups()
        # The owner's v. DeepSpeed rounds w into the partition before it gathers.
        self._kept = [torch.empty_like(group.own) for group in groups]
        self._padding = [_gaps(group.rows, group.parameters) for group in groups]
        self._steps = 0
        self._sent = self._exact = False
        run_within(engine.optimizer, "step", self._sending)

    def bytes_per_step(self, own: Container[int]) -> tuple[int, int]:
        """Return the bytes of all partitions, and of all owners' messages, of groups with the identities ``own``."""
        groups = [group for group in self._groups() if any(id(parameter) in own for parameter in group.parameters)]
        messages = [(len(group.rows), part) for group in groups for part in self._messages(group)]
        sent = sum(owners * self.width.difference_bytes(part.stop - part.start)[1] for owners, part in messages)
        return sum(group.rows.nbytes for group in groups), sent

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Within it, the model's parameters are w rounded, on all workers. Collective, before and after."""
        if self._exact:
            yield
            return
        self._keep()
        self._optimizer.update_lp_params()
        self._exact = True
        try:
            yield
        finally:
            self._exact = False
            # Gather v again: with a copy of it, each worker would need memory for the whole model.
            self._restore()
            for group in self._groups():
                wait(group.communicator.all_gather(group.rows, group.own.clone()))

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Replace the all-gather of one step. Outside of steps, such as after a universal load, DeepSpeed gathers."""
        if self._exact:
            raise RuntimeError("a step inside exact_parameters(), which brings back the parameters from before it")
        self._keep()
        self._sent = False
        gather = getattr(self._module, GATHER)
        setattr(self._module, GATHER, self._send)
        try:
            yield
        except BaseException:
            # All workers must have the same v, also in the partition of an owner whose step failed halfway.
            if not self._sent:
                self._restore()
            raise
        finally:
            setattr(self._module, GATHER, gather)
        if not self._sent and not getattr(self._optimizer, "overflow", False):
            raise RuntimeError(
                f"powersgd sends parameters in {self.width.name}, but DeepSpeed {deepspeed.__version__} gathered them "
                f'without {GATHER}: use a version that docs/index.md lists, or set "parameters": null in the section'
            )

    @torch.no_grad()
    def _send(self, *arguments: Any, **named: Any) -> None:  # noqa: ARG002
        """Stand in for ``all_gather_dp_groups``, whose arguments are the optimizer's own attributes."""
        self._restore()
        self._sent = True
        groups = self._groups()
        for group, padding in zip(groups, self._padding, strict=True):
            encode, apply, _ = difference_codec(self._config, group.own.device, group.own.dtype)
            for part in self._messages(group):
                _, size = self.width.difference_bytes(part.stop - part.start)
                sent = group.own.new_empty(size, dtype=torch.uint8)
                gathered = group.own.new_empty(len(group.rows), size, dtype=torch.uint8)
                # The masters may be on the CPU.
                encode(Encoding(group.masters[part].to(sent.device), group.own[part], self.width, sent))
                wait(group.communicator.all_gather(gathered, sent))
                apply(Decoding(gathered, self.width, group.rows[:, part]))
            # Padding must stay 0: 2 bits have no code 0, and checkpoints leave padding out.
            for gap in padding:
                group.rows.view(-1)[gap].zero_()
        self._steps += 1
        if self._config.check_every and self._steps % self._config.check_every == 0:
            # What changes v besides the optimizer may differ on each worker.
            for index, group in enumerate(groups):
                facts = {f"parameters of group {index}": int(fingerprint(group.rows))}
                together("a check", lambda: (None, {}, facts), group.communicator, group.own.device)  # noqa: B023

    def _groups(self) -> list[Group]:
        """Return the optimizer's parameter groups. Not kept, since DeepSpeed may offload and reload their tensors."""
        optimizer = self._optimizer
        bf16 = is_bf16_optimizer(optimizer)
        flats = optimizer.bf16_groups_flat if bf16 else optimizer.bit16_groups_flat
        parameters = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
        groups = []
        all_workers = optimizer.real_dp_process_group
        for flat, masters, views, workers in zip(flats, masters_of(optimizer), parameters, all_workers, strict=True):
            communicator = communicator_of(self._engine, workers)
            # What one worker has alone, such as its experts, is not sent.
            if communicator.world_size > 1:
                rows = flat.detach().view(communicator.world_size, -1)
                groups.append(Group(communicator, rows, rows[communicator.index], masters.detach(), views))
        return groups

    def _messages(self, group: Group) -> list[slice]:
        """Return the parts of a partition that are sent one after the other."""
        workers, numel = group.rows.shape
        each = max(BLOCK, self._optimizer.allgather_bucket_size // workers // BLOCK * BLOCK)
        return [slice(start, min(start + each, numel)) for start in range(0, numel, each)]

    def _keep(self) -> None:
        for kept, group in zip(self._kept, self._groups(), strict=True):
            kept.copy_(group.own)

    def _restore(self) -> None:
        for kept, group in zip(self._kept, self._groups(), strict=True):
            group.own.copy_(kept)


def why_not_differences(engine: Any) -> str | None:
    """Return the reason why an engine's parameters cannot be sent as differences. None if they can."""
    if int(engine.zero_optimization_stage()) == 3:
        return "ZeRO stage 3 gathers parameters in every pass: use stage 1 or 2, or leave the key out"
    if _gathering_module(engine.optimizer) is None:
        return f"{type(engine.optimizer).__name__} gathers no parameters after a step: leave the key out"
    # DeepSpeed before 0.16.4 has no autotp_size.
    tensor_parallel = bwc_tensor_model_parallel_world_size(engine.mpu), getattr(engine, "autotp_size", lambda: 1)()
    if max(tensor_parallel) > 1:
        return f"with tensor parallelism, workers share parameters {UNEQUAL}"
    if any(type(layer).__name__ == "TiedLayerSpec" for layer in getattr(engine.module, "_layer_specs", ())):
        return f"stages of this pipeline share tied parameters {UNEQUAL}"
    limited = [name for name, module in engine.module.named_modules() if getattr(module, "max_norm", None) is not None]
    if limited:
        return (
            f"{limited[0]!r} has max_norm and changes its parameters in each forward pass, on each worker in another "
            "way. DeepSpeed's own all-gather makes them equal again, differences do not: leave the key out"
        )
    return None


def _gathering_module(optimizer: Any) -> ModuleType | None:
    """Return the module in which the optimizer's class looks up ``all_gather_dp_groups``. None if there is none."""
    modules = [sys.modules[kind.__module__] for kind in type(optimizer).__mro__]
    return next((module for module in modules if callable(getattr(module, GATHER, None))), None)


def _gaps(flat: Tensor, parameters: Sequence[Tensor]) -> list[slice]:
    """Return the parts of a tensor's memory that belong to no parameter."""
    start = flat.storage_offset()
    ends = sorted((p.storage_offset() - start, p.storage_offset() - start + p.numel()) for p in parameters)
    edges = [0, *(edge for pair in ends for edge in pair), flat.numel()]
    return [slice(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]
