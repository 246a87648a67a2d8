"""DeepSpeed: what the adapter asks of an engine and its optimizer, in all supported releases, and what a step sends."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import deepspeed.comm
import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import NodeGroup
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.common import describe_bytes, describe_ranks
from powersgd_triton.ops.step import LossScaleSource
from powersgd_triton.ranks.report import fewer


def averaging_group(engine: Any) -> Any:
    """Return the process group over which an engine averages gradients."""
    return engine.mpu.get_data_parallel_group() if engine.pipeline_parallelism else engine.seq_data_parallel_group


def experts_group(parameter: Tensor) -> str:
    """Return the name of the expert-data group that averages a parameter's gradient. Empty for all workers."""
    # As ``deepspeed.moe.utils.is_moe_param``.
    return "" if getattr(parameter, "allreduce", True) else str(parameter.group_name)  # type: ignore[attr-defined]


def communicator_of(engine: Any, workers: Any, node_group: NodeGroup = None) -> Communicator:
    """Return the collectives of a process group over which an engine averages gradients."""
    # Workers with other experts hear of an error too.
    groups = engine.expert_data_parallel_group.items()
    peers = [engine.expert_parallel_group[name] for name, group in groups if group is workers]
    others = [group for group in peers if dist.get_world_size(group) > 1]
    # DeepSpeed's collectives, so that its communication logger counts the messages.
    return Communicator(workers, others, deepspeed.comm, node_group)


def loss_scale_source(engine: Any) -> LossScaleSource:
    """Return the engine's scaler, or a function that returns its loss scale."""
    optimizer = engine.optimizer
    for owner, name in ((engine, "torch_autocast_z0_gradscaler"), (optimizer, "torch_autocast_gradscaler")):
        scaler: torch.amp.GradScaler | None = getattr(owner, name, None)
        if scaler is not None:
            return scaler

    def current() -> float | None:
        if getattr(optimizer, "custom_loss_scaler", False):
            return float(optimizer.external_loss_scale)
        # Stage 0 keeps it in ``loss_scale_config``, the other stages have a property.
        scale = getattr(getattr(optimizer, "loss_scale_config", optimizer), "cur_scale", None)
        return None if scale is None else float(scale)

    return current


def is_bf16_optimizer(optimizer: Any) -> bool:
    """Return whether this is DeepSpeed's BF16_Optimizer, which accumulates gradients in fp32 and all-reduces them."""
    return type(optimizer).__name__ == "BF16_Optimizer"


def masters_of(optimizer: Any) -> Any:
    """Return the fp32 partitions that this worker updates at ZeRO stages 1 and 2, and with BF16_Optimizer, by group."""
    bf16 = is_bf16_optimizer(optimizer)
    return optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return a parameter's shape, even if ZeRO 3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def checkpoint_folder(engine: Any, load_dir: Any, tag: Any = None) -> Path | None:
    """Return the folder that DeepSpeed will load. None if it will find nothing."""
    if tag is None:
        latest = Path(load_dir) / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
        if not latest.is_file():
            return None
        tag = latest.read_text().strip()
    folder = Path(load_dir) / str(tag)
    return folder if folder.is_dir() else None


def run_within(owner: Any, method: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Replace an object's method by one that runs it within a context."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    setattr(owner, method, within)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one optimizer step that each worker sends, if all-reduces, reduce-scatters and gathers are rings.

    At stage 3, hpZ and quantized weights are not taken into account: they change bytes of parameters only.

    Attributes:
        elements, compressed: Number of elements of all dense trainable parameters, and of those that are compressed.
        gradients, factors: Bytes of gradients without compression, in DeepSpeed's dtype for messages, and with it.
        parameters, differences: Bytes of ZeRO's all-gathers of parameters without compression, and with it.
    """

    elements: int
    compressed: int
    gradients: float
    factors: float
    parameters: float
    differences: float

    @property
    def plain(self) -> float:
        """Bytes of a whole step without compression."""
        return self.gradients + self.parameters

    @property
    def sent(self) -> float:
        """Bytes of a whole step with compression."""
        return self.factors + self.differences


def describe(engine: Any, config: PowerSGDConfig, traffic: Traffic, width: str | None) -> str:
    """Return one line for the log. ``width`` is that of the parameters' differences, if these are sent."""
    share = 100 * traffic.compressed / max(1, traffic.elements)
    gradients, whole = (
        fewer(before / after if after else 1.0)
        for before, after in ((traffic.gradients, traffic.factors), (traffic.plain, traffic.sent))
    )
    how = "as DeepSpeed sends them" if width is None else f"in {width}"
    parameters = f"Parameters are sent {how}. " if traffic.parameters else ""
    return (
        f"powersgd: on at ZeRO stage {int(engine.zero_optimization_stage())} ({type(engine.optimizer).__name__}), "
        f"{describe_ranks(config)}; {share:.1f}% of {traffic.elements:,} gradient elements are compressed, gradients "
        f"take {gradients} bytes. {parameters}In a whole step each worker sends {describe_bytes(traffic.sent)} "
        f"in place of {describe_bytes(traffic.plain)} ({whole})"
    )
