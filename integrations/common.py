"""What adapters share: names of parameters, wrappers of models, and the line that says what is on."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.comm.communicator import Communicator, travel_device
from powersgd_triton.config import AUTO, PowerSGDConfig, logger
from powersgd_triton.handle import Handle
from powersgd_triton.ops.gradients import as_real, write_back
from powersgd_triton.ranks.report import fewer

UNSAID = PowerSGDConfig(rank=32, wire_dtype="int4")
"""For who asks an adapter to compress and does not say how: less loss for its bytes than low ranks in fp32.

A budget loses still less, but some models, such as those of vectors only, cannot keep it.
"""

NO_STATE = "powersgd: %s has no PowerSGD state; errors start at zero"
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


@functools.cache
def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add, as in ``torch.distributed.checkpoint``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def uncompiled(model: Any) -> Any:
    """Return a model without what ``torch.compile`` wraps around it, unless ``fully_shard`` was applied to that."""
    # Not by getattr: FSDP1 and DeepSpeed forward it to the module inside, which may be compiled.
    while "_orig_mod" in getattr(model, "_modules", ()) and not hasattr(model, "_get_fsdp_state"):
        model = model._modules["_orig_mod"]
    return model


def check_closure(optimizer: Any, what: str) -> None:
    """Raise TypeError, which begins with ``what``, if the optimizer's step needs a closure."""
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        found = type(optimizer).__name__
        raise TypeError(f"{what} an optimizer whose step() needs no closure; got {found}") from error


def is_deepspeed(model: object) -> bool:
    """Return whether a model is a DeepSpeed engine, without importing DeepSpeed."""
    engine: Any = sys.modules.get("deepspeed.runtime.engine")
    return engine is not None and isinstance(model, engine.DeepSpeedEngine)


def register(model: DistributedDataParallel, state: object, hook: Any) -> None:
    """Register a communication hook with DDP. ValueError: The model has one."""
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        raise ValueError("the model has a communication hook already: attach sets its own") from error


def broadcast_from_first(tensors: Iterable[Tensor], communicator: Communicator) -> None:
    """Overwrite tensors with those of the first worker. Offloaded ones travel from the GPU, if the group needs it."""
    for tensor in tensors:
        if tensor.numel() and communicator.world_size > 1:
            sent = as_real(tensor).to(travel_device(communicator.group) if tensor.is_cpu else tensor.device)
            communicator.broadcast(sent)
            write_back(sent, tensor)


def announce(line: str) -> None:
    """Log a line, and print it on worker 0, since INFO messages are hidden by default."""
    logger.info(line)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def unlike(ours: PowerSGDConfig, theirs: PowerSGDConfig) -> tuple[str, str]:
    """Return the fields in which two configurations differ, with the values of either, for a message."""
    names = [field.name for field in dataclasses.fields(PowerSGDConfig)]
    different = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
    first, second = (", ".join(f"{name}={getattr(config, name)!r}" for name in different) for config in (ours, theirs))
    return first, second


def describe_ranks(config: PowerSGDConfig) -> str:
    """Return how gradients are sent, and from which step on."""
    start = f", from step {config.start_iter} on" if config.start_iter else ""
    if config.quantize is not None:
        return f"gradients in {config.quantize}{start}"
    if config.planned:
        return f"planned ranks{start}"
    return f"ranks by a function{start}" if callable(config.rank) else f"rank {config.rank}{start}"


def describe_bytes(count: float) -> str:
    """Return a number of bytes in a unit that suits it."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def describe(state: Handle) -> str:
    """Return the line for a wrapper that sends gradients only."""
    if state.config.compression == AUTO:
        return "powersgd: on; the first steps are exact and measured, and what follows from them is in the log"
    report, workers = state.report(), state._communicator.world_size
    if workers == 1:
        return "powersgd: gradients are averaged over 1 worker only, so that nothing is sent and nothing saved"
    # The report compares with an all-reduce, which sends everything twice. A reduce-scatter sends it once, and so do
    # quantized tensors in its place.
    times, quantized = 2 if state.replaces_reduce_scatter else 1, state.config.quantize is not None
    own = times if quantized and state._communicator.node_group is None else 1
    compression, count = report.compression * own / times, report.bytes_per_step / own
    sent, plain = describe_bytes(count), describe_bytes(count * compression)
    if report.quantize is None and not any(tensor.rank for tensor in report.tensors):
        return "powersgd: on, but no tensor takes fewer bytes as factors, so all are averaged exactly"
    return (
        f"powersgd: on, {describe_ranks(state.config)}; in a step each worker sends {sent} in place of {plain} in fp32 "
        f"({fewer(compression)})"
    )
