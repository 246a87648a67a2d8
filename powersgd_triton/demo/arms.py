"""Arms: ways of averaging the demo's gradients, for each way of distributing its model."""

import dataclasses
import functools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from powersgd_triton.config import AUTO, QUANTIZED
from powersgd_triton.demo.measure import Hook, HookTimer
from powersgd_triton.demo.model import GPT, Block
from powersgd_triton.demo.train import REPLICAS, WEIGHT_DECAY, Prepared, Settings, learning_rate_factor, stepping
from powersgd_triton.integrations import ddp as ours
from powersgd_triton.integrations.attach import attach

ZERO_STAGES = {f"zero{stage}": stage for stage in range(4)}
PARALLELISMS = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "fully_shard over all workers",
    "hsdp": f"fully_shard in each of {REPLICAS} replicas",
    **{name: f"DeepSpeed, ZeRO stage {stage}" for name, stage in ZERO_STAGES.items()},
}
"""{name: description}."""
# One bucket, since torch's hook hangs or aborts with several buckets on gloo.
ONE_BUCKET_MB = 1024


def one_matrix(_: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the view of a tensor as one matrix, dim 0 × the rest."""
    return 1, shape[0], math.prod(shape[1:])


def rows_of_kernels(_: str, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return the view of a convolution [out, in, k, k] as one matrix, out · in × k · k. None for other tensors."""
    return (1, math.prod(shape[:2]), math.prod(shape[2:])) if len(shape) == 4 else None


def exact_routers(name: str, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return the view of a router as one row, so that it is averaged exactly. None for other tensors."""
    return (1, 1, math.prod(shape)) if "router" in name else None


MODES: dict[str, dict[str, Any]] = {
    "alternating": {"algorithm": "alternating"},
    "twice": {"iterations": 2},
    "bf16error": {"error_dtype": "bf16"},
    "noexplore": {"explore_every": 0},
    "errors": {"error_feedback": True},
    "bypass8": {"bypass": "int8"},
    **{width: {"wire_dtype": width} for width in ("fp32", "bf16", "fp16", "int8", "int4")},
    "pairs": {"node_group": "pairs"},
    "dim0": {"matrices": one_matrix},
    "kernels": {"matrices": rows_of_kernels},
    "routers": {"matrices": exact_routers},
}
"""{name of a mode in an arm: arguments of our hook}. With "pairs", each two workers stand for a node."""
RANK, BUDGET = r"[1-9]\d*", r"[1-9]\d*(\.\d+)?x|auto"
SIZE = rf"{RANK}|{BUDGET}|{'|'.join(QUANTIZED)}"
ARM = rf"allreduce(\+bf16)?|torch(:{RANK})?|ours(:({SIZE}))?(\+({'|'.join(MODES)}))*"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way of averaging gradients: all-reduce, torch's hook or ours, with a rank, budget or format, and ``MODES``."""

    method: str
    rank: int | None
    modes: tuple[str, ...] = ()
    compression: float | str | None = None
    quantize: str | None = None

    @classmethod
    def parse(cls, text: str, default_rank: int) -> "Arm":
        """Parse an arm such as 'allreduce+bf16', 'torch:4', 'ours:32+alternating', 'ours:20x' or 'ours:int8'."""
        if not re.fullmatch(ARM, text):
            raise ValueError(
                "expected allreduce, allreduce+bf16, torch, ours, torch:RANK, ours:RANK, ours:COMPRESSIONx, ours:auto "
                f"or ours:FORMAT of {', '.join(QUANTIZED)}, ours with any of "
                f"{', '.join(f'+{mode}' for mode in MODES)}; got {text!r}"
            )
        sized, *modes = text.split("+")
        method, _, size = sized.partition(":")
        if size == AUTO or size.endswith("x"):
            return cls(method, None, tuple(modes), AUTO if size == AUTO else float(size.removesuffix("x")))
        if size in QUANTIZED:
            return cls(method, None, tuple(modes), quantize=size)
        return cls(method, None if method == "allreduce" else int(size or default_rank), tuple(modes))

    @property
    def options(self) -> dict[str, Any] | None:
        """Fields of our configuration. None for all-reduce."""
        if self.method == "allreduce":
            return None
        sizes = {"rank": self.rank, "compression": self.compression, "quantize": self.quantize}
        size = {name: value for name, value in sizes.items() if value is not None}
        return {**size, **{name: value for mode in self.modes for name, value in MODES[mode].items()}}

    def __str__(self) -> str:
        budget = f"{self.compression:g}x" if isinstance(self.compression, float) else self.compression
        size = f"rank {self.rank}" if self.rank is not None else budget or self.quantize
        return ", ".join(filter(None, [self.method, size, *self.modes]))


def distribute(
    model: GPT, settings: Settings, timer: HookTimer, arm: Arm, bucket_mb: float | None = ONE_BUCKET_MB
) -> Prepared:
    """Average gradients in an arm's way. ``bucket_mb`` is the size of DDP's buckets, and None its default."""
    if settings.parallelism in ZERO_STAGES:
        config = json.loads(Path(__file__).with_name("ds_config.json").read_text(encoding="utf-8"))
        config["zero_optimization"]["stage"] = ZERO_STAGES[settings.parallelism]
        config["powersgd"].update(arm.options or {"enabled": False})
        factor = functools.partial(learning_rate_factor, steps=settings.steps)
        engine = make_engine(model, config, model.positions.device, factor)

        def update_engine(loss: Tensor) -> None:
            engine.backward(loss)
            engine.step()

        return engine, update_engine
    if settings.parallelism == "ddp":
        replica: Any = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        state, hook = communication(arm, model)
        replica.register_comm_hook(state, timer.timed(hook))
    else:
        replica = shard(model, settings.parallelism)
        if arm.options is not None:
            attach(replica, **arm.options)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=settings.learning_rate, weight_decay=WEIGHT_DECAY)
    return replica, stepping(settings, optimizer)


def communication(arm: Arm, model: nn.Module) -> tuple[Any, Hook]:
    """Return (state, hook) to register with DDP. With torch's hook, the gradients must be in one bucket."""
    if arm.options is None:
        if "bf16" in arm.modes:
            # DDP refuses the hook itself by its name, unless there is NCCL. Gloo can do what it does.
            return None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
        return None, default_hooks.allreduce_hook
    if arm.method == "torch":
        # 2 is the smallest start that torch allows. Without an epsilon, a zero gradient becomes NaN.
        incumbent = torch_powersgd.PowerSGDState(None, arm.options["rank"], 2, orthogonalization_epsilon=1e-8)
        return incumbent, torch_powersgd.powerSGD_hook
    options = dict(arm.options)
    if "node_group" in options:
        device = next(model.parameters()).device
        options["node_group"] = init_device_mesh(device.type, (dist.get_world_size() // 2, 2))
    if "rank" in options:
        options["matrix_approximation_rank"] = options.pop("rank")
    return ours.PowerSGDState(None, start_powerSGD_iter=0, module=model, **options), ours.powerSGD_hook


def shard(model: GPT, parallelism: str) -> nn.Module:
    """Shard the model by FSDP or HSDP."""
    device, workers = model.positions.device, dist.get_world_size()
    if parallelism == "fsdp1":
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    if parallelism == "fsdp2":
        mesh = init_device_mesh(device.type, (workers,))
    else:
        mesh = init_device_mesh(device.type, (REPLICAS, workers // REPLICAS), mesh_dim_names=("replicate", "shard"))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh)
    return model


def make_engine(
    model: nn.Module, config: Mapping[str, Any], device: torch.device, factor: Callable[[int], float]
) -> Any:
    """Return a DeepSpeed engine for the model. ``factor`` maps a step's number to the factor of the learning rate."""
    # Set what a launcher would have set.
    workers = str(dist.get_world_size())
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(device.index or 0), WORLD_SIZE=workers)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    from powersgd_triton.integrations import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # On the CPU, DeepSpeed would compile this operation before the first step. The demo does not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=dict(config),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, factor),
    )
    return engine
