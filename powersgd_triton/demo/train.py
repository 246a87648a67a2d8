"""Training of one worker with one way of averaging gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.config import AUTO
from powersgd_triton.demo import parallelism
from powersgd_triton.demo.measure import Hook, HookTimer, Traffic, progress
from powersgd_triton.demo.model import CONTEXT, GPT, WIDTH, Corpus, next_token_loss, read_corpus, sample_batch
from powersgd_triton.demo.workers import process_group
from powersgd_triton.integrations import ddp as ours

BATCH_PER_WORKER = 16
LEARNING_RATE = 3e-3
"""At the default width. Wider models have a rate inversely proportional to their width."""
WEIGHT_DECAY = 0.01
WARMUP_STEPS, FINAL_LEARNING_RATE = 30, 0.1
VALIDATION_BATCHES, VALIDATION_BATCH = 20, 32
# One bucket, since torch's hook hangs or aborts with several buckets on gloo.
ONE_BUCKET_MB = 1024
METHODS = ("allreduce", "torch", "ours")
MODES: dict[str, dict[str, Any]] = {
    "alternating": {"algorithm": "alternating"},
    "twice": {"iterations": 2},
    "bf16error": {"error_dtype": "bf16"},
    "noexplore": {"explore_every": 0},
    **{width: {"wire_dtype": width} for width in ("fp32", "bf16", "fp16", "int8", "int4")},
    "pairs": {"node_group": "pairs"},
}
"""{name of a mode in an arm: arguments of our hook}. With "pairs", each two workers stand for a node."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way of averaging gradients.

    Attributes:
        method: All-reduce, torch's hook or ours.
        rank: Rank of the approximation. None if there is none, or if ranks are planned.
        modes: Names of modes of our hook, from ``MODES``.
        compression: Budget of our hook, if ranks are planned; or "auto".
    """

    method: str
    rank: int | None
    modes: tuple[str, ...] = ()
    compression: float | str | None = None

    @classmethod
    def parse(cls, text: str, default_rank: int) -> Arm:
        """Parse an arm: 'allreduce', 'allreduce+bf16', 'torch:4', 'ours:32+alternating', 'ours:20x' or 'ours:auto'.

        A number is a rank, 20x is a budget of 20 times fewer bytes, and auto chooses one from measured times.
        """
        found = re.fullmatch(r"(\w+)(?::(?:([1-9]\d*)|([1-9]\d*(?:\.\d+)?x|auto)))?((?:\+\w+)*)", text)
        modes = tuple(found[4].split("+")[1:]) if found else ()
        if (
            found is None
            or found[1] not in METHODS
            or (found[1] == "allreduce" and (found[2] or found[3] or modes not in ((), ("bf16",))))
            or not MODES.keys() >= set(modes)
            or (found[1] == "torch" and (found[3] or modes))
        ):
            raise ValueError(
                "expected allreduce, allreduce+bf16, torch, ours, torch:RANK, ours:RANK, ours:COMPRESSIONx or "
                f"ours:auto, ours with any of {', '.join(f'+{mode}' for mode in MODES)}; got {text!r}"
            )
        if found[3]:
            return cls(found[1], None, modes, AUTO if found[3] == AUTO else float(found[3].removesuffix("x")))
        return cls(found[1], None if found[1] == "allreduce" else int(found[2] or default_rank), modes)

    @property
    def options(self) -> dict[str, Any] | None:
        """Fields of our configuration. None for all-reduce."""
        if self.method == "allreduce":
            return None
        size = {"rank": self.rank} if self.compression is None else {"compression": self.compression}
        return {**size, **{name: value for mode in self.modes for name, value in MODES[mode].items()}}

    def __str__(self) -> str:
        rank = None if self.rank is None else f"rank {self.rank}"
        budget = None if self.compression is None else budget_text(self.compression)
        return ", ".join(filter(None, [self.method, rank, budget, *self.modes]))


def budget_text(compression: float | str, times: str = "x") -> str:
    """Return a budget as an arm has it."""
    return compression if isinstance(compression, str) else f"{compression:g}{times}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all arms share."""

    steps: int
    workers: int
    device: str
    seed: int = 0
    parallelism: str = "ddp"
    width: int = WIDTH
    batch: int = BATCH_PER_WORKER

    @property
    def learning_rate(self) -> float:
        return LEARNING_RATE * WIDTH / self.width


