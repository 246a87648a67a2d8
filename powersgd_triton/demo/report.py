"""The demo's results: a table, a JSON file and a plot of the loss curves."""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import powersgd_triton
from powersgd_triton.demo.train import Arm, Result, Settings
from powersgd_triton.ranks.report import aligned

SMOOTHING = 0.95


def table(results: Mapping[Arm, Result]) -> str:
    """Return a table with one row of figures for each arm."""
    header = ["arm", "validation loss", "bytes/step/worker", "compression", "hook ms/step", "step ms"]
    rows = [
        [
            str(arm),
            f"{result.validation_loss:.4f}",
            f"{result.bytes_per_step:,.0f}",
            f"{result.compression:.1f}x",
            "–" if result.hook_ms is None else f"{result.hook_ms:.1f}",
            f"{result.step_ms:.1f}",
        ]
        for arm, result in results.items()
    ]
    lines = aligned([header, *rows], "<>>>>>")
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write_json(path: Path, settings: Settings, results: Mapping[Arm, Result]) -> None:
    """Write all measurements, with the versions, device and settings."""
    record = {
        "versions": {
            "powersgd_triton": powersgd_triton.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else platform.machine(),
        "settings": dataclasses.asdict(settings),
        "arms": [
            {
                **dataclasses.asdict(arm),
                "bytes_per_step": result.bytes_per_step,
                "compression": result.compression,
                **dataclasses.asdict(result),
            }
            for arm, result in results.items()
        ],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, results: Mapping[Arm, Result]) -> None:
    """Plot the smoothed training loss against steps and against bytes sent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for arm, result in results.items():
        losses = smoothed(result.losses)
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


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average, without a bias towards its start."""
    sums = itertools.accumulate(values, lambda total, value: SMOOTHING * total + value)
    weights = itertools.accumulate(itertools.repeat(1.0, len(values)), lambda total, one: SMOOTHING * total + one)
    return [total / weight for total, weight in zip(sums, weights, strict=True)]
