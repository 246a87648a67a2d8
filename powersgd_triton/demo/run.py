"""``python -m powersgd_triton demo``: train one model with each way of averaging gradients, and compare the results."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from powersgd_triton.demo import report
from powersgd_triton.demo.parallelism import PARALLELISMS, ZERO_STAGES, check_workers
from powersgd_triton.demo.train import MODES, Arm, Prepare, Result, Settings, distribute, train_worker
from powersgd_triton.demo.workers import run_workers
from powersgd_triton.plan import positive

BUDGETED = "ours:20x"
"""About the bytes of rank 4 in fp32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="allreduce, allreduce+bf16, torch or ours, with a rank as in ours:4; for ours also a budget, as in "
        f"ours:20x for 20 times fewer bytes, and modes, as in ours:32+alternating ({', '.join(MODES)}) (default: "
        f"allreduce, torch, ours and {BUDGETED}; torch and the budget only with ddp)",
    )
    parser.add_argument(
        "--parallelism",
        choices=list(PARALLELISMS),
        default="ddp",
        help="; ".join(f"{name}: {what}" for name, what in PARALLELISMS.items()) + " (default: ddp)",
    )
    parser.add_argument("--rank", type=positive, default=16, help="rank of arms without one (default: 16)")
    parser.add_argument("--steps", type=positive, default=600, help="training steps (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and the batches (default: 0)")
    parser.add_argument("--workers", type=positive, default=2, help="number of processes (default: 2)")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto selects CUDA if there are at least two GPUs and one for each worker (default: auto)",
    )
    parser.add_argument("--output", type=Path, default=Path("demo-results"), help="folder (default: demo-results)")


def run(arguments: argparse.Namespace) -> int:
    """Train all arms one after the other and report the results."""
    try:
        _check_requirements(arguments.parallelism)
        device = _device(arguments.device, arguments.workers)
        settings = Settings(arguments.steps, arguments.workers, device, arguments.seed, arguments.parallelism)
        arms = _arms(arguments, settings)
    except (ValueError, RuntimeError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    backend = "NCCL" if settings.device == "cuda" else "gloo"
    where = f"{settings.workers} workers on {settings.device} ({backend}), {PARALLELISMS[settings.parallelism]}"
    print(f"{where}, {settings.steps} steps", flush=True)
    results = {arm: train(settings, str(arm), functools.partial(distribute, arm=arm)) for arm in arms}
    report.write_json(arguments.output / "results.json", settings, results)
    report.draw(arguments.output / "loss.png", results)
    print(f"\n{report.table(results)}\n\nwritten: {arguments.output / 'loss.png'}, {arguments.output / 'results.json'}")
    return 0


def train(settings: Settings, title: str, prepare: Prepare) -> Result:
    """Train in new processes. Losses are averaged over workers, other figures are those of worker 0.

    The arguments are those of ``train_worker``; ``prepare`` is pickled. Raises the errors of ``run_workers``.
    """
    task = functools.partial(train_worker, settings=settings, title=title, prepare=prepare)
    results = run_workers(task, settings.workers, timeout=900 + 3 * settings.steps)
    losses = [statistics.fmean(step) for step in zip(*(result.losses for result in results), strict=True)]
    return dataclasses.replace(results[0], losses=losses)


def _arms(arguments: argparse.Namespace, settings: Settings) -> list[Arm]:
    check_workers(settings.parallelism, settings.workers)
    everything = ["allreduce", "torch", "ours", BUDGETED] if settings.parallelism == "ddp" else ["allreduce", "ours"]
    arms = [Arm.parse(text, arguments.rank) for text in dict.fromkeys(arguments.arms or everything)]
    hooks = [arm for arm in arms if arm.method == "torch" or (arm.method == "allreduce" and arm.modes)]
    if settings.parallelism != "ddp" and hooks:
        raise ValueError(f"torch's hooks work with DistributedDataParallel only, not with {settings.parallelism}")
    return arms


def _device(choice: str, workers: int) -> str:
    """Return 'cpu' or 'cuda'."""
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if choice == "cuda" and gpus < workers:
        raise ValueError(f"--device cuda needs NCCL and a GPU for each of {workers} workers; found {gpus}")
    if choice == "auto":
        return "cuda" if gpus >= max(workers, 2) else "cpu"
    return choice


def _check_requirements(parallelism: str) -> None:
    needed = {"matplotlib": "demo", "tqdm": "demo"}
    if parallelism in ZERO_STAGES:
        needed["deepspeed"] = "deepspeed"
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({needed[name] for name in missing}))
        raise RuntimeError(f"{' and '.join(missing)} not installed; run pip install 'powersgd_triton[{extras}]'")
