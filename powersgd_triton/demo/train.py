"""Training of the demo's model by several processes, which average gradients in any way."""

import dataclasses
import datetime
import functools
import gc
import math
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from powersgd_triton.demo.measure import HookTimer, Traffic
from powersgd_triton.demo.model import CONTEXT, GPT, WIDTH, next_token_loss, read_corpus, sample_batch

BATCH_PER_WORKER = 16
LEARNING_RATE = 3e-3
"""At the default width. Wider models have a rate inversely proportional to their width."""
WEIGHT_DECAY = 0.01
WARMUP_STEPS, FINAL_LEARNING_RATE = 30, 0.1
VALIDATION_BATCHES, VALIDATION_BATCH = 20, 32
SHOWN = 20
"""Last steps whose mean loss the progress bar shows."""
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=300)
PRELOADED = ["powersgd_triton.demo.arms", "tqdm"]
"""Modules that all workers need. They are imported once, for the workers of all arms."""
REPLICAS = 2
"""Replicas of "hsdp"."""
# All-gathers carry parameters. A reduce-scatter counts like a whole all-reduce.
SHARDED_WEIGHTS = {"all_reduce": 1, "reduce_scatter_tensor": 2, "reduce_scatter_single": 2}
# With HSDP, reduce-scatters stay inside a replica, and the demo counts traffic between replicas.
WEIGHTS: dict[str, dict[str, int] | None] = {"ddp": None, "hsdp": {"all_reduce": 1}}
"""{parallelism: ``Traffic.weights`` that count gradients only}. The others have ``SHARDED_WEIGHTS``."""

T = TypeVar("T")


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
    rate: float = LEARNING_RATE

    @property
    def learning_rate(self) -> float:
        return self.rate * WIDTH / self.width


Prepared = tuple[nn.Module, Callable[[Tensor], object]]
"""(model to train and to validate, function that takes a training step for a loss)."""
Prepare = Callable[[GPT, Settings, HookTimer], Prepared]
"""Makes a model ready for training with other workers. It is pickled."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One worker's figures for one arm. Losses are in nats per token, times are medians over steps.

    Attributes:
        bytes_sent: Bytes up to and including each step, on the scale of ``Traffic.as_all_reduces``.
        sent, received: Bytes that this worker sends and receives in a step, as a ring sends them. Means over steps.
        gradient_bytes: Bytes of gradients that a worker would send in a step without compression.
        hook_ms: None if there is no hook.
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
        return self.bytes_sent[-1] / len(self.bytes_sent)

    @property
    def compression(self) -> float:
        return self.gradient_bytes / self.bytes_per_step if self.bytes_per_step else math.inf


def train(settings: Settings, title: str, prepare: Prepare) -> Result:
    """Train in new processes, which ``prepare`` their models. Show the progress of worker 0 under ``title``.

    Losses are averaged over workers, other figures are those of worker 0. Raises the errors of ``run_workers``.
    """
    task = functools.partial(_train_worker, settings=settings, title=title, prepare=prepare)
    results = run_workers(task, settings.workers, 900 + 3 * settings.steps, settings.device)
    losses = [statistics.fmean(step) for step in zip(*(result.losses for result in results), strict=True)]
    return dataclasses.replace(results[0], losses=losses)


def _train_worker(worker: int, settings: Settings, title: str, prepare: Prepare) -> Result:
    from tqdm import tqdm

    device = torch.device(f"cuda:{worker}" if settings.device == "cuda" else "cpu")
    torch.manual_seed(settings.seed)
    model, timer = GPT(settings.width).to(device), HookTimer(device)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if settings.parallelism == "hsdp":
        gradient_bytes = gradient_bytes * REPLICAS // settings.workers
    training, validation = read_corpus()
    generator = torch.Generator().manual_seed(settings.seed + 1 + worker)
    traffic = Traffic(WEIGHTS.get(settings.parallelism, SHARDED_WEIGHTS))
    losses, bytes_sent, seconds = list[float](), list[float](), list[float]()
    # DeepSpeed looks up the collectives when it starts, so counting must begin before that.
    with traffic.counting():
        replica, update = prepare(model, settings, timer)
        traffic.clear()
        interval = 0.5 if sys.stderr.isatty() else 10
        bar = tqdm(total=settings.steps, desc=f"{title:<16}", unit="step", mininterval=interval, disable=worker > 0)
        for _ in range(settings.steps):
            begin = time.perf_counter()
            inputs, targets = sample_batch(training, settings.batch, CONTEXT, generator)
            loss = next_token_loss(replica, inputs.to(device), targets.to(device))
            update(loss)
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
            bytes_sent.append(traffic.as_all_reduces)
            mean = statistics.fmean(losses[-SHOWN:])
            bar.set_postfix_str(f"mean loss {mean:.3f}, {bytes_sent[-1] / 1e6:.1f} MB sent", refresh=False)
            bar.update()
        bar.close()
    return Result(
        losses,
        bytes_sent,
        sent=traffic.sent / settings.steps,
        received=traffic.received / settings.steps,
        validation_loss=validation_loss(replica, validation, device),
        gradient_bytes=gradient_bytes,
        hook_ms=timer.median_ms(),
        step_ms=statistics.median(seconds) * 1e3,
    )


def stepping(settings: Settings, *optimizers: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """Return a function that takes a training step for a loss."""
    factor = functools.partial(learning_rate_factor, steps=settings.steps)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]

    def update(loss: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()

    return update


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - (1 - FINAL_LEARNING_RATE) * step / steps)


@torch.no_grad()
def validation_loss(model: nn.Module, text: Tensor, device: torch.device) -> float:
    """Return the mean loss on validation text, in nats per character."""
    generator = torch.Generator().manual_seed(99)
    losses = []
    for _ in range(VALIDATION_BATCHES):
        inputs, targets = sample_batch(text, VALIDATION_BATCH, CONTEXT, generator)
        losses.append(next_token_loss(model, inputs.to(device), targets.to(device)).item())
    return statistics.fmean(losses)


def run_workers(task: Callable[[int], T], workers: int, timeout: float, device: str = "cpu") -> list[T]:
    """Call ``task(worker)`` in new processes that form a process group. Return the results, ordered by worker.

    The task and its results are pickled. The device is "cpu", for one thread each, or "cuda", for one GPU each.

    Raises:
        TimeoutError: The workers were not done after ``timeout`` seconds. They have been killed.
        torch.multiprocessing.ProcessException: A worker failed.
    """
    # A process reads this when it loads torch. More threads than cores slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (task, workers, device, Path(folder))
        # Workers are copies of a process that has imported torch, which takes a new process seconds.
        mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
        context: Any = mp.start_processes(  # type: ignore[attr-defined]
            _work, arguments, nprocs=workers, join=False, daemon=True, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout
        while not context.join(timeout=5):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{workers} workers were not done after {timeout:g} s")
        return [pickle.loads((Path(folder) / f"result-{worker}").read_bytes()) for worker in range(workers)]


def _work(worker: int, task: Callable[[int], object], workers: int, device: str, folder: Path) -> None:
    if device == "cuda":
        torch.cuda.set_device(worker)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend="nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(str(folder / "store"), workers),  # type: ignore[attr-defined]
        rank=worker,
        world_size=workers,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        result = task(worker)
    finally:
        # Objects in reference cycles may hold the group. They must not outlive it.
        gc.collect()
        dist.destroy_process_group()
    (folder / f"result-{worker}").write_bytes(pickle.dumps(result))
