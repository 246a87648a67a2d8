"""``python -m powersgd_triton plan``: predict the time of a step with and without compression, and recommend one."""

import argparse
import dataclasses
import importlib
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from powersgd_triton.autoload import SECTION
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import AUTO, PowerSGDConfig
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import Tensors
from powersgd_triton.planning import cost
from powersgd_triton.planning.bucket_caps import DEFAULT_CAP, best_cap, cap_seconds, cap_table, ddp_buckets
from powersgd_triton.planning.cost import TOLERANCE, WIDTHS, ComputeTime, Job, Network, Prediction
from powersgd_triton.planning.models import MODELS
from powersgd_triton.planning.trial import measure_network, seconds_of, time_compute
from powersgd_triton.ranks.report import RankReport, aligned

STEPS = 8
"""Steps of a model whose time is measured, after two that are not."""
GPU = "h100"
"""The GPU for which compute is predicted on a machine without one."""
FIXED = ((4, "float32"), (16, "int4"))
"""Ranks and widths that are shown beside the budgets."""

LARGEST_START = 100
"""The largest compression to start with, by docs/choosing.md."""

Rows = list[tuple[str, Prediction]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model",
        help=f"{', '.join(MODELS)}, or package.module:function. The function returns the model, or (model, step), "
        "where step() does what a training step does without communication",
    )
    parser.add_argument("--nodes", type=positive, default=2, help="number of nodes (default: 2)")
    parser.add_argument("--node-size", type=positive, default=1, help="workers of a node (default: 1)")
    parser.add_argument("--bandwidth", type=float, default=10.0, help="Gbit/s of a node's network card (default: 10)")
    parser.add_argument("--inside", type=float, default=1600.0, help="Gbit/s of a worker in its node (default: 1600)")
    parser.add_argument("--latency", type=float, default=10.0, help="µs of a message between nodes (default: 10)")
    parser.add_argument("--measure", action="store_true", help="measure the network of this torchrun job instead")
    parser.add_argument("--two-levels", action="store_true", help='as with node_group="auto"')
    parser.add_argument("--step-ms", type=float, help="time of a step without communication (default: measured)")
    parser.add_argument(
        "--device",
        help="where training runs: cuda or cpu, where compression is timed; or a GPU for which its time is estimated: "
        f"{', '.join(cost.GPUS)} (default: cuda; without one, {GPU} if --step-ms is given, else cpu)",
    )
    parser.add_argument(
        "--bucket-caps", action="store_true", help="only print which bucket_cap_mb suits which link, at rank 4"
    )
    parser.add_argument("--max-overhead", type=float, help="largest share of a step that compression may compute")
    parser.add_argument("--write", type=Path, help="ds_config.json in which the section is written")


