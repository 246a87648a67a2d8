"""``python -m powersgd_triton demo``: train one model with each way of averaging gradients, and compare the results."""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import powersgd_triton
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.demo.arms import MODES, PARALLELISMS, ZERO_STAGES, Arm, distribute
from powersgd_triton.demo.train import REPLICAS, Result, Settings, train
from powersgd_triton.planning.command import positive
from powersgd_triton.ranks.report import aligned

BUDGETED = "ours:20x"
"""About the bytes of rank 4 in fp32."""
SMOOTHING = 0.95


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
    parallelism, output = arguments.parallelism, arguments.output
    try:
        _check_requirements(parallelism)
        device = _device(arguments.device, arguments.workers)
        arms = _arms(arguments.arms, arguments.rank, parallelism, arguments.workers)
        output.mkdir(parents=True, exist_ok=True)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    settings = Settings(arguments.steps, arguments.workers, device, arguments.seed, parallelism)
    where = f"{settings.workers} workers on {device} ({'NCCL' if device == 'cuda' else 'gloo'})"
    print(f"{where}, {PARALLELISMS[parallelism]}, {settings.steps} steps", flush=True)
    results = {arm: train(settings, str(arm), functools.partial(distribute, arm=arm)) for arm in arms}
    _write_json(output / "results.json", settings, results)
    _draw(output / "loss.png", results)
    print(f"\n{_table(results)}\n\n{_in_words(results)}written: {output / 'loss.png'}, {output / 'results.json'}")
    return 0


def _check_requirements(parallelism: str) -> None:
    needed = {"matplotlib": "demo", "tqdm": "demo"}
    if parallelism in ZERO_STAGES:
        needed["deepspeed"] = "deepspeed"
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({needed[name] for name in missing}))
        raise RuntimeError(f"{' and '.join(missing)} not installed; in a clone, run pip install '.[{extras}]'")


def _device(choice: str, workers: int) -> str:
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if choice == "cuda" and gpus < workers:
        raise ValueError(f"--device cuda needs NCCL and a GPU for each of {workers} workers; found {gpus}")
    if choice == "auto":
        return "cuda" if gpus >= max(workers, 2) else "cpu"
    return choice


def _arms(given: Sequence[str] | None, rank: int, parallelism: str, workers: int) -> list[Arm]:
    if parallelism == "hsdp" and workers % REPLICAS:
        raise ValueError(f"hsdp arranges workers in {REPLICAS} replicas; {workers} is not a multiple of {REPLICAS}")
    everything = ["allreduce", "torch", "ours", BUDGETED] if parallelism == "ddp" else ["allreduce", "ours"]
    arms = [Arm.parse(text, rank) for text in dict.fromkeys(given or everything)]
    for arm in (arm for arm in arms if arm.method == "ours"):
        PowerSGDConfig(**(arm.options or {}))
    if parallelism != "ddp" and any(arm.method == "torch" or (arm.method == "allreduce" and arm.modes) for arm in arms):
        raise ValueError(f"torch's hooks work with DistributedDataParallel only, not with {parallelism}")
    return arms


def _table(results: Mapping[Arm, Result]) -> str:
    """Return a table with one row of figures for each arm."""
    rows = [["arm", "validation loss", "bytes/step/worker", "compression", "hook ms/step", "step ms"]]
    for arm, result in results.items():
        hook = "–" if result.hook_ms is None else f"{result.hook_ms:.1f}"
        figures = f"{result.validation_loss:.4f}", f"{result.bytes_per_step:,.0f}", f"{result.compression:.1f}x"
        rows.append([str(arm), *figures, hook, f"{result.step_ms:.1f}"])
    head, *lines = aligned(rows, "<>>>>>")
    return "\n".join([head, "-" * len(head), *lines])


def _in_words(results: Mapping[Arm, Result]) -> str:
    """Return what the last arm saves and costs against an all-reduce, if that is among the others."""
    exact = next((result for arm, result in results.items() if str(arm) == "allreduce"), None)
    arm, result = [*results.items()][-1]
    if exact is None or result is exact:
        return ""
    if not exact.bytes_per_step:
        return "One worker sends nothing.\n\n"
    loss = 100 * (result.validation_loss / exact.validation_loss - 1)
    time = result.step_ms - exact.step_ms
    return (
        f"{arm} sent {result.compression:.1f} times fewer bytes than the all-reduce, for a validation loss "
        f"{abs(loss):.1f}% {'above' if loss > 0 else 'below'} its, and took {abs(time):.0f} ms a step "
        f"{'more' if time > 0 else 'less'} here, where workers share a machine and no link is slow.\n\n"
    )


def _write_json(path: Path, settings: Settings, results: Mapping[Arm, Result]) -> None:
    """Write all measurements, with the versions, device and settings."""
    versions = {"powersgd_triton": powersgd_triton.__version__, "torch": torch.__version__}
    arms = []
    for arm, result in results.items():
        # JSON has no infinity.
        compression = result.compression if result.bytes_per_step else None
        derived = {"bytes_per_step": result.bytes_per_step, "compression": compression}
        arms.append({**dataclasses.asdict(arm), **derived, **dataclasses.asdict(result)})
    record = {
        "versions": {**versions, "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else platform.machine(),
        "settings": dataclasses.asdict(settings),
        "arms": arms,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _draw(path: Path, results: Mapping[Arm, Result]) -> None:
    """Plot the smoothed training loss against steps and against bytes sent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for arm, result in results.items():
        losses = _smoothed(result.losses)
        label = f"{arm} ({result.validation_loss:.3f}, {result.compression:.1f}x)"
        by_step.plot(range(1, len(losses) + 1), losses, label=label)
        by_bytes.plot([sent / 1e6 for sent in result.bytes_sent], losses)
    by_step.set(xlabel="step", ylabel="training loss, nats per character (smoothed)")
    by_bytes.set(xlabel="MB sent by each worker", xscale="log")
    by_step.legend(title="arm (validation loss, compression)")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average, without a bias towards its start."""
    sums = itertools.accumulate(values, lambda total, value: SMOOTHING * total + value)
    weights = itertools.accumulate([1.0] * len(values), lambda total, one: SMOOTHING * total + one)
    return [total / weight for total, weight in zip(sums, weights, strict=True)]
