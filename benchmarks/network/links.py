"""Steps of every way to train on two hosts, against the rate of their link, and training losses against seconds.

python benchmarks/network/links.py times [--models …] [--rates 100 1000 none …] [--arms …] [--turns 3]
python benchmarks/network/links.py losses [--models …] [--arms …] [--steps 300]
python benchmarks/network/links.py report [--steps 300]

``times`` measures steps of two network namespaces with one worker each, in arms that take turns. It needs root and
iproute2. It replaces what benchmarks/results/links.json has of a model at a rate, after each rate. ``losses`` trains
once without a limited link, since training does not depend on it, and adds what is missing to
benchmarks/results/loss-per-byte.json after each arm. Both can be interrupted. ``report`` prints Markdown tables of
steps, of the seconds to a loss, of the rates above which all-reduce is faster, and of the errors of what
``python -m powersgd_triton plan`` predicts. It draws benchmarks/results/links.png.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist

from benchmarks import loss_against_size, loss_per_byte, trainings
from benchmarks.arms import prepare
from benchmarks.network import links_report, programs, turns
from benchmarks.network.turns import Row
from powersgd_triton import PowerSGDConfig
from powersgd_triton.comm.communicator import Communicator, wait
from powersgd_triton.demo.arms import ONE_BUCKET_MB, Arm, distribute
from powersgd_triton.demo.measure import HookTimer
from powersgd_triton.demo.model import CONTEXT, GPT, next_token_loss, read_corpus, sample_batch
from powersgd_triton.demo.train import BATCH_PER_WORKER, Settings
from powersgd_triton.planning.bucket_caps import ddp_buckets
from powersgd_triton.planning.cost import ComputeTime, Job
from powersgd_triton.planning.trial import measure_network, time_compute
from powersgd_triton.planning.tuning import MEASURED, WARM_UP

FILE, PICTURE = programs.RESULTS / "links.json", programs.RESULTS / "links.png"
WORKERS = 2
MODELS = {"0.8 M": (128, BATCH_PER_WORKER), "3.2 M": (256, 8), "9.8 M": (448, 4)}
"""{parameters: (width, sequences of a worker's batch)}. Batches keep a step near 0.2 s on one thread."""
RANK = 4
ALONE, FP32, BF16, TORCH, OURS = "no communication", "allreduce", "allreduce+bf16", f"torch:{RANK}", f"ours:{RANK}"
BESIDE = f"{ALONE}, 240 kB beside"
"""What the emulated link takes of the workers' cores: in each step, as many bytes travel as of 8-bit factors."""
UNSYNCED = ALONE, BESIDE
# With their losses.
TRAINED = (
    *(FP32, BF16, TORCH, OURS, f"{OURS}+int8", "ours:16+int8", "ours:20x", "ours:100x"),
    *(f"{OURS}+alternating", f"{OURS}+alternating+int8"),
)
AUTO = "ours:auto"
EVERY = 10
LOCAL = (
    *(f"local:ternary+every{EVERY}{delay}" for delay in ("", "+delay1", "+delay2")),
    *(f"local:sparse50x+every2+keep0.9{delay}" for delay in ("", "+delay1")),
)
"""Local steps. An exchange begins and ends within a turn, since the warm-up takes some steps of a round."""
SHARDED = [f"{parallelism} {arm}" for parallelism in ("hsdp", "zero1") for arm in (FP32, OURS)]
QUANTIZED = ("ours:bf16", "ours:int8", "ours:int4")
ARMS = (*UNSYNCED, *TRAINED, *QUANTIZED, AUTO, *SHARDED, *LOCAL)
"""Arms of the demo, which train with DDP unless the demo's name of another parallelism comes first."""
FEW_ARMS = (ALONE, FP32, BF16, OURS)
RATES: dict[float | None, Sequence[str]] = {
    30.0: FEW_ARMS,
    100.0: ARMS,
    300.0: FEW_ARMS,
    1000.0: ARMS,
    3000.0: FEW_ARMS,
    None: FEW_ARMS,
}
"""{Mbit/s of the link in either direction: arms}. None sets no limit."""
TABLE_RATES = (100.0, 1000.0)
STEPS, TURNS, SECONDS = 300, 3, 8.0
SEGMENTS = 8
"""Segments of a packet, so that the workers' cores do little of what network cards do. The burst of any link has more.
The counters miss the headers of all but one, 4% of the bytes."""
PACKAGES = ("torch", "deepspeed")


def measure(
    arms: Sequence[str],
    models: Sequence[str],
    rate: float | None,
    most_turns: int,
    limit: float = math.inf,
    timeout: float = 1200,
    segments: int = SEGMENTS,
) -> list[Row]:
    """Train all arms of all models at one rate.

    Args:
        arms: Some of ``ARMS``.
        models: Keys of ``MODELS``.
        rate: Mbit/s of the link in either direction. None sets no limit.
        most_turns: Most turns of an arm.
        limit: Seconds of steps after which an arm takes no further turn.
        timeout: Seconds until all must be done.
        segments: Most segments of a packet; see ``namespaces.network``.

    Raises:
        RuntimeError: No network can be made here, or a worker failed.
        TimeoutError: The workers were not done in time.
    """
    if most_turns < 1:
        raise ValueError(f"expected at least 1 turn; got {most_turns}")
    # JSON has no infinity.
    task = {"arms": list(arms), "models": list(models), "turns": most_turns, "limit": min(limit, timeout)}
    return turns.measure(__file__, WORKERS, 1, rate, task, timeout, {"DS_ACCELERATOR": "cpu"}, segments)


def work(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train all arms as one worker. Return bytes of its host and times of its steps. Runs inside a host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training, _ = read_corpus()
    network = measure_network(Communicator(), torch.device("cpu"))
    figures: list[dict[str, Any]] = []
    for name in task["models"]:
        times = _compute_times(MODELS[name][0])
        arms = {arm: _training(arm, *MODELS[name], training) for arm in task["arms"]}
        # Steps without communication are measured as those of local steps, to compare them.
        rounds = dict.fromkeys((ALONE, *LOCAL), EVERY) if any(arm in LOCAL for arm in arms) else {}
        found = turns.take_turns(name, arms, task["turns"], task["limit"], rounds)
        if ALONE in task["arms"]:
            alone = next(statistics.median(one["seconds"]) for one in found if one["arm"] == ALONE)
            job = Job(_buckets(MODELS[name][0]), alone, network)
            found = [{**one, "predicted": predict(one["arm"], job, times)} for one in found]
        figures += found
        del arms
        gc.collect()
    dist.destroy_process_group()
    return figures


def _buckets(width: int) -> list[dict[str, tuple[int, ...]]]:
    return ddp_buckets({name: tuple(p.shape) for name, p in reversed(list(GPT(width).named_parameters()))})


def _config(arm: str) -> PowerSGDConfig | None:
    """Return the configuration of an arm that compresses with DDP. None for the others."""
    if " " in arm or arm in LOCAL or not arm.startswith("ours") or arm == AUTO:
        return None
    return PowerSGDConfig(**(Arm.parse(arm, RANK).options or {}))


def _kind(config: PowerSGDConfig) -> tuple[str | None, str]:
    """Return what the time that compression computes depends on, but for the rank."""
    return str(config.quantize or config.wire_dtype or "float32"), config.algorithm


def _compute_times(width: int) -> dict[tuple[str | None, str], ComputeTime]:
    """Return the times that compression computes, as ``plan`` measures them."""
    buckets = _buckets(width)
    configs = {_kind(config): config for arm in ARMS if (config := _config(arm)) is not None}
    return {kind: time_compute(config, buckets, torch.device("cpu")) for kind, config in configs.items()}


def predict(arm: str, job: Job, times: Mapping[tuple[str | None, str], ComputeTime]) -> float | None:
    """Return the seconds of a step as ``plan`` predicts them. None for an arm that it does not know."""
    if arm in (FP32, BF16):
        return job.exact(4 if arm == FP32 else 2).seconds
    config = _config(arm)
    return None if config is None else job.compressed(config, times[_kind(config)]).seconds


def _training(name: str, width: int, batch: int, tokens: torch.Tensor) -> Callable[[], None]:
    """Return a function that trains one step. All arms begin with the same model and see the same data."""
    parallelism, text = ("ddp", FP32) if name in UNSYNCED else name.split() if " " in name else ("ddp", name)
    # The schedule of the learning rate must not end.
    settings = Settings(10**6, WORKERS, "cpu", parallelism=parallelism, width=width, batch=batch)
    torch.manual_seed(settings.seed)
    model, timer = GPT(width), HookTimer(torch.device(settings.device))
    replica: Any
    if name in LOCAL:
        replica, update = prepare(model, settings, timer, name)
    else:
        arm = Arm.parse(text, RANK)
        bucket_mb = ONE_BUCKET_MB if arm.method == "torch" else None
        replica, update = distribute(model, settings, timer, arm, bucket_mb)
    context = replica.no_sync if name in UNSYNCED else contextlib.nullcontext
    sent = torch.zeros(240_000 if name == BESIDE else 0, dtype=torch.uint8)
    received = sent.new_zeros(WORKERS * len(sent))
    generator = torch.Generator().manual_seed(settings.seed + 1 + dist.get_rank())

    def step() -> None:
        inputs, targets = sample_batch(tokens, batch, CONTEXT, generator)
        work = Communicator().all_gather(received, sent) if name == BESIDE else None
        with context():
            update(next_token_loss(replica, inputs, targets))
        wait(work)

    if name == AUTO:
        # It chooses from its first steps.
        for _ in range(WARM_UP + MEASURED + 1):
            step()
    return step


def record(rows: Sequence[Row], segments: int) -> None:
    """Write rows to the file in place of those of the same model, rate and arm."""
    measured = {**programs.environment(PACKAGES), "segments": segments}
    kept = {_key(old): old for old in _records()}
    kept |= {_key(new): {**new, **measured} for new in map(dataclasses.asdict, rows)}
    FILE.write_text(json.dumps(list(kept.values()), indent=1) + "\n")


def read() -> list[Row]:
    """Return the rows of the file: models and arms in the order of this program, by rising rate."""
    fields = [field.name for field in dataclasses.fields(Row)]
    rows = [Row(**{name: _tuples(old.get(name)) for name in fields}) for old in _records()]
    models = list(MODELS)
    return sorted(
        rows, key=lambda row: (models.index(row.model), row.megabits_per_second or math.inf, ARMS.index(row.arm))
    )


def _records() -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else []
    return records


def _key(one: Mapping[str, Any]) -> tuple[str, float | None, str]:
    return one["model"], one["megabits_per_second"], one["arm"]


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def losses_name(model: str) -> str:
    """Return the model's name in the records of losses."""
    width, batch = MODELS[model]
    suffix = "" if batch == BATCH_PER_WORKER else f", batch {batch}"
    return loss_against_size.name(width) + suffix


def train(models: Sequence[str], arms: Sequence[str], steps: int) -> None:
    """Train the arms whose losses are not recorded yet."""
    for model in models:
        width, batch = MODELS[model]
        trained = functools.partial(trainings.train_text, width=width, batch=batch)
        trainings.run(loss_per_byte.FILE, losses_name(model), trained, arms, [0], steps, WORKERS)


def curves(model: str, steps: int) -> dict[str, list[float]]:
    """Return {arm: training losses}, each the mean of ``trainings.CURVE_STEPS`` steps."""
    common = {"model": losses_name(model), "seed": 0, "steps": steps, "workers": WORKERS}
    found = {one["arm"]: one["curve"] for one in trainings.read(loss_per_byte.FILE) if common.items() <= one.items()}
    return {arm: found[arm] for arm in TRAINED if arm in found}


def report(steps: int) -> None:
    """Print the tables and draw the figure."""
    rows = read()
    if not rows:
        raise SystemExit(f"no times in {FILE}; measure them with: python benchmarks/network/links.py times")
    models = list(dict.fromkeys(row.model for row in rows))
    panels = {}
    for model in models:
        panel = links_report.Panel([row for row in rows if row.model == model], curves(model, steps))
        panels[model] = panel
        print(f"{model} parameters\n\n{links_report.steps_table(panel, ALONE, TABLE_RATES)}\n")
        if FP32 in panel.curves:
            print(f"{links_report.losses_table(panel, FP32, trainings.CURVE_STEPS, TABLE_RATES)}\n")
    print(links_report.crossovers_table(panels, OURS, (FP32, BF16)))
    print(f"\n{links_report.predictions_table(rows)}")
    links_report.draw(panels, FEW_ARMS, OURS, (FP32, BF16), TABLE_RATES, trainings.CURVE_STEPS, PICTURE)


def _rate(text: str) -> float | None:
    return None if text == "none" else float(text)


def main() -> None:
    if programs.worked(work):
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    options = {name: commands.add_parser(name) for name in ("times", "losses", "report")}
    for name in ("times", "losses"):
        options[name].add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    for name in ("losses", "report"):
        options[name].add_argument("--steps", type=int, default=STEPS, help="of a training (default: %(default)s)")
    options["losses"].add_argument("--arms", nargs="+", choices=TRAINED, default=TRAINED)
    times = options["times"]
    times.add_argument("--rates", nargs="+", type=_rate, default=list(RATES), help="Mbit/s, or none (default: six)")
    times.add_argument("--arms", nargs="+", choices=ARMS, help="(default: all at 100 Mbit/s and 1 Gbit/s, else four)")
    times.add_argument("--turns", type=int, default=TURNS, help=f"of {turns.TURN} steps (default: %(default)s)")
    times.add_argument(
        "--seconds", type=float, default=SECONDS, help="after which an arm takes no turn more (default: %(default)s)"
    )
    times.add_argument("--segments", type=int, default=SEGMENTS, help="most of a packet (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.command == "times":
        programs.prepare()
        for rate in arguments.rates:
            arms, segments = arguments.arms or RATES.get(rate, FEW_ARMS), arguments.segments
            rows = measure(arms, arguments.models, rate, arguments.turns, arguments.seconds, segments=segments)
            record(rows, segments)
            print(f"measured: {links_report.rate_text(rate)}", flush=True)
    elif arguments.command == "losses":
        train(arguments.models, arguments.arms, arguments.steps)
    else:
        report(arguments.steps)


if __name__ == "__main__":
    main()