def run(arguments: argparse.Namespace) -> int:
    """Print the predictions and the recommendation. Return 2 if an argument is wrong."""
    try:
        here = "cpu" if arguments.step_ms is None else GPU
        name = arguments.device or ("cuda" if torch.cuda.is_available() else here)
        gpu = name if name in cost.GPUS else None
        if gpu is None and name.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"--device must be cpu, cuda or one of {', '.join(cost.GPUS)}; got {name}")
        if gpu is not None and arguments.step_ms is None:
            raise ValueError(f"--step-ms is missing: a step on {gpu} cannot be measured here")
        device = torch.device(name if gpu is None else "cpu")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device {name} cannot be used here")
        if device.type == "cuda":
            # Workers of a node have a GPU each.
            device = torch.device("cuda", device.index or int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        for name in ("step-ms", "bandwidth", "inside", "latency"):
            value = getattr(arguments, name.replace("-", "_"))
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"--{name} must be a positive number; got {value}")
        tensors, step = load(arguments.model, arguments.step_ms, device)
        config = PowerSGDConfig(compression=AUTO, max_overhead=arguments.max_overhead)
        ds_config = None if arguments.write is None else json.loads(arguments.write.read_text())
        if not isinstance(ds_config, dict | None):
            raise ValueError(f"{arguments.write} must contain an object; got a {type(ds_config).__name__}")
        if arguments.measure and not dist.is_torchelastic_launched():
            raise ValueError("--measure needs workers: start it by torchrun -m powersgd_triton plan")
    except (ValueError, TypeError, RuntimeError, OSError, ImportError, AttributeError) as error:
        where = f"{arguments.write} is not JSON: " if isinstance(error, json.JSONDecodeError) else ""
        print(f"plan: {where}{error}", file=sys.stderr)
        return 2
    given = (arguments.bandwidth * 1e9 / 8, arguments.inside * 1e9 / 8, arguments.latency * 1e-6)
    network = Network(arguments.nodes, arguments.node_size, *given)
    if arguments.bucket_caps:
        print(cap_table(Job([tensors], step, network), PowerSGDConfig(rank=4)))
        return 0
    if arguments.measure:
        if not dist.is_initialized():
            dist.init_process_group()
        network = measure_network(Communicator(), device)
    job = Job(ddp_buckets(tensors), step, network, arguments.two_levels, late=gpu is None and device.type == "cpu")
    # All workers of a job time compression, since they do in training too.
    rows, chosen = predictions(job, config, gpu or device)
    if arguments.measure and dist.get_rank() > 0:
        return 0
    count = sum(map(math.prod, tensors.values()))
    print(f"{count:,} parameters in {len(job.buckets)} buckets, {step * 1e3:.4g} ms of compute")
    print(_describe(network))
    print(f"compression: {'timed on ' + str(device) if gpu is None else 'estimated for ' + gpu}", end="\n\n")
    print(table(rows, chosen))
    print("\n" + recommendation(rows, chosen))
    if chosen.config is not None:
        seconds = cap_seconds(job, chosen.config)
        tried = ", ".join(f"{cap}: {milliseconds(value)}" for cap, value in seconds.items())
        cap = best_cap(seconds)
        advice = "leave bucket_cap_mb out" if cap == DEFAULT_CAP else f"bucket_cap_mb={cap}"
        print(f"DDP: {advice}. Milliseconds of a step without own compute, by MB: {tried}.")
        if arguments.model not in MODELS:
            layout = Layout.build(job.tensors, chosen.config).with_ranks(lambda s: chosen.ranks.get(s.name, 0))
            print(f"\n{RankReport.of(layout, chosen.config, {})}")
        if ds_config is not None:
            before = ds_config.get(SECTION)
            ds_config[SECTION] = {**_of_adapter(before), **section(chosen.config)}
            arguments.write.write_text(json.dumps(ds_config, indent=2) + "\n")
            replaced = "" if before is None else f" in place of {json.dumps(before)}"
            print(f"\nwritten to {arguments.write}: {json.dumps({SECTION: ds_config[SECTION]})}{replaced}")
    elif ds_config is not None:
        print(f"\n{arguments.write} is left as it is")
    return 0


def load(model: str, step_ms: float | None, device: torch.device) -> tuple[Tensors, float]:
    """Return a model's gradients {name: shape}, last layer first, and the seconds of a step without communication.

    ValueError: The model is not known, or the time of its step is neither given nor can be measured.
    """
    if model in MODELS:
        if step_ms is None:
            raise ValueError(f"--step-ms is missing: it cannot be measured for {model}, of which only shapes are known")
        return {str(number): shape for number, shape in enumerate(MODELS[model])}, step_ms / 1e3
    module, _, name = model.partition(":")
    if not name:
        raise ValueError(f"expected {', '.join(MODELS)} or package.module:function; got {model!r}")
    sys.path.insert(0, "")
    made = getattr(importlib.import_module(module), name)()
    found, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(found, nn.Module):
        raise ValueError(f"{model} must return a torch.nn.Module or (module, step); got {type(found).__name__}")
    tensors = {name: tuple(p.shape) for name, p in reversed([*found.named_parameters()]) if p.requires_grad}
    if step_ms is not None:
        return tensors, step_ms / 1e3
    if step is None:
        raise ValueError(f"--step-ms is missing, and {model} returns no function that takes a step")
    seconds = [seconds_of(step, device) for _ in range(2 + STEPS)]
    return tensors, statistics.median(seconds[2:])