Prepared = tuple[nn.Module, nn.Module, Callable[[Tensor], None]]
"""(model to train, model to validate, function that takes a training step for a loss)."""
Prepare = Callable[[GPT, Settings, torch.device, "HookTimer"], Prepared]
"""Makes a model ready for training with other workers."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One worker's figures for one arm.

    Attributes:
        losses: Training loss of each step, in nats per token.
        bytes_sent: Bytes in collectives up to and including each step, on a scale on which an all-reduce of B bytes
            counts B.
        sent, received: Bytes that this worker sends and receives in a step, as a ring sends them. Means over steps.
        validation_loss: Loss after training, in nats per token.
        gradient_bytes: Bytes of gradients that a worker would send in a step without compression.
        hook_ms, step_ms: Medians over steps. ``hook_ms`` is None if there is no hook.
    """

    losses: list[float]
    bytes_sent: list[float]
    sent: float
    received: float
    validation_loss: float
    gradient_bytes: int
    hook_ms: float | None
    step_ms: float

    @property
    def bytes_per_step(self) -> float:
        """Mean number of bytes sent in a step."""
        return self.bytes_sent[-1] / len(self.bytes_sent)

    @property
    def compression(self) -> float:
        """Bytes that a worker would send without compression, divided by bytes sent."""
        return self.gradient_bytes / self.bytes_per_step if self.bytes_per_step else math.inf


def train_worker(worker: int, settings: Settings, title: str, prepare: Prepare, store_path: str) -> Result:
    """Train together with the other workers, which all call this function. Return this worker's figures.

    ``prepare`` decides how the workers average, for example ``distribute`` with an arm. The other arguments are those
    of ``process_group`` and ``progress``.
    """
    device = torch.device(settings.device, worker) if settings.device == "cuda" else torch.device(settings.device)
    with process_group(worker, settings.workers, device, store_path):
        corpus = read_corpus()
        torch.manual_seed(settings.seed)
        model = GPT(settings.width).to(device)
        gradients = parallelism.gradient_bytes(model, settings.parallelism, settings.workers)
        traffic = Traffic(parallelism.GRADIENT_COLLECTIVES.get(settings.parallelism))
        timer = HookTimer(device)
        generator = torch.Generator().manual_seed(settings.seed + 1 + worker)
        losses, bytes_sent, seconds = list[float](), list[float](), list[float]()
        # DeepSpeed looks up the collectives when it starts, so counting must begin before that.
        with traffic.counting():
            replica, validated, update = prepare(model, settings, device, timer)
            traffic.reset()
            with progress(title, settings.steps, shown=worker == 0) as show:
                for _ in range(settings.steps):
                    begin = time.perf_counter()
                    inputs, targets = sample_batch(corpus.training, settings.batch, CONTEXT, generator)
                    loss = next_token_loss(replica, inputs.to(device), targets.to(device))
                    update(loss)
                    losses.append(loss.item())
                    seconds.append(time.perf_counter() - begin)
                    bytes_sent.append(traffic.as_all_reduces)
                    show(losses[-1], bytes_sent[-1])
        return Result(
            losses=losses,
            bytes_sent=bytes_sent,
            sent=traffic.sent / settings.steps,
            received=traffic.received / settings.steps,
            validation_loss=validation_loss(validated, corpus, device),
            gradient_bytes=gradients,
            hook_ms=timer.median_ms(),
            step_ms=statistics.median(seconds) * 1e3,
        )


def distribute(
    model: GPT,
    settings: Settings,
    device: torch.device,
    timer: HookTimer,
    arm: Arm,
    bucket_mb: float | None = ONE_BUCKET_MB,
) -> Prepared:
    """Average gradients in an arm's way. ``bucket_mb`` is the size of DDP's buckets, and None its default."""
    if settings.parallelism in parallelism.ZERO_STAGES:
        config = parallelism.configuration(parallelism.ZERO_STAGES[settings.parallelism], arm.options)
        factor = functools.partial(learning_rate_factor, steps=settings.steps)
        engine = parallelism.make_engine(model, config, device, factor)

        def update_engine(loss: Tensor) -> None:
            engine.backward(loss)
            engine.step()

        return engine, engine, update_engine
    if settings.parallelism == "ddp":
        replica = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        state, hook = communication(arm, model)
        replica.register_comm_hook(state, timer.timed(hook))
    else:
        replica = model = parallelism.shard(model, settings.parallelism, arm.options, device)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=settings.learning_rate, weight_decay=WEIGHT_DECAY)
    return replica, model, stepping(optimizer, settings)


def stepping(
    optimizer: torch.optim.Optimizer, settings: Settings, then: Callable[[int], None] | None = None
) -> Callable[[Tensor], None]:
    """Return a function that takes a training step for a loss. It calls ``then`` with the number of steps so far."""
    factor = functools.partial(learning_rate_factor, steps=settings.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def update(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if then is not None:
            then(schedule.last_epoch)

    return update


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


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - (1 - FINAL_LEARNING_RATE) * step / steps)


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus, device: torch.device) -> float:
    """Return the mean loss on validation text, in nats per character."""
    generator = torch.Generator().manual_seed(99)
    losses = []
    for _ in range(VALIDATION_BATCHES):
        inputs, targets = sample_batch(corpus.validation, VALIDATION_BATCH, CONTEXT, generator)
        losses.append(next_token_loss(model, inputs.to(device), targets.to(device)).item())
    return statistics.fmean(losses)