def predictions(job: Job, config: PowerSGDConfig, device: torch.device | str) -> tuple[Rows, Prediction]:
    """Return named predictions, and the recommended one. Compression is timed on a device, or predicted for a GPU."""
    rows: Rows = [("all-reduce, fp32", job.exact(4)), ("all-reduce, bf16", job.exact(2))]
    times: dict[PowerSGDConfig, ComputeTime] = {}
    for kind in cost.kinds(config):
        if isinstance(device, str):
            times[kind] = cost.predicted_compute(device, job.tensors, kind)
        else:
            what = f"factors in {kind.wire_dtype}" if kind.quantize is None else f"gradients in {kind.quantize}"
            print(f"timing compression with {what} …", file=sys.stderr, flush=True)
            times[kind] = time_compute(kind, job.buckets, device)
    found = cost.options(job, times, config.max_overhead)
    rows += [(f"quantize={row.config.quantize}", row) for row in found if row.config and row.config.quantize]
    for rank, width in FIXED:
        time = next(time for kind, time in times.items() if kind.wire_dtype == width)
        rows.append((f"rank {rank}, {width}", job.compressed(PowerSGDConfig(rank=rank, wire_dtype=width), time)))
    chosen = cost.choose(min((row for _, row in rows[:2]), key=lambda row: row.seconds), found)
    # Few rows: factors in fp32 send more for the same loss, and pay only where the width costs compute.
    for row in found:
        if row.config and row.config.planned and (row is chosen or row.config.wire_dtype == WIDTHS[0]):
            rows.append((f"compression={row.config.compression:g}, {row.config.wire_dtype}", row))
    return rows, chosen


def _describe(network: Network) -> str:
    where = f"{network.nodes} × {network.node_size} workers"
    if network.nodes == 1:
        return f"{where}, {network.inside * 8e-9:.4g} Gbit/s inside the node, {network.inside_latency * 1e6:.4g} µs"
    return f"{where}, {network.card * 8e-9:.4g} Gbit/s a node, {network.latency * 1e6:.4g} µs"


def table(rows: Rows, chosen: Prediction) -> str:
    """Return the predictions as text. The recommended one has a mark."""
    exact = rows[0][1]
    lines = [("", "bytes a step", "largest rank", "ms a step", "as fast as fp32", "own compute")]
    for name, row in rows:
        mark = " *" if row.config is not None and row.config == chosen.config else ""
        rank = "" if row.config is None else str(max(row.ranks.values(), default=""))
        ratios = f"{exact.seconds / row.seconds:.2f}x", f"{row.overhead:.0%}"
        lines.append((name + mark, f"{row.bytes_per_step:,.0f}", rank, milliseconds(row.seconds), *ratios))
    return "\n".join(aligned(lines, "<>>>>>"))


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, in at least three digits."""
    return f"{seconds * 1e3:,.{0 if seconds >= 0.1 else 1}f}"


def recommendation(rows: Rows, chosen: Prediction) -> str:
    """Return one or two sentences."""
    if chosen.config is None:
        faster = f"is more than {TOLERANCE:.0%} faster than the all-reduce in bf16"
        return f"Recommended: do not compress. Nothing that may be chosen {faster}."
    options = ", ".join(f"{key}={value!r}" for key, value in section(chosen.config).items())
    exact, half = (row.seconds / chosen.seconds for _, row in rows[:2])
    large = rows[0][1].bytes_per_step > LARGEST_START * chosen.bytes_per_step
    caution = f" Start with compression={LARGEST_START} or less: see docs/choosing.md." if large else ""
    return (
        f"Recommended: PowerSGDConfig({options}). A step is predicted to be {exact:.1f}x as fast as with an all-reduce "
        f"in fp32, and {half:.2f}x as fast as in bf16.{caution}"
    )


def section(config: PowerSGDConfig) -> dict[str, Any]:
    """Return the fields of a budget, or of quantized gradients, that differ from the defaults."""
    key = "compression" if config.quantize is None else "quantize"
    given = {key: getattr(config, key)}
    default = PowerSGDConfig(**given).to_dict()
    return given | {name: value for name, value in config.to_dict().items() if value != default[name]}


def _of_adapter(section: Any) -> dict[str, Any]:
    """Return what a section of ds_config.json says besides fields of ``PowerSGDConfig``, such as ``parameters``."""
    fields = [field.name for field in dataclasses.fields(PowerSGDConfig)]
    return {key: value for key, value in section.items() if key not in fields} if isinstance(section, dict) else {}


def positive(text: str) -> int:
    """Parse an argument of the command line that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value
